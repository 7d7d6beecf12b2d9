// The gradient of a merge, state by state: with w = exp(l_s - l),
//
//   do_s = w do,    dl_s = w (do . (o_s - o) + dl)          (contract, Splitting and merging)
//
// One warp per (row, head). A state without keys (l_s = -inf) gets zeros, and its payload is not read.
#include "attn/state.cuh"
#include "ptx/math.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
using Accum = AccumElement;

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) merge_states_bwd(const __grid_constant__ cf::MergeBwdParams params) {
  using namespace cf;
  const int lane = threadIdx.x % kWarpSize;
  const attn::Row row = attn::row_of_warp(static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize, params.len, params.heads);
  if (row.batch >= params.batch) return;
  const State& merged = params.merged;
  const State& dmerged = params.dmerged;
  const Accum lse = attn::read_lse<Accum>(merged, row);

  for (int i = 0; i < params.num_states; ++i) {
    const State& state = params.states[i];
    const State& grad = params.grads[i];
    const Accum state_lse = attn::read_lse<Accum>(state, row);
    const bool has_keys = state_lse != -kInfinity && lse != -kInfinity;
    const Accum weight = has_keys ? ptx::exp2((state_lse - lse) * Accum(kLog2E)) : Accum(0);
    Accum inner = 0;
    for (int col = lane; col < params.head_dim; col += kWarpSize) {
      Accum dout = 0;
      if (has_keys) {
        dout = attn::read<Accum>(dmerged.out, dmerged.out_type, attn::out_at(dmerged, row) + col);
        inner += dout * (attn::read<Accum>(state.out, state.out_type, attn::out_at(state, row) + col) -
                         attn::read<Accum>(merged.out, merged.out_type, attn::out_at(merged, row) + col));
      }
      attn::write(grad.out, grad.out_type, attn::out_at(grad, row) + col, has_keys ? weight * dout : Accum(0));
    }
#pragma unroll
    for (int d = kWarpSize / 2; d > 0; d /= 2) inner += __shfl_xor_sync(kFullWarp, inner, d);
    if (lane > 0) continue;
    const Accum dlse = dmerged.lse && has_keys ? attn::read_lse<Accum>(dmerged, row) : Accum(0);
    attn::write(grad.lse, grad.lse_type, attn::lse_at(grad, row), has_keys ? weight * (inner + dlse) : Accum(0));
  }
}
