// What a group of warps has found of a tile's rows, in shared memory, and the sum of several groups': each saw other keys of the same rows.
#pragma once
#include "attn/softmax.cuh"

namespace cf::attn {

template <int kRows, int kCols, class T>
struct alignas(128) Found {
  static constexpr int kPad = 32 / sizeof(T);  // eight rows' pairs of columns lie in different banks
  T out[kRows][kCols + kPad];
  T max[kRows], sum[kRows];

  // A warp's rows from `row` on, of which `rows` are wanted.
  template <int kM, bool kIsExact>
  __device__ __forceinline__ void put(int row, int rows, const Softmax<kM, T, kIsExact>& softmax, const warp::Fragment<kM, kCols / 8, T>& f) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int in_warp = 16 * m + warp::fragment_row(2 * half), to = row + in_warp;
        const T total = warp::row_sum(softmax.sum[m][half]);
        if (in_warp >= rows) continue;
        if (warp::lane() % 4 == 0) {
          max[to] = softmax.max[m][half];
          sum[to] = total;
        }
#pragma unroll
        for (int n = 0; n < kCols / 8; ++n)
          *reinterpret_cast<tile::Pair<T>*>(&out[to][8 * n + warp::fragment_col(0)]) = {{f.x[m][n][2 * half], f.x[m][n][2 * half + 1]}};
      }
  }
};

// A row of all groups, by a warp: a lane has kCount neighbouring columns of every kWarpSize kCount.
template <int kGroups, int kRows, int kCols, class T, bool kIsExact>
struct Joined {
  static constexpr int kCount = min_of(16 / static_cast<int>(sizeof(T)), kCols < 64 ? 1 : kCols < 128 ? 2 : 4);
  static constexpr int kPasses = ceil_div(kCols, kWarpSize * kCount);
  struct alignas(kCount * sizeof(T)) Columns { T x[kCount]; };
  Columns out[kPasses];
  T max, sum;

  __device__ __forceinline__ static int col(int pass) { return (pass * kWarpSize + warp::lane()) * kCount; }

  // `found`: the first group's; the others' lie `stride` bytes behind each other. Of a group that has seen no key nothing is used; a sum
  // that is no number is none of those.
  __device__ __forceinline__ Joined(const Found<kRows, kCols, T>& found, int stride, int row, T fold) : out{}, max(-kInfinity), sum(0) {
    const auto of = [&](int group) -> const Found<kRows, kCols, T>& {
      return *reinterpret_cast<const Found<kRows, kCols, T>*>(reinterpret_cast<const unsigned char*>(&found) + group * stride);
    };
#pragma unroll
    for (int group = 0; group < kGroups; ++group) max = ptx::max(max, of(group).max[row]);
    const auto weight_of = [&](T top) {  // as Softmax::raise has it
      const bool is_subtracted = kIsExact || ptx::abs(top * fold) > kLargeExponent || ptx::abs(max * fold) > kLargeExponent;
      return ptx::exp2(is_subtracted ? (top - max) * fold : ptx::mul(top, fold) - ptx::mul(max, fold));
    };
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const Found<kRows, kCols, T>& one = of(group);
      if (one.sum[row] == 0) continue;
      const T weight = weight_of(one.max[row]);
      sum = ptx::fma(one.sum[row], weight, sum);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        if (kCols % (kWarpSize * kCount) != 0 && col(pass) >= kCols) continue;
        const Columns columns = *reinterpret_cast<const Columns*>(&one.out[row][col(pass)]);
#pragma unroll
        for (int c = 0; c < kCount; ++c) out[pass].x[c] = ptx::fma(columns.x[c], weight, out[pass].x[c]);
      }
    }
  }

  // To a row in memory, its real columns; kBytes: what its address is a multiple of.
  template <int kBytes, class Result>
  __device__ __forceinline__ void store(Result* dst, int cols, T factor) const {
    struct alignas(kCount * sizeof(Result)) Results { Result x[kCount]; };
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      Results results;
#pragma unroll
      for (int c = 0; c < kCount; ++c) results.x[c] = convert<Result>(factor == 0 ? T(0) : out[pass].x[c] * factor);
      if (kBytes % sizeof(Results) == 0 && col(pass) + kCount <= cols) {
        *reinterpret_cast<Results*>(dst + col(pass)) = results;
      } else {
#pragma unroll
        for (int c = 0; c < kCount; ++c)
          if (col(pass) + c < cols) dst[col(pass) + c] = results.x[c];
      }
    }
  }
};

}  // namespace cf::attn
