// The backward on Hopper, for 16-bit types, by wgmma and the copy engine: one key tile of one KV head per block, dk and dv in registers.
//
//   loader, one thread:      copies k and v once, then q and dout tile by tile into a ring of stages
//   statistician, one warp:  lse and D of the tile's rows, and what is special about them
//   consumers, 64 keys each, for each query head of the group, for each query tile that sees the keys:
//     s^T = k q^T            dp^T - D = v dout^T - D
//     p^T = exp(x^T - lse)   ds^T = p^T (dp^T - D)
//     dv += p^T dout         dk += ds^T q             from registers
//     dq = ds k            of the rows or columns that are this consumer's, ds of both consumers through shared memory;
//                          added to dq_accum by bulk reductions, each warp its own part
//   at the end:  dv, scale dk              (bwd_finish brings scale dq home)
//
// Shared    k, v [kKeyTile, kHeadDim] for the whole block; q, dout [kStages][kQueryTile, kHeadDim]; ds [2][kQueryTile, kKeyTile]: all in
//           panels of 64 columns, swizzled; dq of each warp in fragment order.
// Barriers  full: the loader's arrival and its bytes, or all of the statistician's lanes. empty: one arrival a consumer, after the wait that
//           proves its products done; of q one a thread, each for the statistics that it has read itself. Named, of both consumers: ds is
//           written. One for each tile is enough, as ds has two places: whoever writes a place again has passed the barrier that the other
//           reaches only after its product with it.
// Order     dk and dv: fixed, head by head and tile by tile. dq: the order in which blocks arrive.
#include "attn/bias_tile.cuh"
#include "attn/exponents.cuh"
#include "attn/gradient.cuh"
#include "ptx/load_shared.cuh"
#include "ptx/setmaxnreg.cuh"
#include "tile/warpgroup.cuh"

namespace cf {

using warpgroup::kPanel;
using warpgroup::kRows;
using warpgroup::kWarpRows;
using warpgroup::registers;
using warpgroup::Ring;
constexpr int kGroup = warpgroup::kThreads;
constexpr int kConsumers = 2, kConsumerThreads = kConsumers * kGroup;
constexpr int kThreads = kGroup + kConsumerThreads;
static_assert(kThreads == kWarps * kWarpSize && kKeyTile == kConsumers * kRows && kHeadDim == kHeadDimV);
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // 128 x 40 + 256 x 232: what the launch gave
constexpr int kPanels = kHeadDim / kPanel;
// dq is split so that each product is 64 x 64: by query rows, or by panels of columns.
constexpr bool kSplitsRows = kQueryTile == kConsumers * kRows;
static_assert(kSplitsRows ? kPanels == 1 : kQueryTile == kRows && kPanels == kConsumers);
static_assert(kStages > 1, "the next tile's statistics are awaited before this one is done");
static_assert(attn::kRowPad % kQueryTile == 0, "workspaces are padded to whole tiles");
// Whether the product of v and dout is issued once p is there, where registers hold no second fragment until then.
constexpr bool kIsLate = kHasSoftcap || (kHasAlibi && kHasDropout) || (kHeadDim == 64 && (kHasBias || kHasDropout));
constexpr bool kPreloadsDelta = !kHasDropout;  // which changes dp before D is subtracted
constexpr int kBiasStages = 2, kBiasLoaders = 2 * kWarpSize;

constexpr int kDsStages = 2;
using DqFragment = warp::Fragment<1, kPanel / 8>;
constexpr int kDqFloats = sizeof(DqFragment) / 4 * kWarpSize;  // of a warp

constexpr int kAbsent = 1, kCoarse = 2;
struct alignas(16) Statistics {
  float lse[kQueryTile], minus_delta[kQueryTile];  // (+inf, 0): the row takes no part
  int special;                                     // kAbsent: such a row. kCoarse: an lse beyond kLargeExponent
  float slope;                                     // of the tile's head, for ALiBi, whose part of a column is in lse
};
using Exponents = attn::Exponents<kHasSoftcap, kHasAlibi, kHasBias, kIsScaleNegative>;

// The query tiles of some heads, in order.
struct Walk {
  int head_begin, head_end, query_begin, query_end;

