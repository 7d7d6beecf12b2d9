// From q.k to the score x, and dx / d(q.k) without the scale: the two stand side by side so that forward and backward agree.
//
//   x = scale s;   softcap: x <- c tanh(x / c);   ALiBi: x <- x - m |p - r|;   bias: x <- x + b     (contract, Forward 1 to 4)
//
// Where nothing follows the scale, scores stay raw (s, or -s under a negative scale) and `fold` carries |scale| log2(e) into the exponent;
// where nothing follows the softcap they stay tanh, and fold is c log2(e); else x is in natural units and fold is log2(e).
#pragma once
#include "attn/bias.cuh"
#include "ptx/math.cuh"

namespace cf::attn {

// The compile-time switches of a kernel, as its constants name them. kIsFast: 16-bit inputs, for which tanh may err by 2^-11, and ALiBi
// may be rounded at a tile's first column.
template <class T_, class BiasElement_, bool kIsMasked_, bool kHasSoftcap_, bool kHasAlibi_, bool kHasBias_, bool kIsScaleNegative_,
          bool kIsFast_>
struct Switches {
  using T = T_;
  using BiasElement = BiasElement_;
  static constexpr bool kIsMasked = kIsMasked_, kHasSoftcap = kHasSoftcap_, kHasAlibi = kHasAlibi_, kHasBias = kHasBias_;
  static constexpr bool kIsScaleNegative = kIsScaleNegative_, kIsFast = kIsFast_;
  static constexpr bool kIsRaw = !kHasSoftcap && !kHasAlibi && !kHasBias;
};

// One head's scores, or with a PackedBand those of a group's heads, where nothing but the band tells heads apart.
template <class S, class Band_ = Band<S::kIsMasked>>
struct ScoreMap {
  using T = typename S::T;
  using Element = typename S::BiasElement;
  Band_ band;
  T scale, softcap, softcap_scale, slope;
  Bias<Element> bias;
  int shift;

  __device__ __forceinline__ ScoreMap(const Band_& band, const Scores& p, const Sequence& s, int head)
      : band(band), scale(p.scale), softcap(p.softcap), softcap_scale(p.softcap_scale), slope(0), bias(p, s, head), shift(s.shift) {
    if (S::kHasAlibi && !s.is_slack)
      slope = static_cast<const T*>(p.alibi_slopes)[s.index * p.alibi_stride_b + head * p.alibi_stride_h];
  }

  // Keeps the numbers in registers, where a loop has no time to convert them again.
  __device__ __forceinline__ void settle() {
    if constexpr (!S::kIsRaw) scale = ptx::settled(scale);
    if constexpr (S::kHasSoftcap) {
      softcap = ptx::settled(softcap);
      softcap_scale = ptx::settled(softcap_scale);
    }
  }

  // Whether all of a tile's bias is read, by pairs; else only what is seen, one by one.
  template <int kM, int kN>
  __device__ __forceinline__ bool takes_pairs(int query, int key) const {
    return S::kHasBias && bias.has_pairs && query + 16 * kM <= band.len_q && key + 8 * kN <= band.len_k;
  }

  // What a row needs for ALiBi, from its first column on.
  struct Row {
    T distance;  // p - r at the first column
    T tilt;      // from one column to the next, where the tile lies beside the diagonal
    T start;     // and what the first one has
  };
  __device__ __forceinline__ Row row_of(int query, int first_col) const {
    Row row{};
    if constexpr (S::kHasAlibi) {
      row.distance = static_cast<T>(query + shift - first_col);
      row.tilt = row.distance > 0 ? slope : -slope;
      row.start = -row.tilt * row.distance;
    }
    return row;
  }

