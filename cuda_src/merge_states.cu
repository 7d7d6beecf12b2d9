// Partial results over disjoint keys become one: l = log sum exp(l_s), o = sum exp(l_s - l) o_s (contract, Splitting and merging).
//
// A group of lanes per (row, head): each lane reads the lse of some states, all share the weights, and each sums its own columns.
// A state with l_s = -inf means 'no keys': its payload is not used, whatever it holds. Every value is read before it is written, by
// the lane that owns it or before the warp meets, so the result may lie in one of the states.
#include "attn/state.cuh"
#include "ptx/griddepcontrol.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
constexpr int kSlots = kMergeStates / attn::kGroup;  // states whose lse one lane keeps
constexpr int kTogether = 2;                         // states whose columns are under way at once
static_assert(attn::kGroup % kTogether == 0);
using Accum = AccumElement;
using Partial = attn::ColumnsOf<kIsUniform, StateElement, kColumns, Accum>::Type;

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) merge_states(const __grid_constant__ cf::MergeParams params) {
  using namespace cf;
  ptx::await_previous();
  ptx::let_next_start();
  const attn::Row row = attn::row_of_thread<kThreads>(params.len, params.heads);
  const bool is_row = row.batch < params.batch;  // else the lanes still take part in the warp's exchanges

  if (is_row)  // or the weights, which every lane waits for, and the columns would come one after the other
    for (int i = 0; i < min_of(kTogether, params.num_states); ++i)
      attn::prefetch_columns<kIsUniform, StateElement, kColumns>(params.states[i], row, params.head_dim);

  Accum weight[kSlots];  // first the lse: of state row.lane + slot kGroup
  Accum top = -kInfinity;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const int i = row.lane + slot * attn::kGroup;
    weight[slot] = is_row && i < params.num_states ? attn::read_lse<Accum>(params.states[i], row) : Accum(-kInfinity);
    top = ptx::max(top, weight[slot]);
  }
  top = attn::group_max(top);
  const bool is_empty = top == -kInfinity;
  Accum total = 0;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    weight[slot] = is_empty || weight[slot] == -kInfinity ? Accum(0) : ptx::exp2((weight[slot] - top) * Accum(kLog2E));
    total += weight[slot];
  }
  total = attn::group_sum(total);
  const Accum share = is_empty ? Accum(0) : 1 / total;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) weight[slot] *= share;

  for (int first = 0; first < params.head_dim; first += attn::kGroup * kColumns) {  // every lane comes as often: they exchange weights
    const int col = first + row.lane * kColumns;
    const bool is_there = is_row && col < params.head_dim;
    Accum sum[kColumns] = {};
#pragma unroll
    for (int begin = 0; begin < kMergeStates; begin += kTogether) {
      if (begin >= params.num_states) break;
      Accum w[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        w[i] = __shfl_sync(kFullWarp, weight[begin / attn::kGroup], (begin + i) % attn::kGroup, attn::kGroup);
      if (!is_there) continue;
      Partial partial[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)  // the last state again rather than a branch, which would part the loads
        attn::read_columns<kIsUniform, StateElement, kColumns, Accum>(
            partial[i], params.states[min_of(begin + i, params.num_states - 1)], row, col);
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
#pragma unroll
        for (int c = 0; c < kColumns; ++c)  // selected: what is without weight may be a NaN
          sum[c] = ptx::fma(w[i], w[i] == 0 ? Accum(0) : convert<Accum>(partial[i].x[c]), sum[c]);
    }
    if (is_there) attn::write_columns<kIsUniform, ResultElement>(params.merged, row, col, sum);
  }
  const Accum lse = is_empty ? top : top + ptx::log2(total) * Accum(kLn2);
  if (is_row && row.lane == 0) attn::write_lse(params.merged, row, lse);
}
