// The backward of one tile: P from the scores and the saved LSE, then dX and dS, shared by every backward kernel.
//
//   p = exp(x - lse)        ds = dx dx/ds,   dx = p (keep / (1 - p_drop) dp - D)              (contract, Backward)
#pragma once
#include "attn/dropout.cuh"
#include "attn/scores.cuh"
#include "attn/softmax.cuh"

namespace cf::attn {

// What the preprocess leaves of a row. An empty row has (+inf, 0).
template <class T>
struct alignas(2 * sizeof(T)) RowStats {
  T lse;    // times log2(e)
  T delta;
};

template <class T>
__device__ __forceinline__ bool is_large(T lse) { return ptx::abs(lse) > kLargeExponent && lse != kInfinity; }

// x becomes p. Stats are those of the fragment's rows, in shared memory.
template <int kM, int kN, class T>
__device__ __forceinline__ void probabilities(warp::Fragment<kM, kN, T>& x, const RowStats<T>* stats, T fold) {
  // Beyond 2^14 an FP32 LSE is coarser than 2^-10: a positive exponent is then rounding, and P is at most 1.
  T lse[kM][2];
  bool is_coarse = false;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lse[m][half] = stats[16 * m + warp::fragment_row(2 * half)].lse;
      is_coarse |= is_large(lse[m][half]);
    }
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x.x[m][n][i] = ptx::fma(x.x[m][n][i], fold, -lse[m][i / 2]);
  if (sizeof(T) == 4 && __any_sync(kFullWarp, is_coarse)) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (is_large(lse[m][i / 2]) && x.x[m][n][i] > 0) x.x[m][n][i] = 0;
  }
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x.x[m][n][i] = ptx::exp2(x.x[m][n][i]);
}

// dp becomes dx. A dropped p carries a minus sign. Unless the tile is full, hidden elements are selected to 0, not multiplied,
// whatever dp and D hold.
template <bool kHasDropout, int kM, int kN, class T>
__device__ __forceinline__ void score_gradient(warp::Fragment<kM, kN, T>& dp, const warp::Fragment<kM, kN, T>& p,
                                               const RowStats<T>* stats, T keep_scale, bool is_full) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T delta = stats[16 * m + warp::fragment_row(2 * half)].delta;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const T probability = p.x[m][n][i];
          T& dx = dp.x[m][n][i];
          if constexpr (kHasDropout) dx = ptx::abs(probability) * ((probability < 0 ? T(0) : dx * keep_scale) - delta);
          else dx = probability * (dx - delta);
        }
    }
  if (is_full) return;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dp.x[m][n][i] = p.x[m][n][i] == 0 ? T(0) : dp.x[m][n][i];
}

// Dropped probabilities become negative, so that the sign remembers them for `score_gradient`.
template <int kM, int kN, class T>
__device__ __forceinline__ void mark_dropped(warp::Fragment<kM, kN, T>& p, const Dropout& dropout, int query, int key) {
  dropout.for_each<kM, kN>(query, key, [&](int m, int n, int i, bool is_kept) { p.x[m][n][i] = is_kept ? p.x[m][n][i] : -p.x[m][n][i]; });
}

template <int kM, int kN, class T>
__device__ __forceinline__ warp::Fragment<kM, kN, T> kept(const warp::Fragment<kM, kN, T>& p) {
  warp::Fragment<kM, kN, T> result;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) result.x[m][n][i] = p.x[m][n][i] < 0 ? T(0) : p.x[m][n][i];
  return result;
}

template <int kM, int kN, class T>
__device__ __forceinline__ void multiply(warp::Fragment<kM, kN, T>& x, const warp::Fragment<kM, kN, T>& y) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x.x[m][n][i] *= y.x[m][n][i];
}

}  // namespace cf::attn