  // s -> x but for the bias, `offset` columns on; `derivative` becomes 1 - (x_softcapped / c)^2, or stays 1.
  template <bool kIsBeside>
  __device__ __forceinline__ T change(T s, const Row& row, int offset, T& derivative) const {
    derivative = 1;
    if constexpr (S::kIsRaw) return S::kIsScaleNegative ? -s : s;
    T x = scale * s;
    if constexpr (S::kHasSoftcap) {
      T t;
      if constexpr (S::kIsFast) t = ptx::tanh_fast(softcap_scale * s);
      else t = ptx::tanh(softcap_scale * s);
      derivative = 1 - t * t;
      if constexpr (!S::kHasAlibi && !S::kHasBias) return t;
      x = softcap * t;
    }
    if constexpr (S::kHasAlibi && kIsBeside) x += ptx::fma(row.tilt, static_cast<T>(offset), row.start);
    if constexpr (S::kHasAlibi && !kIsBeside) x -= slope * ptx::abs(row.distance - static_cast<T>(offset));
    return x;
  }

  // All of a tile, seen or not. kIsBeside: on one side of the diagonal, where ALiBi is linear. kAddsBias: by pairs, those of `read` if given.
  template <bool kIsBeside, bool kAddsBias, int kM, int kN>
  __device__ __forceinline__ void change_all(warp::Fragment<kM, kN, T>& s, int query, int key, warp::Fragment<kM, kN, T>* derivative,
                                             const BiasFragment<Element, kM, kN>* read) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query_row = query + 16 * m + warp::fragment_row(2 * half);
        const Row row = row_of(query_row, key + warp::fragment_col(0));
        const Element* const row_bias = bias.at(query_row, key + warp::fragment_col(0));
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          BiasPair<Element> pair;
          if (kAddsBias) pair = read ? read->pairs[m][half][n] : bias.pair_at(row_bias + 8 * n);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            T& score = s.x[m][n][2 * half + i];
            T slope = 1;
            score = change<kIsBeside>(score, row, 8 * n + i, slope);
            if (kAddsBias) score += pair.template column<T>(i);
            if (derivative) derivative->x[m][n][2 * half + i] = slope;
          }
        }
      }
  }

  // s becomes x, -inf where invisible, for a warp's tile whose first element is (query, key) of the sequence. A full tile of raw
  // scores is left as it is. `derivative`, if wanted, receives dx / ds / scale. `read`: all of the tile's bias, if it has been read. Returns whether no score was made -inf.
  template <int kM, int kN>
  __device__ __forceinline__ bool apply(warp::Fragment<kM, kN, T>& s, int query, int key, warp::Fragment<kM, kN, T>* derivative,
                                        const BiasFragment<Element, kM, kN>* read = nullptr) const {
    const bool is_full = band.is_full(query, 16 * kM, key, 8 * kN), has_pairs = read || takes_pairs<kM, kN>(query, key);
    const int distance = query + shift - key;  // of the first element
    const bool is_beside = S::kHasAlibi && S::kIsFast && (distance >= 8 * kN - 1 || distance <= 1 - 16 * kM);
    if constexpr (!S::kIsRaw || S::kIsScaleNegative) {
      if (has_pairs) change_all<false, S::kHasBias>(s, query, key, derivative, read);
      else if (is_beside) change_all<true, false>(s, query, key, derivative, read);
      else change_all<false, false>(s, query, key, derivative, read);
    }
    if (is_full && (!S::kHasBias || has_pairs)) return !S::kHasBias;

    const int first_col = key + warp::fragment_col(0);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query_row = query + 16 * m + warp::fragment_row(2 * half);
        const Range visible = band.keys_of(query_row);
        const Element* next_bias = bias.at(query_row, first_col);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          constexpr int kPerWord = 16;  // tiles: a lane has two columns of each
          const int word_col = first_col + n / kPerWord * kPerWord * 8;
          const uint32 bits = columns_of({visible.begin - word_col, visible.end - word_col});
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            T& score = s.x[m][n][2 * half + i];
            const bool is_visible = bits >> (n % kPerWord * 2 + i) & 1;
            if (S::kHasBias && !has_pairs && is_visible) score += convert<T>(*next_bias);
            if (!is_visible) score = -kInfinity;
            if (derivative && !is_visible) derivative->x[m][n][2 * half + i] = 1;
            next_bias += (i ? 7 : 1) * bias.stride_k;
          }
        }
      }
    return false;
  }
};

}  // namespace cf::attn
