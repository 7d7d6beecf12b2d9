// Which probabilities are dropped: Philox4x32-10 (Salmon et al. 2011) at the counters of the contract, Forward 'Dropout'.
//
// One call serves the set {i, i + 8} x {j, j + 8} of positions: exactly the four elements that a lane owns in one row pair of a
// 16x16 tile, when the tile begins at positions that are multiples of 16.
#pragma once
#include "attn/sequence.cuh"
#include "tile/fragment.cuh"

namespace cf::attn {

struct Philox {
  uint32 word[4];

  __device__ __forceinline__ Philox(uint32 c0, uint32 c1, uint32 c2, uint32 c3, uint64 seed) {
    uint32 k0 = static_cast<uint32>(seed), k1 = static_cast<uint32>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const uint64 a = uint64{0xD2511F53u} * c0, b = uint64{0xCD9E8D57u} * c2;
      c0 = static_cast<uint32>(b >> 32) ^ c1 ^ k0;
      c1 = static_cast<uint32>(b);
      c2 = static_cast<uint32>(a >> 32) ^ c3 ^ k1;
      c3 = static_cast<uint32>(a);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    word[0] = c0; word[1] = c1; word[2] = c2; word[3] = c3;
  }
};

struct Dropout {
  uint64 seed;
  uint32 offset, threshold, stream;      // stream: sequence * Hq + head
  uint32 query_position, key_position;   // of query 0 and key 0, modulo 2^32

  __device__ __forceinline__ Dropout(const Scores& p, const Problem& problem, const Sequence& s, int head)
      : seed(p.seed ? static_cast<uint64>(*p.seed) : p.seed_value),
        offset(static_cast<uint32>(p.offset ? static_cast<uint64>(*p.offset) : p.offset_value)),
        threshold(p.keep_threshold),
        stream(static_cast<uint32>(s.index) * problem.heads_q + head) {
    const int64 k_start = problem.k_start ? problem.k_start[s.index] : problem.k_start_value;
    key_position = static_cast<uint32>(k_start);
    query_position = static_cast<uint32>(k_start + s.exact_shift);
  }

  __device__ __forceinline__ Philox draw(uint32 p, uint32 r) const {
    return Philox(p / 16 * 8 + p % 8, r / 16 * 8 + r % 8, stream, offset, seed);
  }

  __device__ __forceinline__ bool is_kept(int query, int key) const {
    const uint32 p = query_position + query, r = key_position + key;
    const Philox drawn = draw(p, r);
    const uint32 lo = p % 16 < 8 ? drawn.word[0] : drawn.word[2], hi = p % 16 < 8 ? drawn.word[1] : drawn.word[3];
    return (r % 16 < 8 ? lo : hi) >= threshold;
  }

  // Calls f(element, is_kept) for every element of a fragment whose first element is (query, key).
  template <int kM, int kN, class T, class F>
  __device__ __forceinline__ void for_each(warp::Fragment<kM, kN, T>& x, int query, int key, const F& f) const {
    const bool is_aligned = (query_position + query) % 16 == 0 && (key_position + key) % 16 == 0;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const int row = query + 16 * m + warp::fragment_row(0);
      if (is_aligned && kN % 2 == 0) {
#pragma unroll
        for (int n = 0; n + 1 < kN; n += 2)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const Philox drawn = draw(query_position + row, key_position + key + 8 * n + warp::fragment_col(i));
            f(x.x[m][n][i], drawn.word[0] >= threshold);
            f(x.x[m][n + 1][i], drawn.word[1] >= threshold);
            f(x.x[m][n][2 + i], drawn.word[2] >= threshold);
            f(x.x[m][n + 1][2 + i], drawn.word[3] >= threshold);
          }
      } else {
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            f(x.x[m][n][i], is_kept(row + 8 * (i / 2), key + 8 * n + warp::fragment_col(i)));
      }
    }
  }
};

}  // namespace cf::attn
