// The online softmax of Milakov and Gimelshein (2018) on accumulator fragments, in base 2.
//
// Exponents are x fold - m fold with one FMA per element. The rounding of m fold is common to a row and cancels in the output,
// but it grows with the score: past kLargeExponent (2^14) it would show, so such rows subtract m first; with kIsExact all rows do.
#pragma once
#include "ptx/math.cuh"
#include "tile/fragment.cuh"

namespace cf::attn {

constexpr float kLargeExponent = 16384.0f;

template <int kM, bool kIsExact>
struct Softmax {
  float max[kM][2];    // of x, over the row
  float sum[kM][2];    // of exp, this lane's columns only until `finish`

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        max[m][half] = -kInfinity;
        sum[m][half] = 0.0f;
      }
  }

  // x becomes p = exp(x - max); `out` so far is brought to the new maximum.
  template <int kN, int kNV>
  __device__ __forceinline__ void update(warp::Fragment<kM, kN>& x, warp::Fragment<kM, kNV>& out, float fold) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -kInfinity;
#pragma unroll
        for (int n = 0; n < kN; ++n) top = fmaxf(top, fmaxf(x.x[m][n][2 * half], x.x[m][n][2 * half + 1]));
        const float before = max[m][half];
        const float now = fmaxf(before, warp::row_max(top));
        const float reference = now == -kInfinity ? 0.0f : now;  // a row without keys so far: exp(-inf - 0) = 0
        max[m][half] = now;

        float folded = __fmul_rn(reference, fold);
        float fall = __fmul_rn(before, fold) - folded;  // the same rounded products as in the exponents
        if (kIsExact || __any_sync(kFullWarp, fabsf(folded) > kLargeExponent)) {
          fall = (before - reference) * fold;
          folded = 0.0f;
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) x.x[m][n][i] -= reference;
        }
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            x.x[m][n][i] = ptx::exp2(fmaf(x.x[m][n][i], fold, -folded));
            total += x.x[m][n][i];
          }
        if (__any_sync(kFullWarp, now != before)) {
          const float rescale = ptx::exp2(fall);
          sum[m][half] *= rescale;
#pragma unroll
          for (int n = 0; n < kNV; ++n)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) out.x[m][n][i] *= rescale;
        }
        sum[m][half] += total;
      }
  }

  // The row's log-sum-exp in natural units, the sink included, and the factor that turns `out` into the result.
  // A row with neither keys nor sink: lse -inf, factor 0 (contract, 'A row with no visible key').
  __device__ __forceinline__ float finish(int m, int half, float fold, bool has_sink, float sink, float& factor) const {
    float total = warp::row_sum(sum[m][half]);
    float top = max[m][half] == -kInfinity ? -kInfinity : max[m][half] * fold;
    factor = 1.0f;
    if (has_sink && sink != -kInfinity) {
      const float sink2 = sink * kLog2E;
      const float both = fmaxf(top, sink2);
      factor = ptx::exp2(top - both);
      total = total * factor + ptx::exp2(sink2 - both);
      top = both;
    }
    if (total == 0.0f) {
      factor = 0.0f;
      return -kInfinity;
    }
    factor /= total;
    return (top + ptx::log2(total)) * kLn2;
  }
};

}  // namespace cf::attn