  __device__ __forceinline__ Walk uniform() const {
    return {warp::uniform(head_begin), warp::uniform(head_end), warp::uniform(query_begin), warp::uniform(query_end)};
  }
  // Calls f(head, first query of the tile).
  template <class F>
  __device__ __forceinline__ void for_each(const F& f) const {
    for (int head = head_begin; head < head_end; ++head)
      for (int query = query_begin; query < query_end; query += kQueryTile) f(head, query);
  }
};

// What this block does: a key tile of a KV head, and the query tiles that see it.
struct Job {
  attn::Sequence sequence;
  attn::Band<kIsMasked> band;
  attn::Range queries;
  Walk walk;
  int kv_head;
  int key_begin;

  __device__ __forceinline__ Job(const Problem& problem, const attn::Work& work)
      : sequence(work.sequence), band(problem, work.sequence), kv_head(work.head), key_begin(work.tile * kKeyTile) {
    const int group = problem.heads_q / problem.heads_kv;
    queries = band.queries_of(key_begin, min_of(key_begin + kKeyTile, sequence.len_k));
    const bool is_seen = queries.begin < queries.end;
    walk = {kv_head * group, is_seen ? (kv_head + 1) * group : 0, queries.begin / kQueryTile * kQueryTile, queries.end};
  }
  __device__ __forceinline__ bool is_idle() const { return walk.head_begin >= walk.head_end; }
};

using BiasTile = attn::BiasTile<BiasElement, kKeyTile>;
// Read tile by tile, where registers are few.
struct Factors {
  float* dq_accum;  // of the first head and query
  int64 head_floats;
  Exponents exponents;
  float keep_scale;
};

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

struct alignas(1024) Smem {  // a swizzle repeats every 1024 bytes
  warpgroup::Panels<Element, kPanels, kKeyTile> k, v;
  warpgroup::Panels<Element, kPanels, kQueryTile> q[kStages], dout[kStages];
  warpgroup::Panels<Element, kConsumers, kQueryTile> ds[kDsStages];
  alignas(128) float dq[kConsumerThreads / kWarpSize][kDqFloats];
  BiasRing<kHasBias> bias;
  Statistics statistics[kStages];
  Job job;
  attn::Dropout dropout;  // of head 0
  Factors factors;
  ptx::Barrier k_full, v_full, q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages], statistics_full[kStages];
};
static_assert(sizeof(Smem) == kSmemBytes, "host arithmetic has drifted");
constexpr int kKeyPanelBytes = kKeyTile * kPanel * 2, kQueryPanelBytes = kQueryTile * kPanel * 2;
constexpr int kQueryBytes = sizeof(Smem::q) / kStages, kDsBytes = sizeof(Smem::ds) / kDsStages;

using ScoreFragment = warp::Fragment<1, kQueryTile / 8>;  // of keys x queries
using KeyFragment = warp::Fragment<1, kHeadDim / 8>;
using Packed = uint32[kQueryTile / 16][4];

constexpr int kDsBarrier = 1;  // 0 is __syncthreads

__device__ __forceinline__ void load(Smem& smem, const BwdSm90Params& params) {
  const Job& job = smem.job;
  const attn::Sequence& seq = job.sequence;
  warpgroup::load(smem.k, params.k, smem.k_full, seq.k_begin + job.key_begin, job.kv_head, seq.batch);
  warpgroup::load(smem.v, params.v, smem.v_full, seq.k_begin + job.key_begin, job.kv_head, seq.batch);
  Ring<kStages> ring;
  job.walk.for_each([&](int head, int query) {
    ptx::mbarrier_wait(smem.q_empty[ring.stage], ring.parity ^ 1);
    warpgroup::load(smem.q[ring.stage], params.q, smem.q_full[ring.stage], seq.q_begin + query, head, seq.batch);
    ptx::mbarrier_wait(smem.dout_empty[ring.stage], ring.parity ^ 1);
    warpgroup::load(smem.dout[ring.stage], params.dout, smem.dout_full[ring.stage], seq.q_begin + query, head, seq.batch);
    ring.advance();
  });
}

