// Of one key tile's backward on Hopper: scores of keys x queries become P, and what dv and ds are made of, with every change of scores
// that the kernel's constants name.
#pragma once
#include "attn/bias_tile.cuh"
#include "attn/key_tile.cuh"

namespace cf {

constexpr bool kPreloadsDelta = !kHasDropout;  // which changes dp before D is subtracted
constexpr int kBiasStages = 2;
// Some queries of one head, 128 bytes of each key.
using BiasTile = tile::Shared<BiasElement, 128 / static_cast<int>(sizeof(BiasElement)), kKeyTile>;

// Pieces of the bias, of as many queries as a tile of it holds.
template <bool kIsThere>
struct BiasRing {
  BiasTile tiles[kBiasStages];
  ptx::Barrier full[kBiasStages], empty[kBiasStages];
  __device__ __forceinline__ void init(int loaders, int readers) {
#pragma unroll
    for (int stage = 0; stage < kBiasStages; ++stage) {
      ptx::mbarrier_init(full[stage], loaders);
      ptx::mbarrier_init(empty[stage], readers);
    }
  }
};
template <>
struct BiasRing<false> {
  __device__ __forceinline__ void init(int, int) {}
};

// By kLoaders threads, each its part.
template <int kLoaders, bool kIsThere>
__device__ __forceinline__ void load_bias(BiasRing<kIsThere>& pieces, const Job& job, const Scores& scores, int thread) {
  if constexpr (kIsThere) {
    constexpr int kQueries = BiasTile::kRows;
    Ring<kBiasStages> ring;
    job.walk.for_each([&](int head, int query) {
      const attn::Bias<BiasElement> bias(scores, job.sequence, head);
      for (int first = query; first < query + kQueryTile; first += kQueries) {
        ptx::mbarrier_wait(pieces.empty[ring.stage], ring.parity ^ 1);
        attn::load_bias<kLoaders>(pieces.tiles[ring.stage], pieces.full[ring.stage], bias, first, job.key_begin, job.sequence.len_q,
                                  job.sequence.len_k, thread);
        ring.advance();
      }
    });
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

// P of a tile, rounded: `p` of what dv is made of, and what ds is dp - D times, P or P dx/ds. A lane holds one of the two alone where they
// are the same, as there is no room for P as it was: ds gains an error of the size that its own rounding has, and in float16 more where P is
// below 2^-14.
struct Weights {
  static constexpr bool kAreApart = kHasSoftcap || kHasDropout;
  Packed p, apart;
  __device__ __forceinline__ Packed& of_ds() { return kAreApart ? apart : p; }
  __device__ __forceinline__ float at(int n, int i) {
    return convert<float>(unpack<Element>(of_ds()[n / 2][n % 2 * 2 + i / 2], i % 2));
  }
  // Of 16 queries; `s` is P, and y tanh if there is a softcap.
  __device__ __forceinline__ void pack(int step, const ScoreFragment& s, const float (&y)[8], const Kept& kept) {
    warp::Fragment<1, 2> chosen, sloped;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = s.x[0][2 * step + n][i], tanh = y[4 * n + i];
        chosen.x[0][n][i] = kept.select(x, 2 * step + n, i);
        sloped.x[0][n][i] = kHasSoftcap ? x * ptx::fma(-tanh, tanh, 1.0f) : x;
      }
    warpgroup::pack_pairs<Element>(p[step], chosen, 0);
    if constexpr (kAreApart) warpgroup::pack_pairs<Element>(apart[step], sloped, 0);
  }
  // Pairs that do not see each other become 0, whatever they were.
  __device__ __forceinline__ void hide(const attn::Band<kIsMasked>& band, int key, int query) {
    __syncwarp();  // a branch, as in `weigh`
    const int lane = ptx::settled(warp::lane());  // settled: what follows from it is computed here, not kept in registers for all of a loop
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = key + lane / 4 + 8 * half, first_col = query + lane % 4 * 2;
      const attn::Range visible = row < band.len_k ? band.queries_of(row, row + 1) : attn::Range{0, 0};
      const uint32 bits = attn::columns_of({visible.begin - first_col, visible.end - first_col});
#pragma unroll
      for (int n = 0; n < kQueryTile / 8; ++n) {
        const uint32 seen = (bits >> 2 * n & 1 ? 0x0000ffffu : 0) | (bits >> (2 * n + 1) & 1 ? 0xffff0000u : 0);
        p[n / 2][n % 2 * 2 + half] &= seen;
        if constexpr (kAreApart) apart[n / 2][n % 2 * 2 + half] &= seen;
      }
    }
  }
};

// Scores become weights, 16 queries after the others. kIsRare: some key comes behind a query, for ALiBi, or some LSE is so large that a
// positive exponent is its rounding. `behind(step)`: what is done with a step's registers once they are free.
template <bool kIsRare, class F>
__device__ __forceinline__ void weigh(ScoreFragment& s, Weights& weights, const Exponents& exponents, const Exponents::Side& side,
                                      BiasReader<kHasBias>& bias, const Kept& kept, int key_row, int lane, const Columns& lse, const F& behind) {
#pragma unroll
  for (int step = 0; step < kQueryTile / 16; ++step) {
    bias.read(step, key_row, lane);
    float y[8];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s.x[0][2 * step + n][i];
        const float column = lse.pair[2 * step + n][i % 2];
        y[4 * n + i] = exponents.capped(x);
        x = exponents.of(y[4 * n + i], side, i / 2, column);
        if constexpr (kIsRare && kHasAlibi) x = side.mended(x, i / 2, 16 * step + 8 * n + i % 2, lane);
        x = bias.add(x, n, i);
        if constexpr (kIsRare) x = attn::is_large(column) && x > 0 ? 0.0f : x;
        x = ptx::exp2(x);
      }
    weights.pack(step, s, y, kept);
    behind(step);
  }
}
template <class F>
__device__ __forceinline__ void weigh(ScoreFragment& s, Weights& weights, const Exponents& exponents, const Exponents::Side& side,
                                      BiasReader<kHasBias>& bias, const Kept& kept, int key_row, int lane, const Columns& lse, bool has_coarse,
                                      const F& behind) {
  if (has_coarse || side.needs_mending()) {
    __syncwarp();  // a branch, where selections would burden every tile
    weigh<true>(s, weights, exponents, side, bias, kept, key_row, ptx::settled(lane), lse, behind);
  } else {
    weigh<false>(s, weights, exponents, side, bias, kept, key_row, lane, lse, behind);
  }
}

