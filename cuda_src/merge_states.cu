// Partial results over disjoint keys become one: l = log sum exp(l_s), o = sum exp(l_s - l) o_s (contract, Splitting and merging).
//
// One warp per (row, head). A state with l_s = -inf means 'no keys': its payload is not read, whatever it holds. Every value is read
// before it is written by the lane that owns it, so the result may lie in one of the states.
#include "params.cuh"
#include "ptx/math.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;

__device__ __forceinline__ float read_state(const MergeState& state, int64 i) {
  if (state.out_type == 0) return to_float(static_cast<const fp16*>(state.out)[i]);
  if (state.out_type == 1) return to_float(static_cast<const bf16*>(state.out)[i]);
  return static_cast<const float*>(state.out)[i];
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) merge_states(const __grid_constant__ cf::MergeParams params) {
  using namespace cf;
  const int lane = threadIdx.x % kWarpSize;
  const int64 item = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (item >= static_cast<int64>(params.batch) * params.len * params.heads) return;
  const int head = item % params.heads;
  const int row = item / params.heads % params.len;
  const int batch = item / params.heads / params.len;

  const auto read_lse = [&](const MergeState& s) {
    return static_cast<const float*>(s.lse)[batch * s.lse_stride_b + head * s.lse_stride_h + row * s.lse_stride_n];
  };
  float top = -kInfinity;
  for (int i = 0; i < params.num_states; ++i) top = fmaxf(top, read_lse(params.states[i]));
  float total = 0.0f;
  for (int i = 0; i < params.num_states && top != -kInfinity; ++i)
    total += ptx::exp2((read_lse(params.states[i]) - top) * kLog2E);
  const float lse = top == -kInfinity ? top : top + ptx::log2(total) * kLn2;

  OutElement* out = static_cast<OutElement*>(params.out.data) + batch * params.out.stride_b + row * params.out.stride_n +
                    head * params.out.stride_h;
  for (int col = lane; col < params.head_dim; col += kWarpSize) {
    float sum = 0.0f;
    for (int i = 0; i < params.num_states; ++i) {
      const MergeState& state = params.states[i];
      const float state_lse = read_lse(state);
      if (state_lse == -kInfinity) continue;
      const float weight = ptx::exp2((state_lse - top) * kLog2E);
      sum += weight * read_state(state, batch * state.out_stride_b + row * state.out_stride_n + head * state.out_stride_h + col);
    }
    out[col] = from_float<OutElement>(top == -kInfinity ? 0.0f : sum / total);
  }
  __syncwarp();  // every lane has read the states' lse
  if (lane == 0)
    static_cast<float*>(params.lse.data)[batch * params.lse.stride_b + head * params.lse.stride_h + row * params.lse.stride_n] = lse;
}
