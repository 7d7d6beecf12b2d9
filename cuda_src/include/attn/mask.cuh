// Visibility as one band: key j is visible to query i iff i + low <= j <= i + high (contract, Forward step 5).
// A kernel asks for the key range of a tile or a row, a tile's query range, and whether a tile is full.
#pragma once
#include "attn/sequence.cuh"
#include "tile/fragment.cuh"

namespace cf::attn {

struct Range {
  int begin;
  int end;
};

// Of a lane's columns 0, 1, 8, 9, 16, 17 ... one bit for each below `end`: bits turn into predicates seven at a time, compared numbers do
// not.
__device__ __forceinline__ uint32 columns_below(int end) {
  const int inside = clamp(end, 0, 128);
  return static_cast<uint32>((uint64{1} << (inside / 8 * 2 + min_of(inside % 8, 2))) - 1);
}
__device__ __forceinline__ uint32 columns_of(Range range) { return columns_below(range.end) & ~columns_below(range.begin); }

template <bool kIsMasked>
struct Band {
  int low;
  int high;
  int len_q;
  int len_k;

  __device__ __forceinline__ Band(const Problem& p, const Sequence& s) : low(0), high(0), len_q(s.len_q), len_k(s.len_k) {
    if constexpr (kIsMasked) {
      low = static_cast<int>(clamp(s.exact_shift - p.window_left, -kFar, kFar));
      high = static_cast<int>(clamp(s.exact_shift + p.window_right, -kFar, kFar));
    }
  }

  // The band that every lane of a warp has.
  __device__ __forceinline__ Band uniform() const {
    Band band = *this;
    band.low = warp::uniform(low);
    band.high = warp::uniform(high);
    band.len_q = warp::uniform(len_q);
    band.len_k = warp::uniform(len_k);
    return band;
  }

  // Of keys from here on none is seen.
  __device__ __forceinline__ void end_at(int key) { len_k = min_of(len_k, key); }

  // Keys that some query of [begin, end) sees.
  __device__ __forceinline__ Range keys_of(int begin, int end) const {
    if (begin >= end) return {0, 0};
    if constexpr (!kIsMasked) return {0, len_k};
    return {max_of(0, begin + low), min_of(len_k, end + high)};
  }

  // Queries that see some key of [begin, end).
  __device__ __forceinline__ Range queries_of(int begin, int end) const {
    if (begin >= end) return {0, 0};
    if constexpr (!kIsMasked) return {0, len_q};
    return {max_of(0, begin - high), min_of(len_q, end - low)};
  }

  // Is everything visible in queries [q, q + queries) x keys [k, k + keys), and inside the sequence?
  __device__ __forceinline__ bool is_full(int q, int queries, int k, int keys) const {
    if (k + keys > len_k || q + queries > len_q) return false;
    if constexpr (!kIsMasked) return true;
    return k >= q + queries - 1 + low && k + keys - 1 <= q + high;
  }

  // Keys that one query sees, which may be none.
  __device__ __forceinline__ Range keys_of(int q) const {
    if (q >= len_q) return {0, 0};
    if constexpr (!kIsMasked) return {0, len_k};
    const int begin = max_of(0, q + low);
    return {begin, max_of(begin, min_of(len_k, q + high + 1))};
  }
};

// The same of rows that are (query, head of a group), the heads of a query side by side.
template <bool kIsMasked>
struct PackedBand : Band<kIsMasked> {
  int group;

  __device__ __forceinline__ PackedBand(const Problem& p, const Sequence& s) : Band<kIsMasked>(p, s), group(p.heads_q / p.heads_kv) {
    this->len_q *= group;
  }
  __device__ __forceinline__ PackedBand uniform() const {
    PackedBand band = *this;
    static_cast<Band<kIsMasked>&>(band) = Band<kIsMasked>::uniform();
    band.group = warp::uniform(group);
    return band;
  }
  __device__ __forceinline__ Range keys_of(int begin, int end) const {
    if (begin >= end) return {0, 0};
    return Band<kIsMasked>::keys_of(begin / group, (end - 1) / group + 1);
  }
  __device__ __forceinline__ bool is_full(int row, int rows, int k, int keys) const {
    if (k + keys > this->len_k || row + rows > this->len_q) return false;
    if constexpr (!kIsMasked) return true;
    return k >= (row + rows - 1) / group + this->low && k + keys - 1 <= row / group + this->high;
  }
  __device__ __forceinline__ Range keys_of(int row) const {
    if (row >= this->len_q) return {0, 0};
    return Band<kIsMasked>::keys_of(row / group);
  }
};

}  // namespace cf::attn
