// Partial results over disjoint keys become one: l = log sum exp(l_s), o = sum exp(l_s - l) o_s (contract, Splitting and merging).
//
// One warp per (row, head). A state with l_s = -inf means 'no keys': its payload is not read, whatever it holds. Every value is read
// before it is written by the lane that owns it, so the result may lie in one of the states.
#include "attn/state.cuh"
#include "ptx/math.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) merge_states(const __grid_constant__ cf::MergeParams params) {
  using namespace cf;
  const int lane = threadIdx.x % kWarpSize;
  const attn::Row row = attn::row_of_warp(static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize, params.len, params.heads);
  if (row.batch >= params.batch) return;

  float top = -kInfinity;
  for (int i = 0; i < params.num_states; ++i) top = fmaxf(top, *attn::lse_of(params.states[i], row));
  const bool is_empty = top == -kInfinity;
  float total = 0.0f;
  for (int i = 0; i < params.num_states && !is_empty; ++i)
    total += ptx::exp2((*attn::lse_of(params.states[i], row) - top) * kLog2E);
  const float lse = is_empty ? top : top + ptx::log2(total) * kLn2;

  for (int col = lane; col < params.head_dim; col += kWarpSize) {
    float sum = 0.0f;
    for (int i = 0; i < params.num_states; ++i) {
      const float state_lse = *attn::lse_of(params.states[i], row);
      if (state_lse == -kInfinity) continue;
      sum += ptx::exp2((state_lse - top) * kLog2E) * attn::read(params.states[i], attn::offset_of(params.states[i], row) + col);
    }
    attn::write(params.merged, attn::offset_of(params.merged, row) + col, is_empty ? 0.0f : sum / total);
  }
  __syncwarp();  // every lane has read the states' lse
  if (lane == 0) *attn::lse_of(params.merged, row) = lse;
}
