// Which probabilities are dropped: Philox4x32-10 (Salmon et al. 2011) at the counters of the contract, Forward 'Dropout'.
//
// One call serves the set {i, i + 8} x {j, j + 8} of positions: exactly the four elements that a lane owns in one row pair of a
// 16x16 tile, when the tile begins at positions that are multiples of 16; of queries x keys and of keys x queries alike.
#pragma once
#include "attn/sequence.cuh"
#include "tile/fragment.cuh"

namespace cf::attn {

// Several calls in step: one runs in another's gaps, and all share the keys of a round.
template <int kCalls>
struct Philox {
  uint32 word[kCalls][4];

  // `word` holds the counters before, the random numbers behind.
  __device__ __forceinline__ void run(uint64 seed) {
    uint32 k0 = static_cast<uint32>(seed), k1 = static_cast<uint32>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
#pragma unroll
      for (int call = 0; call < kCalls; ++call) {
        uint32(&c)[4] = word[call];
        const uint64 a = uint64{0xD2511F53u} * c[0], b = uint64{0xCD9E8D57u} * c[2];
        c[0] = static_cast<uint32>(b >> 32) ^ c[1] ^ k0;
        c[1] = static_cast<uint32>(b);
        c[2] = static_cast<uint32>(a >> 32) ^ c[3] ^ k1;
        c[3] = static_cast<uint32>(a);
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }
};

// What a fragment's rows are; its columns are the others.
enum class Rows { kQueries, kKeys };

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

  // The positions of a lane's first row and column.
  template <Rows kRows>
  __device__ __forceinline__ uint32 first_row(int query, int key) const {
    return (kRows == Rows::kQueries ? query_position + query : key_position + key) + warp::fragment_row(0);
  }
  template <Rows kRows>
  __device__ __forceinline__ uint32 first_col(int query, int key) const {
    return (kRows == Rows::kQueries ? key_position + key : query_position + query) + warp::fragment_col(0);
  }
  // The counters of the call that serves an element.
  template <Rows kRows>
  __device__ __forceinline__ void count(uint32 (&counters)[4], uint32 row, uint32 col) const {
    const uint32 p = kRows == Rows::kQueries ? row : col, r = kRows == Rows::kQueries ? col : row;
    counters[0] = p / 16 * 8 + p % 8;
    counters[1] = r / 16 * 8 + r % 8;
    counters[2] = stream;
    counters[3] = offset;
  }
  // Whether the elements of a lane come in whole calls: its tile begins at positions that are multiples of 16.
  template <int kN>
  __device__ __forceinline__ bool is_aligned(int query, int key) const {
    return kN % 2 == 0 && (query_position + query) % 16 == 0 && (key_position + key) % 16 == 0;
  }

  // Calls f(m, n, i, is_kept) for every element of a fragment whose first element is (query, key).
  template <int kM, int kN, Rows kRows = Rows::kQueries, class F>
  __device__ __forceinline__ void for_each(int query, int key, const F& f) const {
    if (is_aligned<kN>(query, key)) for_each_aligned<kM, kN, kRows>(query, key, f, [](int, int) {});
    else for_each_apart<kM, kN, kRows>(query, key, f);
  }
  // Some tiles after the others; `prepare` may make them, while their random numbers are drawn.
  template <int kM, int kN, Rows kRows = Rows::kQueries, class F, class Prepare>
  __device__ __forceinline__ void for_each_aligned(int query, int key, const F& f, const Prepare& prepare) const {
    constexpr int kTogether = kN % 4 == 0 ? 4 : 2;  // tiles, and calls: two serve two
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n + kTogether <= kN; n += kTogether) {
        const uint32 row = first_row<kRows>(query, key) + 16 * m, col = first_col<kRows>(query, key) + 8 * n;
        Philox<kTogether> drawn;
#pragma unroll
        for (int call = 0; call < kTogether; ++call) count<kRows>(drawn.word[call], row, col + call / 2 * 16 + call % 2);
        drawn.run(seed);
        prepare(n, n + kTogether);
#pragma unroll
        for (int call = 0; call < kTogether; ++call)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int half = kRows == Rows::kQueries ? i / 2 : i % 2, tile = kRows == Rows::kQueries ? i % 2 : i / 2;
            f(m, n + call / 2 * 2 + tile, half * 2 + call % 2, drawn.word[call][i] >= threshold);
          }
      }
  }
  // A call for each element.
  template <int kM, int kN, Rows kRows = Rows::kQueries, class F>
  __device__ __forceinline__ void for_each_apart(int query, int key, const F& f) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const uint32 row = first_row<kRows>(query, key) + 16 * m, col = first_col<kRows>(query, key) + 8 * n;
        Philox<4> drawn;
#pragma unroll
        for (int i = 0; i < 4; ++i) count<kRows>(drawn.word[i], row + i / 2 * 8, col + i % 2);
        drawn.run(seed);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32(&word)[4] = drawn.word[i];
          const bool is_low = (row + i / 2 * 8) % 16 >= 8, is_right = (col + i % 2) % 16 >= 8;
          const uint32 mixed = kRows == Rows::kQueries ? word[2] : word[1], other = kRows == Rows::kQueries ? word[1] : word[2];
          f(m, n, i, (is_low ? is_right ? word[3] : mixed : is_right ? other : word[0]) >= threshold);
        }
      }
  }
};

}  // namespace cf::attn
