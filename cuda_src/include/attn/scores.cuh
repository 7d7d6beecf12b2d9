// From q.k to the score x, and dx / d(q.k) without the scale: the two stand side by side so that forward and backward agree.
//
//   x = scale s;   softcap: x <- c tanh(x / c);   ALiBi: x <- x - m |p - r|;   bias: x <- x + b     (contract, Forward 1 to 4)
//
// Where nothing follows the scale, scores stay raw (s, or -s under a negative scale) and `fold` carries |scale| log2(e) into the exponent;
// where nothing follows the softcap they stay tanh, and fold is c log2(e); else x is in natural units and fold is log2(e).
#pragma once
#include "attn/mask.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"

namespace cf::attn {

// The compile-time switches of a kernel, as its constants name them.
template <class T_, class BiasElement_, bool kIsMasked_, bool kHasSoftcap_, bool kHasAlibi_, bool kHasBias_, bool kIsScaleNegative_,
          bool kIsTanhFast_>
struct Switches {
  using T = T_;
  using BiasElement = BiasElement_;
  static constexpr bool kIsMasked = kIsMasked_, kHasSoftcap = kHasSoftcap_, kHasAlibi = kHasAlibi_, kHasBias = kHasBias_;
  static constexpr bool kIsScaleNegative = kIsScaleNegative_, kIsTanhFast = kIsTanhFast_;
  static constexpr bool kIsRaw = !kHasSoftcap && !kHasAlibi && !kHasBias;
};

// One head's scores.
template <class S>
struct ScoreMap {
  using T = typename S::T;
  Band<S::kIsMasked> band;
  T scale, softcap, softcap_scale, slope;
  const typename S::BiasElement* bias;
  int64 bias_stride_q, bias_stride_k;
  int shift;

  __device__ __forceinline__ ScoreMap(const Problem& problem, const Scores& p, const Sequence& s, int head)
      : band(problem, s), scale(p.scale), softcap(p.softcap), softcap_scale(p.softcap_scale), slope(0), bias(nullptr),
        bias_stride_q(p.bias_stride_q), bias_stride_k(p.bias_stride_k), shift(s.shift) {
    if (S::kHasAlibi && !s.is_slack)
      slope = static_cast<const T*>(p.alibi_slopes)[s.index * p.alibi_stride_b + head * p.alibi_stride_h];
    if constexpr (S::kHasBias)
      bias = static_cast<const typename S::BiasElement*>(p.bias) + s.index * p.bias_stride_b + head * p.bias_stride_h;
  }

  // What one row of a warp's tile needs, from its first column on.
  struct Row {
    T distance;  // p - r at the first column
    const typename S::BiasElement* bias;
  };
  __device__ __forceinline__ Row row_of(int query, int key) const {
    Row row{0, nullptr};
    if constexpr (S::kHasAlibi) row.distance = static_cast<T>(query + shift - key);
    if constexpr (S::kHasBias) row.bias = bias + query * bias_stride_q + key * bias_stride_k;
    return row;
  }

  // s -> x of a visible pair `offset` columns on, but for the bias; `derivative` becomes 1 - (x_softcapped / c)^2, or stays 1.
  __device__ __forceinline__ T change(T s, const Row& row, int offset, T& derivative) const {
    derivative = 1;
    if constexpr (S::kIsRaw) return S::kIsScaleNegative ? -s : s;
    T x = scale * s;
    if constexpr (S::kHasSoftcap) {
      T t;
      if constexpr (S::kIsTanhFast) t = ptx::tanh_fast(softcap_scale * s);
      else t = ptx::tanh(softcap_scale * s);
      derivative = 1 - t * t;
      if constexpr (!S::kHasAlibi && !S::kHasBias) return t;
      x = softcap * t;
    }
    if constexpr (S::kHasAlibi) x -= slope * ptx::abs(row.distance - static_cast<T>(offset));
    return x;
  }

  // Whether four columns of any row of the bias can be read at once.
  __device__ __forceinline__ bool has_bias_quads() const {
    constexpr int kItem = sizeof(typename S::BiasElement), kQuad = min_of(4 * kItem, 16);
    return bias_stride_k == 1 && (reinterpret_cast<uint64>(bias) % kQuad | uint64(bias_stride_q) * kItem % kQuad) == 0;
  }

  // The same as `apply` where everything is visible.
  template <int kM, int kN>
  __device__ __forceinline__ void apply_with_bias_quads(warp::Fragment<kM, kN, T>& s, int query, int key,
                                                        warp::Fragment<kM, kN, T>* derivative) const {
    using Bias = typename S::BiasElement;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query_row = query + 16 * m + warp::fragment_row(2 * half);
        const Row row = row_of(query_row, key + warp::fragment_col(0));
        warp::Quad<Bias> quads[kN / 2];
        warp::load_quads(quads, bias + query_row * bias_stride_q + key);
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            T& score = s.x[m][n][2 * half + i];
            T slope = 1;
            score = change(score, row, 8 * n + i, slope) + convert<T>(quads[n / 2].x[n % 2 * 2 + i]);
            if (derivative) derivative->x[m][n][2 * half + i] = slope;
          }
      }
  }

  // Of a lane's columns 0, 1, 8, 9, 16, 17 ... one bit for each below `end`: bits turn into predicates seven at a time, compared numbers do
  // not.
  __device__ __forceinline__ static uint32 columns_below(int end) {
    const int inside = clamp(end, 0, 128);
    return static_cast<uint32>((uint64{1} << (inside / 8 * 2 + min_of(inside % 8, 2))) - 1);
  }

  // s becomes x, -inf where invisible, for a warp's tile whose first element is (query, key) of the sequence. A full tile of raw
  // scores is left as it is. `derivative`, if wanted, receives dx / ds / scale. Returns whether no score was made -inf.
  template <int kM, int kN>
  __device__ __forceinline__ bool apply(warp::Fragment<kM, kN, T>& s, int query, int key, warp::Fragment<kM, kN, T>* derivative) const {
    const bool is_full = band.is_full(query, 16 * kM, key, 8 * kN);
    if (S::kIsRaw && !S::kIsScaleNegative && is_full) return true;
    if constexpr (S::kHasBias && sizeof(typename S::BiasElement) <= 4 && kN % 2 == 0) {
      if (is_full && has_bias_quads()) {
        apply_with_bias_quads(s, query, key, derivative);
        return false;
      }
    }
    const int first_col = key + warp::fragment_col(0);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query_row = query + 16 * m + warp::fragment_row(2 * half);
        const Row row = row_of(query_row, first_col);
        const Range visible = band.keys_of(query_row);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          constexpr int kPerWord = 16;  // tiles: a lane has two columns of each
          const int word_col = first_col + n / kPerWord * kPerWord * 8;
          const uint32 bits = columns_below(visible.end - word_col) & ~columns_below(visible.begin - word_col);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            T& score = s.x[m][n][2 * half + i];
            T slope = 1, x = -kInfinity;
            const bool is_visible = bits >> (n % kPerWord * 2 + i) & 1;
            if (is_full || is_visible) {
              x = change(score, row, 8 * n + i, slope);
              if constexpr (S::kHasBias) x += convert<T>(row.bias[(8 * n + i) * bias_stride_k]);
            }
            score = x;
            if (derivative) derivative->x[m][n][2 * half + i] = slope;
          }
        }
      }
    return is_full && !S::kHasBias;
  }
};

}  // namespace cf::attn