// dp becomes dp - D, of what dropout keeps of it.
__device__ __forceinline__ void drop(ScoreFragment& dp, const Kept& kept, float keep_scale, const float* minus_delta) {
#pragma unroll
  for (int n = 0; n < kQueryTile / 8; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(minus_delta + warp::fragment_col(0) + 8 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) dp.x[0][n][i] = ptx::fma(kept.select(dp.x[0][n][i], n, i), keep_scale, i % 2 ? pair.y : pair.x);
  }
}

// dp - D of hidden pairs becomes 0, whatever dp and D hold.
__device__ __forceinline__ void hide_gradient(ScoreFragment& dp, Weights& weights) {
  if (!kHasBias) __syncwarp();  // likewise
#pragma unroll
  for (int n = 0; n < kQueryTile / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) dp.x[0][n][i] = weights.at(n, i) == 0 ? 0.0f : dp.x[0][n][i];
}

// dp - D becomes ds, which takes the weights' place, 16 queries after the others. `behind(step)`: what is done with those of a step.
template <class F>
__device__ __forceinline__ void differentiate(ScoreFragment& dp, Weights& weights, const F& behind) {
#pragma unroll
  for (int step = 0; step < kQueryTile / 16; ++step) {
#pragma unroll
    for (int n = 2 * step; n < 2 * step + 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dp.x[0][n][i] *= weights.at(n, i);
    warpgroup::pack_pairs<Element>(weights.of_ds()[step], dp, step);
    behind(step);
  }
}

}  // namespace cf
