// The gradient of a merge, state by state: with w = exp(l_s - l),
//
//   do_s = w do,    dl_s = w (do . (o_s - o) + dl)          (contract, Splitting and merging)
//
// A group of lanes per (row, head). A state without keys (l_s = -inf) gets zeros, and its payload is not read.
#include "attn/state.cuh"
#include "ptx/griddepcontrol.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
using Accum = AccumElement;
using Partial = attn::ColumnsOf<kIsUniform, StateElement, kColumns, Accum>::Type;
using Merged = attn::ColumnsOf<kIsUniform, ResultElement, kColumns, Accum>::Type;

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) merge_states_bwd(const __grid_constant__ cf::MergeBwdParams params) {
  using namespace cf;
  ptx::let_next_start();
  ptx::await_previous();
  const attn::Row row = attn::row_of_thread<kThreads>(params.len, params.heads);
  const bool is_row = row.batch < params.batch;  // else the lanes still take part in the warp's exchanges
  const State& merged = params.merged;
  const State& dmerged = params.dmerged;
  const Accum lse = is_row ? attn::read_lse<Accum>(merged, row) : Accum(-kInfinity);

  for (int i = 0; i < params.num_states; ++i) {
    const State& state = params.states[i];
    const State& grad = params.grads[i];
    const Accum state_lse = lse == -kInfinity ? lse : attn::read_lse<Accum>(state, row);
    const bool has_keys = state_lse != -kInfinity;
    const Accum weight = has_keys ? ptx::exp2((state_lse - lse) * Accum(kLog2E)) : Accum(0);
    Accum inner = 0;
    for (int col = row.lane * kColumns; is_row && col < params.head_dim; col += attn::kGroup * kColumns) {
      Accum grad_out[kColumns] = {};
      if (has_keys) {
        Merged dout, out;
        Partial partial;
        attn::read_columns<kIsUniform, ResultElement, kColumns, Accum>(dout, dmerged, row, col);
        attn::read_columns<kIsUniform, ResultElement, kColumns, Accum>(out, merged, row, col);
        attn::read_columns<kIsUniform, StateElement, kColumns, Accum>(partial, state, row, col);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const Accum d = convert<Accum>(dout.x[c]);
          inner += d * (convert<Accum>(partial.x[c]) - convert<Accum>(out.x[c]));
          grad_out[c] = weight * d;
        }
      }
      attn::write_columns<kIsUniform, StateElement>(grad, row, col, grad_out);
    }
    inner = attn::group_sum(inner);
    if (!is_row || row.lane > 0) continue;
    const Accum dlse = dmerged.lse && has_keys ? attn::read_lse<Accum>(dmerged, row) : Accum(0);
    attn::write_lse(grad, row, has_keys ? weight * (inner + dlse) : Accum(0));
  }
}