// By a whole warp. Rows that see none of these keys take no part, whatever they hold.
__device__ __forceinline__ void prepare_statistics(Smem& smem, const BwdSm90Params& params) {
  using Pair = attn::RowStats<float>;
  const Job& job = smem.job;
  const int64 rows = attn::padded_rows(params.problem), begin = attn::padded_begin(params.problem, job.sequence);
  Ring<kStages> ring;
  job.walk.for_each([&](int head, int query) {
    const Pair* pairs = static_cast<const Pair*>(params.stats) + head * rows + begin + query;
    const float slope = Exponents::slope(params.scores, job.sequence, head);
    Statistics& statistics = smem.statistics[ring.stage];
    Pair mine[kQueryTile / kWarpSize];
    bool is_absent = false, is_coarse = false;
#pragma unroll
    for (int i = 0; i < kQueryTile / kWarpSize; ++i) {
      const int row = i * kWarpSize + warp::lane();
      mine[i] = pairs[row];
      if (query + row < job.queries.begin || query + row >= job.queries.end) mine[i] = {kInfinity, 0};
      is_absent |= mine[i].lse == kInfinity;
      is_coarse |= attn::is_large(mine[i].lse);
    }
    ptx::mbarrier_wait(smem.q_empty[ring.stage], ring.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kQueryTile / kWarpSize; ++i) {
      const int row = i * kWarpSize + warp::lane();
      statistics.lse[row] = mine[i].lse + Exponents::column_part(slope, row);
      statistics.minus_delta[row] = -mine[i].delta;
    }
    is_absent = __any_sync(kFullWarp, is_absent);
    is_coarse = __any_sync(kFullWarp, is_coarse);
    if (warp::lane() == 0) {
      statistics.special = (is_absent ? kAbsent : 0) | (is_coarse ? kCoarse : 0);
      statistics.slope = slope;
    }
    ptx::mbarrier_arrive(smem.statistics_full[ring.stage]);
    ring.advance();
  });
}

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

