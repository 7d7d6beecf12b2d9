// After a forward with split keys: one row's results over each split become one (contract, Splitting and merging).
//
// A block a row. Every warp takes each kWarps-th split, weighted by exp(l_s - max), and the warps' sums meet in shared memory. A split in which
// the row sees no key has l_s = -inf and, as the forward leaves it, zeros. The order of sums depends on the number of splits alone.
#include "params.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
constexpr int kColumns = ceil_div(kHeadDimV, kWarpSize);  // of a lane
constexpr int kTogether = kColumns > 4 ? 4 : 8;           // splits whose rows are under way at once
using Accum = AccumElement;

// The largest of all threads' numbers.
__device__ __forceinline__ Accum block_max(Accum (&parts)[kWarps], Accum x) {
#pragma unroll
  for (int d = kWarpSize / 2; d > 0; d /= 2) x = ptx::max(x, __shfl_xor_sync(kFullWarp, x, d));
  if (warp::lane() == 0) parts[threadIdx.x / kWarpSize] = x;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) x = ptx::max(x, parts[i]);
  return x;
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) fwd_combine(const __grid_constant__ cf::FwdCombineParams params) {
  using namespace cf;
  ptx::let_next_start();
  ptx::await_previous();
  __shared__ Accum tops[kWarps], totals[kWarps], sums[kWarps][kHeadDimV];
  const int row = blockIdx.x % params.rows, head = blockIdx.x / params.rows % params.heads, batch = blockIdx.x / params.rows / params.heads;
  const Accum* const lse = static_cast<const Accum*>(params.partial_lse.data) + batch * params.partial_lse.stride_b +
                           head * params.partial_lse.stride_h + row;
  const Accum* const out = static_cast<const Accum*>(params.partial_out.data) + batch * params.partial_out.stride_b +
                           head * params.partial_out.stride_h + row * params.partial_out.stride_n;

  Accum top = -kInfinity;
  for (int i = threadIdx.x; i < params.num_splits; i += kThreads) top = ptx::max(top, lse[i * params.lse_stride_split]);
  top = block_max(tops, top);

  const int first = threadIdx.x / kWarpSize;
  Accum sum[kColumns] = {}, total = 0;
  for (int begin = first; begin < params.num_splits; begin += kThreads) {  // a lane has the weight of one split
    const int own = begin + warp::lane() * kWarps;
    const Accum part = own < params.num_splits ? lse[own * params.lse_stride_split] : -kInfinity;
    const Accum own_weight = part == -kInfinity ? Accum(0) : ptx::exp2((part - top) * Accum(kLog2E));
    total += own_weight;
    const int count = min_of(ceil_div(params.num_splits - begin, kWarps), kWarpSize);
#pragma unroll kTogether
    for (int i = 0; i < count; ++i) {
      const Accum weight = __shfl_sync(kFullWarp, own_weight, i);
      const Accum* const from = out + (begin + i * kWarps) * params.out_stride_split;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int col = c * kWarpSize + warp::lane();
        if (col < params.head_dim_v) sum[c] = ptx::fma(weight, from[col], sum[c]);
      }
    }
  }
#pragma unroll
  for (int d = kWarpSize / 2; d > 0; d /= 2) total += __shfl_xor_sync(kFullWarp, total, d);
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (c * kWarpSize + warp::lane() < kHeadDimV) sums[first][c * kWarpSize + warp::lane()] = sum[c];
  if (warp::lane() == 0) totals[first] = total;
  __syncthreads();

  total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += totals[i];
  const bool is_empty = total == 0;
  const int query = row / params.group, query_head = head * params.group + row % params.group;
  OutElement* const result = static_cast<OutElement*>(params.out.data) + batch * params.out.stride_b + query * params.out.stride_n +
                             query_head * params.out.stride_h;
  for (int col = threadIdx.x; col < params.head_dim_v; col += kThreads) {
    Accum x = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) x += sums[i][col];
    result[col] = convert<OutElement>(is_empty ? Accum(0) : x / total);
  }
  if (threadIdx.x == 0)
    static_cast<Accum*>(params.lse.data)[batch * params.lse.stride_b + query_head * params.lse.stride_h + query] =
        is_empty ? -kInfinity : top + ptx::log2(total) * Accum(kLn2);
}
