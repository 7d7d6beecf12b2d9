// The gradient of a merge, state by state: with w = exp(l_s - l),
//
//   do_s = w do,    dl_s = w (do . (o_s - o) + dl)          (contract, Splitting and merging)
//
// A group of lanes per (row, head). A state without keys (l_s = -inf) gets zeros, and its payload is not read.
#include "attn/state.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
constexpr int kTogether = 2;  // states whose columns are under way at once
using Accum = AccumElement;
using Partial = attn::ColumnsOf<kIsUniform, StateElement, kColumns, Accum>::Type;
using Merged = attn::ColumnsOf<kIsUniform, ResultElement, kColumns, Accum>::Type;

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) merge_states_bwd(const __grid_constant__ cf::MergeBwdParams params) {
  using namespace cf;
  const attn::Row row = attn::row_of_thread<kThreads>(params.len, params.heads);
  const bool is_row = row.batch < params.batch;  // else the lanes still take part in the warp's exchanges
  const State& merged = params.merged;
  const State& dmerged = params.dmerged;
  const Accum lse = is_row ? attn::read_lse<Accum>(merged, row) : Accum(-kInfinity);

  for (int begin = 0; begin < params.num_states; begin += kTogether) {
    Accum weight[kTogether], inner[kTogether] = {};
    bool has_keys[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const bool is_there = lse != -kInfinity && begin + i < params.num_states;
      weight[i] = is_there ? attn::read_lse<Accum>(params.states[begin + i], row) : Accum(-kInfinity);
      has_keys[i] = weight[i] != -kInfinity;
      weight[i] = has_keys[i] ? ptx::exp2((weight[i] - lse) * Accum(kLog2E)) : Accum(0);
    }
    for (int col = row.lane * kColumns; is_row && col < params.head_dim; col += attn::kGroup * kColumns) {
      Merged dout, out;
      Partial partial[kTogether];
      if (lse != -kInfinity) {
        attn::read_columns<kIsUniform, ResultElement, kColumns, Accum>(dout, dmerged, row, col);
        attn::read_columns<kIsUniform, ResultElement, kColumns, Accum>(out, merged, row, col);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (has_keys[i]) attn::read_columns<kIsUniform, StateElement, kColumns, Accum>(partial[i], params.states[begin + i], row, col);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (begin + i >= params.num_states) continue;
        Accum grad_out[kColumns] = {};
        if (has_keys[i]) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            const Accum d = convert<Accum>(dout.x[c]);
            inner[i] += d * (convert<Accum>(partial[i].x[c]) - convert<Accum>(out.x[c]));
            grad_out[c] = weight[i] * d;
          }
        }
        attn::write_columns<kIsUniform, StateElement>(params.grads[begin + i], row, col, grad_out);
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const Accum total = attn::group_sum(inner[i]);
      if (!is_row || row.lane > 0 || begin + i >= params.num_states) continue;
      const Accum dlse = dmerged.lse && has_keys[i] ? attn::read_lse<Accum>(dmerged, row) : Accum(0);
      attn::write_lse(params.grads[begin + i], row, has_keys[i] ? weight[i] * (total + dlse) : Accum(0));
    }
  }
}