// d = a b^T, or d += a b^T, over the head dim, a's 64 rows of a tile of kKeyTile and b a tile of kQueryTile.
template <bool kAdds>
__device__ __forceinline__ void multiply_scores(ScoreFragment& d, uint64 a, uint64 b) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int panel = step / 4, inside = step % 4 * 32;
    ptx::Wgmma<Element, kQueryTile>::template shared<false>(registers(d), ptx::advance(a, panel * kKeyPanelBytes + inside),
                                                            ptx::advance(b, panel * kQueryPanelBytes + inside), kAdds || step > 0);
  }
}
// What dp - D is summed onto: so no subtraction stands beside the products.
__device__ __forceinline__ void begin_with(ScoreFragment& dp, const float* minus_delta) {
#pragma unroll
  for (int n = 0; n < kQueryTile / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; i += 2) ptx::load_shared(dp.x[0][n][i], dp.x[0][n][i + 1], ptx::shared_address(minus_delta + 8 * n));
}
// d += a b over the queries.
__device__ __forceinline__ void multiply_keys(KeyFragment& d, const Packed& a, uint64 b) {
#pragma unroll
  for (int step = 0; step < kQueryTile / 16; ++step)
    ptx::Wgmma<Element, kHeadDim>::template registers<true>(registers(d), a[step], ptx::advance(b, step * 16 * kPanel * 2), true);
}
// d = ds k over the keys.
__device__ __forceinline__ void multiply_queries(DqFragment& d, uint64 ds, uint64 k) {
#pragma unroll
  for (int step = 0; step < kKeyTile / 16; ++step)
    ptx::Wgmma<Element, kPanel>::template shared<true>(registers(d), ptx::advance(ds, step / 4 * kQueryPanelBytes + step % 4 * 32),
                                                       ptx::advance(k, step * 16 * kPanel * 2), step > 0);
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

// By both consumers: rows for which is_zeroed holds.
template <int kTileRows, class Predicate>
__device__ __forceinline__ void zero_rows(warpgroup::Panels<Element, kPanels, kTileRows>& tile, Predicate is_zeroed) {
  constexpr int kChunk = 16 / sizeof(Element), kChunks = kPanel / kChunk;
  for (int i = ptx::settled(static_cast<int>(threadIdx.x)) - kGroup; i < kPanels * kTileRows * kChunks; i += kConsumerThreads) {
    const int row = i / kChunks % kTileRows;
    if (is_zeroed(row)) *reinterpret_cast<uint4*>(&tile[i / kChunks / kTileRows][row][i % kChunks * kChunk]) = uint4{0, 0, 0, 0};
  }
}
__device__ __forceinline__ void meet() { ptx::named_barrier_sync(kDsBarrier, kConsumerThreads); }

__device__ __forceinline__ void consume(int consumer, Smem& smem, const BwdSm90Params& params) {
  const Job& job = smem.job;
  const attn::Sequence& seq = job.sequence;
  const int lane = warp::lane(), warp_number = warp::uniform(threadIdx.x % kGroup / kWarpSize);
  const bool is_lead = threadIdx.x % kGroup == 0;
  const int key = warp::uniform(job.key_begin) + consumer * kRows + warp_number * kWarpRows;
  const attn::Band<kIsMasked> band = job.band.uniform();
  BiasReader<kHasBias> bias(smem.bias);
  const uint64 k_rows = ptx::descriptor(ptx::shared_address(smem.k[0][consumer * kRows]), 16);
  const uint64 v_rows = ptx::descriptor(ptx::shared_address(smem.v[0][consumer * kRows]), 16);
  const uint64 q = ptx::descriptor(ptx::shared_address(smem.q), kQueryPanelBytes);
  const uint64 dout = ptx::descriptor(ptx::shared_address(smem.dout), kQueryPanelBytes);
  const uint64 ds = ptx::descriptor(ptx::shared_address(smem.ds[0][0][kSplitsRows ? consumer * kRows : 0]), 16);
  const uint64 k_columns = ptx::descriptor(ptx::shared_address(smem.k[kSplitsRows ? 0 : consumer]), 16);
  float* const dq_stage = smem.dq[consumer * (kGroup / kWarpSize) + warp_number];
  const int accum_place = kSplitsRows ? (consumer * kRows + warp_number * kWarpRows) * kHeadDim
                                      : warp_number * kWarpRows * kHeadDim + consumer * kDqFloats;

  KeyFragment dk, dv;
  dk.zero();
  dv.zero();
  Ring<kStages> ring;
  int ds_stage = 0;
  if (!job.is_idle()) {
    ptx::mbarrier_wait(smem.k_full, 0);
    // Keys that no query sees take no part: theirs could reach dq.
    const attn::Range keys = band.keys_of(0, seq.len_q);
    const int first = keys.begin - job.key_begin, end = keys.end - job.key_begin;
    if (first > 0 || end < kKeyTile) {
      zero_rows(smem.k, [&](int row) { return row < first || row >= end; });
      ptx::fence_async_proxy();
      meet();
    }
    ptx::mbarrier_wait(smem.v_full, 0);
  }
  int special = 0;
  const auto await_statistics = [&] {
    ptx::mbarrier_wait(smem.statistics_full[ring.stage], ring.parity);
    special = warp::uniform(smem.statistics[ring.stage].special);
  };
  const Walk walk = job.walk.uniform();
  if (!job.is_idle()) await_statistics();
  walk.for_each([&](int head, int query) {
    const int stage = ring.stage, stage_bytes = stage * kQueryBytes;
    const Statistics& statistics = smem.statistics[stage];
    Weights weights;
    ScoreFragment& s = weights.s;
    ScoreFragment dp;
    if constexpr (kPreloadsDelta && !kIsLate) begin_with(dp, statistics.minus_delta + warp::fragment_col(0));
    ptx::mbarrier_wait(smem.q_full[stage], ring.parity);
    const bool is_coarse = special & kCoarse;
    if (special & kAbsent) {  // were their q or dout a NaN, 0 times it would reach dk or dv
      ptx::mbarrier_wait(smem.dout_full[stage], ring.parity);
      const auto is_absent = [&](int row) { return statistics.lse[row] == kInfinity; };
      zero_rows(smem.q[stage], is_absent);
      zero_rows(smem.dout[stage], is_absent);
      ptx::fence_async_proxy();
      meet();
    }
    ptx::pin(registers(s));
    ptx::pin(registers(dp));
    ptx::wgmma_fence();
    multiply_scores<false>(s, k_rows, ptx::advance(q, stage_bytes));
    ptx::wgmma_commit();
    const auto multiply_values = [&] {
      ptx::mbarrier_wait(smem.dout_full[stage], ring.parity);
      ptx::wgmma_fence();
      multiply_scores<kPreloadsDelta>(dp, v_rows, ptx::advance(dout, stage_bytes));
      ptx::wgmma_commit();
    };
    if (!kIsLate) multiply_values();

    const int row_lane = ptx::settled(lane);  // of stmatrix: 8 queries and 8 keys a matrix; settled as in `hide`
    const int ds_row = row_lane / 16 * 8 + row_lane % 8, ds_chunk = 2 * warp_number + row_lane / 8 % 2;
    const uint32 ds_place = ptx::shared_address(&smem.ds[0][consumer][ds_row][(ds_chunk ^ ds_row % 8) * 8]);
    const bool has_hidden = !band.is_full(query, kQueryTile, key, kWarpRows);
    Kept kept;
    if constexpr (kHasDropout) kept = draw(smem.dropout, head, key, query);
    ptx::wgmma_wait<kIsLate ? 0 : 1>();
    ptx::pin(registers(s));
    const Exponents exponents = smem.factors.exponents;
    const Exponents::Side side(statistics.slope, query + seq.shift - key, row_lane);
    to_probabilities(s, dp, exponents, side, bias, consumer * kRows + warp_number * kWarpRows, row_lane,
                     statistics.lse + warp::fragment_col(0), is_coarse);
    if constexpr (kHasSoftcap) weights.pack(dp, kept);  // until here dp's registers held tanh
    if (has_hidden) weights.hide(job.band, key, query);
    if constexpr (kIsLate) {
      if constexpr (kPreloadsDelta) begin_with(dp, statistics.minus_delta + warp::fragment_col(0));
      ptx::pin(registers(dp));
      multiply_values();
    }
    ptx::wgmma_wait<0>();
    ptx::pin(registers(dp));
    if constexpr (kHasDropout) kept = kept.settled();
    const bool hides = kHasBias || has_hidden;  // of a bias, -inf hides
    if (!kHasDropout && hides) hide_gradient(dp, weights, 0, kQueryTile / 8);
    Packed ds_pairs;
#pragma unroll
    for (int step = 0; step < kQueryTile / 16; ++step) {
      if constexpr (kHasDropout) {
        drop(dp, kept, smem.factors.keep_scale, statistics.minus_delta + warp::fragment_col(0), 2 * step, 2 * step + 2);
        if (hides) hide_gradient(dp, weights, 2 * step, 2 * step + 2);
      }
#pragma unroll
      for (int n = 2 * step; n < 2 * step + 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) dp.x[0][n][i] *= weights.at(n, i);
      if constexpr (!kHasSoftcap) weights.pack_probabilities(step, kept);
      warpgroup::pack_pairs<Element>(ds_pairs[step], dp, step);
      ptx::stmatrix_transposed(ds_place + ds_stage * kDsBytes + step * 16 * kPanel * 2, ds_pairs[step]);
    }
    ptx::pin(registers(dv));
    ptx::wgmma_fence();
    multiply_keys(dv, weights.p, ptx::advance(dout, stage_bytes));
    ptx::wgmma_commit();
    ptx::fence_async_proxy();
    meet();
    DqFragment dq;
    ptx::pin(registers(dq));
    ptx::wgmma_fence();
    multiply_queries(dq, ptx::advance(ds, ds_stage * kDsBytes), k_columns);
    ptx::wgmma_commit();
    ptx::pin(registers(dk));
    ptx::wgmma_fence();
    multiply_keys(dk, ds_pairs, ptx::advance(q, stage_bytes));
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::pin(registers(dv));
    if (is_lead) ptx::mbarrier_arrive(smem.dout_empty[stage]);
    ptx::pin(registers(dq));
    if (lane == 0) ptx::tma_wait_read();  // of the tile before
    __syncwarp();
    const int stage_lane = ptx::settled(lane);
#pragma unroll
    for (int n = 0; n < kPanel / 8; ++n) {
      const float* x = dq.x[0][n];
      reinterpret_cast<float4*>(dq_stage)[n * kWarpSize + stage_lane] = float4{x[0], x[1], x[2], x[3]};
    }
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      float* const accum = smem.factors.dq_accum + head * smem.factors.head_floats + static_cast<int64>(query) * kHeadDim;
      ptx::bulk_reduce_add(accum + accum_place, dq_stage, kDqFloats * 4);
      ptx::tma_commit();
    }
    ring.advance();
    ds_stage ^= 1;
    if (head + 1 < walk.head_end || query + kQueryTile < walk.query_end) await_statistics();  // under the last product
    ptx::wgmma_wait<0>();
    ptx::pin(registers(dk));
    ptx::mbarrier_arrive(smem.q_empty[stage]);
  });

  if constexpr (kHasDropout) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dv.x[0][n][i] *= static_cast<float>(params.scores.keep_scale);
  }
  // Keys past the live ones still get their zeros.
  const int rows = seq.all_k - key;
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) dk.x[0][n][i] = ptx::fma(dk.x[0][n][i], static_cast<float>(params.scores.scale), 0.0f);  // never -0
  GradElement* const dk_rows = attn::rows<GradElement>(params.dk, seq, seq.k_begin, job.kv_head, key);
  GradElement* const dv_rows = attn::rows<GradElement>(params.dv, seq, seq.k_begin, job.kv_head, key);
  warp::store_global<GradElement, kCopyBytes, kAccumulate>(dk_rows, params.dk.stride_n, rows, params.problem.head_dim, dk);
  warp::store_global<GradElement, kCopyBytes, kAccumulate>(dv_rows, params.dv.stride_n, rows, params.problem.head_dim_v, dv);
  if (lane == 0) ptx::tma_wait_read();  // shared memory outlives its copies
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads, 1) bwd_sm90(const __grid_constant__ cf::BwdSm90Params params) {
  using namespace cf;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const attn::Work work = attn::find_work<false, kKeyTile>(params.problem, blockIdx.x);
  if (work.tile < 0) return;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(smem.k_full, 1);
    ptx::mbarrier_init(smem.v_full, 1);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(smem.q_full[stage], 1);
      ptx::mbarrier_init(smem.dout_full[stage], 1);
      ptx::mbarrier_init(smem.statistics_full[stage], kWarpSize);
      ptx::mbarrier_init(smem.q_empty[stage], kConsumerThreads);
      ptx::mbarrier_init(smem.dout_empty[stage], kConsumers);
    }
    smem.bias.init();
    ptx::mbarrier_init_fence();
    smem.job = Job(params.problem, work);
    const int64 padded_begin = attn::padded_begin(params.problem, work.sequence);
    smem.factors = {static_cast<float*>(params.dq_accum) + padded_begin * kHeadDim, attn::padded_rows(params.problem) * kHeadDim, Exponents(params.scores), static_cast<float>(params.scores.keep_scale)};
    if constexpr (kHasDropout) smem.dropout = attn::Dropout(params.scores, params.problem, work.sequence, 0);
  }
  __syncthreads();
  const int group = warp::uniform(threadIdx.x / kGroup);
  if (group == 0) {
    ptx::give_registers<kProducerRegisters>();
    const int role = threadIdx.x / kWarpSize;
    if (smem.job.is_idle()) return;
    if (role == 0 && warp::lane() == 0) load(smem, params);
    if (role == 1) prepare_statistics(smem, params);
    if (role >= 2) load_bias(smem.bias, smem.job, params.scores, threadIdx.x - 2 * kWarpSize);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    consume(group - 1, smem, params);
  }
}
