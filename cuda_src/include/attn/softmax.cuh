// The online softmax of Milakov and Gimelshein (2018) on accumulator fragments, in base 2.
//
// Exponents are x fold - m fold with one FMA per element. The rounding of m fold is common to a row and cancels in the output,
// but it grows with the score: past kLargeExponent (2^14) it would show, so such rows subtract m first; with kIsExact all rows do.
#pragma once
#include "ptx/math.cuh"
#include "tile/fragment.cuh"

namespace cf::attn {

constexpr float kLargeExponent = 16384.0f;

template <int kM, class T, bool kIsExact>
struct Softmax {
  T max[kM][2];    // of x, over the row
  T sum[kM][2];    // of exp, this lane's columns only until `finish`

  // What exponents are relative to. A row without keys so far: exp(-inf - 0) = 0.
  __device__ __forceinline__ T reference(int m, int half) const { return max[m][half] == -kInfinity ? T(0) : max[m][half]; }

  __device__ __forceinline__ explicit Softmax(T least = -kInfinity) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        max[m][half] = least;
        sum[m][half] = 0;
      }
  }

  // From one key tile to the next.
  struct Step {
    T rescale[kM][2];  // what `out` and `sum` so far are to be multiplied with: the same rounding as in the exponents
    T folded[kM][2];   // what exponents subtract: the new maximum, or 0 where x has lost it already
    bool has_risen;    // some maximum of the warp; else every factor is 1
  };

  // The maxima of this tile too. Rows are taken together, one step after the other: each row is a chain of dependent instructions,
  // and one chain runs in another's gaps.
  template <int kN>
  __device__ __forceinline__ Step raise(warp::Fragment<kM, kN, T>& x, T fold) {
    Step step;
    T before[kM][2];
    bool is_large = false, has_risen = false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        before[m][half] = max[m][half];
#pragma unroll
        for (int n = 0; n < kN; ++n)
          max[m][half] = ptx::max(max[m][half], ptx::max(x.x[m][n][2 * half], x.x[m][n][2 * half + 1]));
      }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        max[m][half] = warp::row_max(max[m][half]);
        step.folded[m][half] = ptx::mul(reference(m, half), fold);
        is_large |= ptx::abs(step.folded[m][half]) > kLargeExponent;
        has_risen |= max[m][half] != before[m][half];
      }
    const bool is_subtracted = kIsExact || __any_sync(kFullWarp, is_large);
    step.has_risen = __any_sync(kFullWarp, has_risen);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T fall = is_subtracted ? (before[m][half] - reference(m, half)) * fold : ptx::mul(before[m][half], fold) - step.folded[m][half];
        step.rescale[m][half] = ptx::exp2(fall);
        if (!is_subtracted) continue;
        step.folded[m][half] = 0;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) x.x[m][n][i] -= reference(m, half);
      }
    return step;
  }

  // The maxima stay what they are, whatever this tile holds: for scores that are bounded.
  __device__ __forceinline__ Step keep(T fold) const {
    Step step;
    step.has_risen = false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        step.rescale[m][half] = 1;
        step.folded[m][half] = ptx::mul(max[m][half], fold);
      }
    return step;
  }

  // x becomes p = exp(x - max), and is added to the sums; of the tiles [begin, end).
  template <int kN>
  __device__ __forceinline__ void add(warp::Fragment<kM, kN, T>& x, const Step& step, T fold, int begin = 0, int end = kN) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = begin; n < end; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x.x[m][n][i] = ptx::exp2(ptx::fma(x.x[m][n][i], fold, -step.folded[m][i / 2]));
          sum[m][i / 2] += x.x[m][n][i];
        }
  }

  // All of it: x becomes p, and `out` so far is brought to the new maximum.
  template <int kN, int kNV>
  __device__ __forceinline__ void update(warp::Fragment<kM, kN, T>& x, warp::Fragment<kM, kNV, T>& out, T fold) {
    const Step step = raise(x, fold);
    if (step.has_risen) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sum[m][half] *= step.rescale[m][half];
#pragma unroll
          for (int n = 0; n < kNV; ++n)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) out.x[m][n][i] *= step.rescale[m][half];
        }
    }
    add(x, step, fold);
  }

  // The row's log-sum-exp in natural units, the sink included, and the factor that turns `out` into the result. `unit` brings max to
  // natural units: base 2 would overflow before float does. A row with neither keys nor sink: lse -inf, factor 0 (contract, 'A row
  // with no visible key').
  __device__ __forceinline__ T finish(int m, int half, T unit, bool has_sink, T sink, T& factor) const {
    return finish(warp::row_sum(sum[m][half]), max[m][half], unit, has_sink, sink, factor);
  }
  __device__ __forceinline__ static T finish(T total, T max, T unit, bool has_sink, T sink, T& factor) {
    T top = total == 0 ? -kInfinity : max * unit;
    factor = 1;
    if (has_sink && sink != -kInfinity) {
      const T both = ptx::max(top, sink);
      factor = ptx::exp2((top - both) * T(kLog2E));
      total = total * factor + ptx::exp2((sink - both) * T(kLog2E));
      top = both;
    }
    const bool is_empty = total == 0;
    factor = is_empty ? 0 : factor * ptx::reciprocal(total);
    return is_empty ? -kInfinity : top + ptx::log2(total) * T(kLn2);
  }
};

}  // namespace cf::attn
