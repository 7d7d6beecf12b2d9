// The gradient of a merge, state by state: with w = exp(l_s - l),
//
//   do_s = w do,    dl_s = w (do . (o_s - o) + dl)          (contract, Splitting and merging)
//
// One warp per (row, head). A state without keys (l_s = -inf) gets zeros, and its payload is not read.
#include "attn/state.cuh"
#include "ptx/math.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) merge_states_bwd(const __grid_constant__ cf::MergeBwdParams params) {
  using namespace cf;
  const int lane = threadIdx.x % kWarpSize;
  const attn::Row row = attn::row_of_warp(static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize, params.len, params.heads);
  if (row.batch >= params.batch) return;
  const float lse = *attn::lse_of(params.merged, row);
  const int64 out_at = attn::offset_of(params.merged, row), dout_at = attn::offset_of(params.dmerged, row);

  for (int i = 0; i < params.num_states; ++i) {
    const State& state = params.states[i];
    const State& grad = params.grads[i];
    const float state_lse = *attn::lse_of(state, row);
    const bool has_keys = state_lse != -kInfinity && lse != -kInfinity;
    const float weight = has_keys ? ptx::exp2((state_lse - lse) * kLog2E) : 0.0f;
    const int64 state_at = attn::offset_of(state, row), grad_at = attn::offset_of(grad, row);
    float inner = 0.0f;
    for (int col = lane; col < params.head_dim; col += kWarpSize) {
      float dout = 0.0f;
      if (has_keys) {
        dout = attn::read(params.dmerged, dout_at + col);
        inner += dout * (attn::read(state, state_at + col) - attn::read(params.merged, out_at + col));
      }
      attn::write(grad, grad_at + col, has_keys ? weight * dout : 0.0f);
    }
#pragma unroll
    for (int d = kWarpSize / 2; d > 0; d /= 2) inner += __shfl_xor_sync(kFullWarp, inner, d);
    if (lane > 0) continue;
    const float dlse = params.dmerged.lse && has_keys ? *attn::lse_of(params.dmerged, row) : 0.0f;
    *attn::lse_of(grad, row) = has_keys ? weight * (inner + dlse) : 0.0f;
  }
}
