// Partial results over disjoint keys become one: l = log sum exp(l_s), o = sum exp(l_s - l) o_s (contract, Splitting and merging).
//
// One warp per (row, head). A state with l_s = -inf means 'no keys': its payload is not read, whatever it holds. Every value is read
// before it is written by the lane that owns it, so the result may lie in one of the states.
#include "attn/state.cuh"
#include "ptx/math.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
using Accum = AccumElement;

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) merge_states(const __grid_constant__ cf::MergeParams params) {
  using namespace cf;
  const int lane = threadIdx.x % kWarpSize;
  const attn::Row row = attn::row_of_warp(static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize, params.len, params.heads);
  if (row.batch >= params.batch) return;

  Accum top = -kInfinity;
  for (int i = 0; i < params.num_states; ++i) top = ptx::max(top, attn::read_lse<Accum>(params.states[i], row));
  const bool is_empty = top == -kInfinity;
  const auto weight = [&](Accum lse) { return ptx::exp2((lse - top) * Accum(kLog2E)); };
  Accum total = 0;
  for (int i = 0; i < params.num_states && !is_empty; ++i) total += weight(attn::read_lse<Accum>(params.states[i], row));
  const Accum lse = is_empty ? top : top + ptx::log2(total) * Accum(kLn2);

  const State& merged = params.merged;
  for (int col = lane; col < params.head_dim; col += kWarpSize) {
    Accum sum = 0;
    for (int i = 0; i < params.num_states; ++i) {
      const State& state = params.states[i];
      const Accum state_lse = attn::read_lse<Accum>(state, row);
      if (state_lse == -kInfinity) continue;
      sum += weight(state_lse) * attn::read<Accum>(state.out, state.out_type, attn::out_at(state, row) + col);
    }
    attn::write(merged.out, merged.out_type, attn::out_at(merged, row) + col, is_empty ? Accum(0) : sum / total);
  }
  __syncwarp();  // every lane has read the states' lse
  if (lane == 0) attn::write(merged.lse, merged.lse_type, attn::lse_at(merged, row), lse);
}
