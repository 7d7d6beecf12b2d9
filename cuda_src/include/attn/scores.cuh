// From q.k to the score x, and dx / d(q.k) without the scale: the two stand side by side so that forward and backward agree.
//
//   x = scale s;   softcap: x <- c tanh(x / c);   ALiBi: x <- x - m |p - r|          (contract, Forward steps 1 to 3)
//
// Where nothing follows the scale, scores stay raw (s, or -s under a negative scale) and `fold` carries |scale| log2(e) into
// the exponent; else x is in natural units and fold is log2(e).
#pragma once
#include "attn/mask.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"

namespace cf::attn {

template <bool kSoftcap, bool kAlibi, bool kNegate, bool kFastTanh>
struct ScoreChange {
  static constexpr bool kIsRaw = !kSoftcap && !kAlibi;
  static constexpr bool kIsIdentity = kIsRaw && !kNegate;
  float scale, softcap, softcap_scale, slope;
  int shift;

  __device__ __forceinline__ ScoreChange(const Scores& p, const Sequence& s, int head)
      : scale(p.scale), softcap(p.softcap), softcap_scale(p.softcap_scale), slope(0.0f), shift(s.shift) {
    if constexpr (kAlibi) slope = p.alibi_slopes[s.index * p.alibi_stride_b + head * p.alibi_stride_h];
  }

  // s -> x at (query, key) of the sequence; `derivative` becomes 1 - (x_softcapped / c)^2, or stays 1.
  __device__ __forceinline__ float apply(float s, int query, int key, float& derivative) const {
    derivative = 1.0f;
    if constexpr (kIsRaw) return kNegate ? -s : s;
    float x = scale * s;
    if constexpr (kSoftcap) {
      const float t = kFastTanh ? ptx::tanh_fast(softcap_scale * s) : tanhf(softcap_scale * s);
      derivative = 1.0f - t * t;
      x = softcap * t;
    }
    if constexpr (kAlibi) {
      const int distance = query + shift - key;
      x -= slope * static_cast<float>(distance < 0 ? -distance : distance);
    }
    return x;
  }
};

// s becomes x, -inf where invisible, for a warp's tile whose first element is (query, key) of the sequence. A full tile of raw scores
// is left as it is. `derivative` receives dx / ds / scale where softcap makes it differ from 1. Returns whether all is visible.
template <class Change, bool kIsMasked, int kM, int kN>
__device__ __forceinline__ bool apply(const Change& change, const Band<kIsMasked>& band, int query, int key,
                                      warp::Fragment<kM, kN>& s, warp::Fragment<kM, kN>* derivative) {
  const bool is_full = band.is_full(query, 16 * kM, key, 8 * kN);
  if (Change::kIsIdentity && is_full) return true;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = query + 16 * m + warp::fragment_row(i), col = key + 8 * n + warp::fragment_col(i);
        float slope;
        const float x = change.apply(s.x[m][n][i], row, col, slope);
        s.x[m][n][i] = is_full || band.is_visible(row, col) ? x : -kInfinity;
        if (derivative) derivative->x[m][n][i] = slope;
      }
  return is_full;
}

}  // namespace cf::attn
