// The exponents of P where the LSE is known, for accumulators of keys x queries: the x of scores.cuh in base 2, less the LSE, as one sum.
//
//   x log2(e) - lse = unit y + (side - lse) + log2(e) b        y = s, or tanh(s scale / c) with a softcap
//
// ALiBi's -m |p - r| is linear on each side of the diagonal. `side` is the key's part of -m (p - r), the query's part lies in `lse`
// already (`column_part`), and where keys come behind queries 2 m (p - r) is added: few tiles that are seen have such pairs.
#pragma once
#include "attn/mask.cuh"

namespace cf::attn {

template <bool kHasSoftcap, bool kHasAlibi, bool kHasBias, bool kIsScaleNegative>
struct Exponents {
  static constexpr bool kIsRaw = !kHasAlibi && !kHasBias;  // but for a softcap
  float unit, softcap_scale;

  __device__ __forceinline__ explicit Exponents(const Scores& p) : unit(p.fold), softcap_scale(p.softcap_scale) {
    if constexpr (!kIsRaw) unit *= static_cast<float>(kHasSoftcap ? p.softcap : p.scale);
    if constexpr (kIsScaleNegative) unit = -unit;
  }

  // m log2(e) of a head.
  __device__ __forceinline__ static float slope(const Scores& p, const Sequence& s, int head) {
    if constexpr (!kHasAlibi) return 0;
    return static_cast<const float*>(p.alibi_slopes)[s.index * p.alibi_stride_b + head * p.alibi_stride_h] * static_cast<float>(kLog2E);
  }
  // What an LSE holds besides itself, `col` queries behind the tile's first.
  __device__ __forceinline__ static float column_part(float slope, int col) { return kHasAlibi ? slope * static_cast<float>(col) : 0; }

  // What a warp's 16 keys need for ALiBi in a tile. `first_distance`: p - r of its first query and its first key.
  struct Side {
    int first_distance;
    float slope, part[2];  // of a lane's two keys
    __device__ __forceinline__ Side(float slope, int first_distance, int lane) : first_distance(first_distance), slope(slope) {
#pragma unroll
      for (int half = 0; half < 2; ++half) part[half] = -slope * static_cast<float>(first_distance - lane / 4 - 8 * half);
    }
    __device__ __forceinline__ bool needs_mending() const { return kHasAlibi && first_distance < 15; }  // some key comes behind a query
    // An exponent of the lane's key `half` and the query `col` behind its first one.
    __device__ __forceinline__ float mended(float exponent, int half, int col, int lane) const {
      const float distance = static_cast<float>(first_distance - lane / 4 - 8 * half + lane % 4 * 2);
      return ptx::fma(2 * slope, min_of(distance + static_cast<float>(col), 0.0f), exponent);
    }
  };

  __device__ __forceinline__ float capped(float s) const { return kHasSoftcap ? ptx::tanh_fast(softcap_scale * s) : s; }
  __device__ __forceinline__ float of(float y, const Side& side, int half, float lse) const {
    return ptx::fma(y, unit, kHasAlibi ? side.part[half] - lse : -lse);
  }
};

}  // namespace cf::attn
