// Of one key tile's backward on Hopper: scores of keys x queries become P, and what dv and ds are made of, with every change of scores
// that the kernel's constants name.
#pragma once
#include "attn/bias_tile.cuh"
#include "attn/key_tile.cuh"

namespace cf {

constexpr bool kPreloadsDelta = !kHasDropout;  // which changes dp before D is subtracted
constexpr int kBiasStages = 2, kBiasLoaders = 2 * kWarpSize;
using BiasTile = attn::BiasTile<BiasElement, kKeyTile>;

// Pieces of the bias, of as many queries as a tile of it holds.
template <bool kIsThere>
struct BiasRing {
  BiasTile tiles[kBiasStages];
  ptx::Barrier full[kBiasStages], empty[kBiasStages];
  __device__ __forceinline__ void init() {
#pragma unroll
    for (int stage = 0; stage < kBiasStages; ++stage) {
      ptx::mbarrier_init(full[stage], kBiasLoaders);
      ptx::mbarrier_init(empty[stage], kConsumerThreads);
    }
  }
};
template <>
struct BiasRing<false> {
  __device__ __forceinline__ void init() {}
};

// By the warps that are left, each thread its part.
template <bool kIsThere>
__device__ __forceinline__ void load_bias(BiasRing<kIsThere>& pieces, const Job& job, const Scores& scores, int thread) {
  if constexpr (kIsThere) {
    constexpr int kQueries = BiasTile::kRows;
    Ring<kBiasStages> ring;
    job.walk.for_each([&](int head, int query) {
      const attn::Bias<BiasElement> bias(scores, job.sequence, head);
      for (int first = query; first < query + kQueryTile; first += kQueries) {
        ptx::mbarrier_wait(pieces.empty[ring.stage], ring.parity ^ 1);
        attn::load_bias<kBiasLoaders>(pieces.tiles[ring.stage], pieces.full[ring.stage], bias, first, job.key_begin, job.sequence.len_q,
                                      job.sequence.len_k, thread);
        ring.advance();
      }
    });
    ptx::cp_async_wait<0>();  // nobody leaves before his copies are done
  }
}

// Which elements of a lane dropout keeps: a bit for each.
struct Kept {
  uint32 words[kQueryTile / 64] = {};
  __device__ __forceinline__ void add(int n, int i, bool is_kept) { words[n / 8] |= is_kept ? 1u << (n % 8 * 4 + i) : 0; }
  __device__ __forceinline__ bool has(int n, int i) const { return words[n / 8] >> (n % 8 * 4 + i) & 1; }
  // The same, of which nothing is known: what was made of the bits is made again, not kept in registers.
  __device__ __forceinline__ Kept settled() const {
    Kept kept;
#pragma unroll
    for (int i = 0; i < kQueryTile / 64; ++i) kept.words[i] = ptx::settled(static_cast<int>(words[i]));
    return kept;
  }
  __device__ __forceinline__ float select(float x, int n, int i) const { return !kHasDropout || has(n, i) ? x : 0.0f; }
};
// `key` and `query`, here and below: of the warp's first element.
__device__ __forceinline__ Kept draw(const attn::Dropout& of_first_head, int head, int key, int query) {
  attn::Dropout dropout = of_first_head;
  dropout.stream += head;
  Kept kept;
  dropout.for_each<1, kQueryTile / 8, attn::Rows::kKeys>(query, key, [&](int, int n, int i, bool is_kept) { kept.add(n, i, is_kept); });
  return kept;
}

// The bias of 16 queries after the others, for a warp's keys.
template <bool kIsThere>
struct BiasReader {
  BiasRing<true>& pieces;
  Ring<kBiasStages> ring;
  attn::BiasBlock<BiasElement> block;
  __device__ __forceinline__ explicit BiasReader(BiasRing<true>& pieces) : pieces(pieces) {}

