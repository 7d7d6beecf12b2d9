// After a forward with split keys: one row's results over each split become one (contract, Splitting and merging).
//
// Of few splits a row is a warp's, of many a block's: every warp then takes each kWarps-th split, and the warps' sums meet in shared memory.
// A split counts exp(l_s - max); one in which the row sees no key has l_s = -inf and, as the forward leaves it, zeros. The order of sums depends
// on the number of splits alone. A state of other keys (cascade) is one split more, the last, and read element by element as it may lie anywhere.
#include "params.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
using Accum = AccumElement;
struct alignas(16) Columns { Accum x[16 / sizeof(Accum)]; };  // side by side, as partial results are read
constexpr int kCount = 16 / sizeof(Accum), kPasses = ceil_div(kHeadDimV, kWarpSize * kCount);  // of a lane
constexpr int kTogether = kPasses > 1 ? 4 : 8;  // splits whose rows are under way at once
static_assert(kWarpSize % kTogether == 0);

struct Smem {
  Accum tops[kWarps], totals[kWarps];
  Columns sums[kWarps][kPasses * kWarpSize];
};

__device__ __forceinline__ Accum warp_max(Accum x) {
#pragma unroll
  for (int d = kWarpSize / 2; d > 0; d /= 2) x = ptx::max(x, __shfl_xor_sync(kFullWarp, x, d));
  return x;
}
__device__ __forceinline__ Accum warp_sum(Accum x) {
#pragma unroll
  for (int d = kWarpSize / 2; d > 0; d /= 2) x += __shfl_xor_sync(kFullWarp, x, d);
  return x;
}

// One row, by kRowWarps warps.
template <int kRowWarps>
__device__ __forceinline__ void combine(Smem& smem, const FwdCombineParams& params, int number) {
  const int row = number % params.rows, head = number / params.rows % params.heads, batch = number / params.rows / params.heads;
  const Accum* const lse = static_cast<const Accum*>(params.partial_lse.data) + batch * params.partial_lse.stride_b +
                           head * params.partial_lse.stride_h + row;
  const Accum* const out = static_cast<const Accum*>(params.partial_out.data) + batch * params.partial_out.stride_b +
                           head * params.partial_out.stride_h + row * params.partial_out.stride_n;
  const int thread = kRowWarps > 1 ? threadIdx.x : warp::lane(), first = thread / kWarpSize;
  const int query = row / params.group, query_head = head * params.group + row % params.group;

  Columns read[kTogether][kPasses];
  const auto fetch = [&](int begin) {  // of this split and every kRowWarps-th behind it
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int split = begin + i * kRowWarps, col = (pass * kWarpSize + warp::lane()) * kCount;
        const bool is_there = split < params.num_splits && col < params.head_dim_v;
        read[i][pass] = is_there ? *reinterpret_cast<const Columns*>(out + split * params.out_stride_split + col) : Columns{};
      }
  };
  ptx::await_previous();
  fetch(first);  // on their way while the weights are found
  Columns beside[kPasses] = {};
  Accum beside_lse = -kInfinity;
  if (params.beside_lse.data) {
    const auto at = [&](const Tensor& t) {
      return static_cast<const Accum*>(t.data) + batch * t.stride_b + query * t.stride_n + query_head * t.stride_h;
    };
    beside_lse = *at(params.beside_lse);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        const int col = (pass * kWarpSize + warp::lane()) * kCount + c;
        if (first == 0 && col < params.head_dim_v) beside[pass].x[c] = at(params.beside_out)[col];
      }
  }

  Accum top = beside_lse;
#pragma unroll 1
  for (int i = thread; i < params.num_splits; i += kRowWarps * kWarpSize) top = ptx::max(top, lse[i * params.lse_stride_split]);
  top = warp_max(top);
  if constexpr (kRowWarps > 1) {
    if (warp::lane() == 0) smem.tops[first] = top;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRowWarps; ++i) top = ptx::max(top, smem.tops[i]);
  }

  Columns sum[kPasses] = {};
  Accum total = 0;
  for (int begin = first; begin < params.num_splits; begin += kRowWarps * kWarpSize) {  // a lane has the weight of one split
    const int own = begin + warp::lane() * kRowWarps;
    const Accum part = own < params.num_splits ? lse[own * params.lse_stride_split] : -kInfinity;
    const Accum own_weight = part == -kInfinity ? Accum(0) : ptx::exp2((part - top) * Accum(kLog2E));
    total += own_weight;
    const int count = min_of(ceil_div(params.num_splits - begin, kRowWarps), kWarpSize);
    for (int next = 0; next < count; next += kTogether) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const Accum weight = __shfl_sync(kFullWarp, own_weight, next + i);
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
          for (int c = 0; c < kCount; ++c) sum[pass].x[c] = ptx::fma(weight, read[i][pass].x[c], sum[pass].x[c]);
      }
      fetch(begin + (next + kTogether) * kRowWarps);
    }
  }
  if (first == 0 && beside_lse != -kInfinity) {  // else what stands beside it is not used, whatever it is
    const Accum weight = ptx::exp2((beside_lse - top) * Accum(kLog2E));
    if (warp::lane() == 0) total += weight;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
      for (int c = 0; c < kCount; ++c) sum[pass].x[c] = ptx::fma(weight, beside[pass].x[c], sum[pass].x[c]);
  }
  total = warp_sum(total);
  if constexpr (kRowWarps > 1) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) smem.sums[first][pass * kWarpSize + warp::lane()] = sum[pass];
    if (warp::lane() == 0) smem.totals[first] = total;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int i = 0; i < kRowWarps; ++i) total += smem.totals[i];
  }

  const bool is_empty = total == 0;
  const Accum factor = is_empty ? Accum(0) : Accum(1) / total;
  OutElement* const result = static_cast<OutElement*>(params.out.data) + batch * params.out.stride_b + query * params.out.stride_n +
                             query_head * params.out.stride_h;
  const auto store = [&](int col, Accum x) {
    if (col < params.head_dim_v) result[col] = convert<OutElement>(x * factor);
  };
  if constexpr (kRowWarps > 1) {
    for (int col = thread; col < params.head_dim_v; col += kThreads) {
      Accum x = 0;
#pragma unroll
      for (int i = 0; i < kRowWarps; ++i) x += smem.sums[i][col / kCount].x[col % kCount];
      store(col, x);
    }
  } else {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
      for (int c = 0; c < kCount; ++c) store((pass * kWarpSize + warp::lane()) * kCount + c, sum[pass].x[c]);
  }
  if (thread == 0)
    static_cast<Accum*>(params.lse.data)[batch * params.lse.stride_b + query_head * params.lse.stride_h + query] =
        is_empty ? -kInfinity : top + ptx::log2(total) * Accum(kLn2);
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) fwd_combine(const __grid_constant__ cf::FwdCombineParams params) {
  using namespace cf;
  __shared__ Smem smem;
  if (params.num_splits > kWarps) {
    combine<kWarps>(smem, params, blockIdx.x);
  } else if (const int number = blockIdx.x * kWarps + threadIdx.x / kWarpSize; number < params.all_rows) {
    combine<1>(smem, params, number);
  } else {
    ptx::await_previous();  // nobody behind this kernel is to find it done before the one in front is
  }
  ptx::let_next_start();  // no sooner: what is next may be another call's, whose blocks are to find all multiprocessors free
}
