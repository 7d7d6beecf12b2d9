// Partial results over disjoint keys become one: l = log sum exp(l_s), o = sum exp(l_s - l) o_s (contract, Splitting and merging).
//
// A group of lanes per (row, head): each lane reads the lse of some states, all share the weights, and each sums its own columns.
// A state with l_s = -inf means 'no keys': its payload is not used, whatever it holds. Every value is read before it is written, by
// the lane that owns it or before the warp meets, so the result may lie in one of the states.
#include "attn/state.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
constexpr int kSlots = kMergeStates / attn::kLeastGroup;  // states whose lse one lane keeps
using Accum = AccumElement;

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) merge_states(const __grid_constant__ cf::MergeParams params) {
  using namespace cf;
  const attn::Row row = attn::row_of_thread<kThreads, kColumns>(params.len, params.heads, params.head_dim);
  const bool is_row = row.batch < params.batch;  // else the lanes still take part in the warp's exchanges

  Accum weight[kSlots];  // first the lse: of state row.lane + slot row.size
  Accum top = -kInfinity;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const int i = row.lane + slot * row.size;
    weight[slot] = is_row && i < params.num_states ? attn::read_lse<Accum>(params.states[i], row) : Accum(-kInfinity);
    top = ptx::max(top, weight[slot]);
  }
  top = attn::group_max(top, row.size);
  const bool is_empty = top == -kInfinity;
  Accum total = 0;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    weight[slot] = is_empty || weight[slot] == -kInfinity ? Accum(0) : ptx::exp2((weight[slot] - top) * Accum(kLog2E));
    total += weight[slot];
  }
  total = attn::group_sum(total, row.size);
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) weight[slot] = is_empty ? Accum(0) : weight[slot] / total;

  for (int first = 0; first < params.head_dim; first += row.size * kColumns) {  // every lane comes as often: they exchange weights
    const int col = first + row.lane * kColumns;
    Accum sum[kColumns] = {};
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int states = min_of(row.size, params.num_states - slot * row.size);
#pragma unroll 4  // so many loads are under way
      for (int j = 0; j < states; ++j) {
        const Accum w = __shfl_sync(kFullWarp, weight[slot], j, row.size);
        Accum x[kColumns] = {};
        if (is_row && col < params.head_dim)
          attn::read_columns<kIsUniform, StateElement>(x, params.states[slot * row.size + j], row, col);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[c] += w == 0 ? Accum(0) : w * x[c];  // selected: it may be a NaN
      }
    }
    if (is_row && col < params.head_dim) attn::write_columns<kIsUniform, ResultElement>(params.merged, row, col, sum);
  }
  const Accum lse = is_empty ? top : top + ptx::log2(total) * Accum(kLn2);
  if (is_row && row.lane == 0) attn::write(params.merged.lse, params.merged.lse_type, attn::lse_at(params.merged, row), lse);
}