  __device__ __forceinline__ void read(int step, int key_row, int lane) {
    constexpr int kSteps = BiasTile::kRows / 16;
    static_assert(kQueryTile / 16 % kSteps == 0);
    if (step % kSteps == 0) ptx::mbarrier_wait(pieces.full[ring.stage], ring.parity);
    block.read(pieces.tiles[ring.stage], step % kSteps * 16, key_row, lane);
    if ((step + 1) % kSteps != 0) return;
    ptx::mbarrier_arrive(pieces.empty[ring.stage]);
    ring.advance();
  }
  __device__ __forceinline__ float add(float exponent, int n, int i) const { return ptx::fma(block.at(n, i), float(kLog2E), exponent); }
};
template <>
struct BiasReader<false> {
  __device__ __forceinline__ explicit BiasReader(BiasRing<false>&) {}
  __device__ __forceinline__ void read(int, int, int) {}
  __device__ __forceinline__ float add(float exponent, int, int) const { return exponent; }
};

// Scores become p. With a softcap `y` receives its tanh. `lse`: of this lane's first column.
__device__ __forceinline__ void to_probabilities(ScoreFragment& s, ScoreFragment& y, const Exponents& exponents, const Exponents::Side& side,
                                                 BiasReader<kHasBias>& bias, int key_row, int lane, const float* lse, bool has_coarse) {
#pragma unroll
  for (int n = 0; n < kQueryTile / 8; ++n) {
    if (n % 2 == 0) bias.read(n / 2, key_row, lane);
    const float2 pair = *reinterpret_cast<const float2*>(lse + 8 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = s.x[0][n][i];
      x = exponents.capped(x);
      if constexpr (kHasSoftcap) y.x[0][n][i] = x;
      x = bias.add(exponents.of(x, side, i / 2, i % 2 ? pair.y : pair.x), n % 2, i);
    }
  }
  if (side.needs_mending()) {
    __syncwarp();  // a branch, where selections would burden every tile
    side.mend(s, ptx::settled(lane));
  }
  if (has_coarse) {
    __syncwarp();  // likewise; a positive exponent is then rounding
#pragma unroll
    for (int n = 0; n < kQueryTile / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s.x[0][n][i];
        x = attn::is_large(lse[8 * n + i % 2]) && x > 0 ? 0.0f : x;
      }
  }
#pragma unroll
  for (int n = 0; n < kQueryTile / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s.x[0][n][i] = ptx::exp2(s.x[0][n][i]);
}

// What ds is dp - D times: p, or p dx/ds with a softcap, which then needs p beside it. Both are rounded then, as registers hold no other
// fragment beside dp: ds gains an error of the size that its own rounding has.
struct Weights {
  ScoreFragment s;
  Packed p, sloped;
  __device__ __forceinline__ float at(int n, int i) const {
    return kHasSoftcap ? unpack<Element>(sloped[n / 2][n % 2 * 2 + i / 2], i % 2) : s.x[0][n][i];
  }
  // Of 16 queries; `s` is p.
  __device__ __forceinline__ void pack_probabilities(int step, const Kept& kept) {
    warp::Fragment<1, 2> chosen;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) chosen.x[0][n][i] = kept.select(s.x[0][2 * step + n][i], 2 * step + n, i);
    warpgroup::pack_pairs<Element>(p[step], chosen, 0);
  }
  // y: tanh.
  __device__ __forceinline__ void pack(const ScoreFragment& y, const Kept& kept) {
#pragma unroll
    for (int step = 0; step < kQueryTile / 16; ++step) {
      pack_probabilities(step, kept);
#pragma unroll
      for (int n = 2 * step; n < 2 * step + 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s.x[0][n][i] *= ptx::fma(-y.x[0][n][i], y.x[0][n][i], 1.0f);
      warpgroup::pack_pairs<Element>(sloped[step], s, step);
    }
  }
  // Pairs that do not see each other become 0, whatever they were.
  __device__ __forceinline__ void hide(const attn::Band<kIsMasked>& band, int key, int query) {
    __syncwarp();  // a branch, as above
    const int lane = ptx::settled(warp::lane());  // settled: what follows from it is computed here, not kept in registers for all of a loop
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = key + lane / 4 + 8 * half, first_col = query + lane % 4 * 2;
      const attn::Range visible = row < band.len_k ? band.queries_of(row, row + 1) : attn::Range{0, 0};
      const uint32 bits = attn::columns_of({visible.begin - first_col, visible.end - first_col});
#pragma unroll
      for (int n = 0; n < kQueryTile / 8; ++n) {
        if constexpr (kHasSoftcap) {
          const uint32 seen = (bits >> 2 * n & 1 ? 0x0000ffffu : 0) | (bits >> (2 * n + 1) & 1 ? 0xffff0000u : 0);
          p[n / 2][n % 2 * 2 + half] &= seen;
          sloped[n / 2][n % 2 * 2 + half] &= seen;
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) s.x[0][n][2 * half + i] = bits >> (2 * n + i) & 1 ? s.x[0][n][2 * half + i] : 0.0f;
        }
      }
    }
  }
};

// dp of the tiles [begin, end) becomes dp - D, of what dropout keeps of it. `minus_delta`: of this lane's first column.
__device__ __forceinline__ void drop(ScoreFragment& dp, const Kept& kept, float keep_scale, const float* minus_delta, int begin, int end) {
#pragma unroll
  for (int n = begin; n < end; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(minus_delta + 8 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) dp.x[0][n][i] = ptx::fma(kept.select(dp.x[0][n][i], n, i), keep_scale, i % 2 ? pair.y : pair.x);
  }
}

// dp - D of hidden pairs becomes 0, whatever dp and D hold; of the tiles [begin, end).
__device__ __forceinline__ void hide_gradient(ScoreFragment& dp, const Weights& weights, int begin, int end) {
  if (!kHasBias) __syncwarp();  // likewise
#pragma unroll
  for (int n = begin; n < end; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) dp.x[0][n][i] = weights.at(n, i) == 0 ? 0.0f : dp.x[0][n][i];
}

}  // namespace cf
