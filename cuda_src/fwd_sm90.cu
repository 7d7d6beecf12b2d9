// The forward on Hopper: out = softmax(x) v and the natural-log LSE, for 16-bit types, by wgmma and the copy engine.
//
//   scheduler, one warp: publishes this block's query tiles, one after the other
//   loaders, two threads: for each of them copy q and the key tiles from the last to the first, and the value tiles, into rings of stages
//   consumers, 64 rows each, for each key tile:
//     in turn, one consumer after the other: issue s(j) = q k(j)^T;   out *= r(j - 1);   issue out += p(j - 1) v(j - 1)
//     wait for s(j);   p(j), r(j) = online softmax of s(j), while the product with v(j - 1) runs;   wait for out
//   and at the end: issue the last product and the next tile's first scores;   out / l, lse = m + log(l), while those scores run
//
// Threads   kConsumers warpgroups behind the producers', whose registers they take over.
// Shared    q [kQueryStages][kQueryTile, kHeadDim], k [kStages][kKeyTile, kHeadDim], v [kStages][kKeyTile, kHeadDimV], and out where there
//           is room, in panels of 64 columns as the copy engine swizzles them; of each consuming warp a key tile's bias.
// Barriers  full: one arrival, of the thread that asks for the copies, and their bytes. empty: one arrival a consumer, after the wait that
//           proves its products done. Of a published tile, full: the scheduler; empty: both loaders and every thread of the consumers.
//           Named: each consumer's own, and its turn, which the one before it gives. out belongs to the warp that writes its rows.
// Order     blocks stay, and take tiles in an order that needs no counter: tile_of. Of packed sequences some blocks take one, or
//           if kIsSplit all.
// Switches  kIsSplit: a tile has some of the keys, and its result is one of those that fwd_combine merges. kPacksHeads: a row is (query,
//           head), all heads of a KV head side by side, so that few queries fill a tile.
#include "attn/bias_tile.cuh"
#include "attn/dropout.cuh"
#include "attn/scores.cuh"
#include "attn/softmax.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/setmaxnreg.cuh"
#include "tile/warpgroup.cuh"

namespace cf {

using warpgroup::kPanel;
using warpgroup::kRows;
using warpgroup::kWarpRows;
using warpgroup::registers;
using warpgroup::Ring;
constexpr int kGroup = warpgroup::kThreads;
constexpr int kConsumers = kQueryTile / kRows;
constexpr int kThreads = kGroup * (1 + kConsumers);
static_assert(kThreads == kWarps * kWarpSize && kQueryTile == kConsumers * kRows && (kConsumers == 2 || kConsumers == 3));
// 128 x 40 + 256 x 232 or 128 x 32 + 384 x 160: what the launch gave.
constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32, kConsumerRegisters = kConsumers == 2 ? 232 : 160;
constexpr int kPanels = kHeadDim / kPanel, kPanelsV = kHeadDimV / kPanel;
static_assert(kHeadDim % kPanel == 0 && kHeadDimV % kPanel == 0 && kKeyTile % 16 == 0);
using Result = ChooseOf<kIsSplit, float, OutElement>::Type;  // what `out` is written in
constexpr bool kPassesOut = kIsSame<Result, Element> && kHeadDimV <= 128;  // out leaves through shared memory: wider, it has no room
static_assert(!kPacksHeads || kIsSplit, "packed rows leave as partial results");
static_assert(!kPacksHeads || !(kHasAlibi || kHasBias || kHasDropout), "what depends on the head is not packed");
using Band = ChooseOf<kPacksHeads, attn::PackedBand<kIsMasked>, attn::Band<kIsMasked>>::Type;
constexpr int kTiles = 4;  // published at a time: the consumers' and their next one, the loaders', one ahead

// A query tile, as the scheduler publishes it.
struct Tile {
  attn::Sequence sequence;
  Band band;
  Result* out;  // of its first row
  float* lse;
  int head;     // the first one
  int kv_head;
  int query_begin;
  int end;    // key tiles [end - count, end)
  int count;  // 0: there are no more
  bool has_sink;
  attn::Dropout dropout;
};

constexpr int kConsumingWarps = kQueryTile / kWarpRows;
template <bool kIsThere>
struct BiasTiles {
  tile::Shared<BiasElement, kWarpRows, kKeyTile> bias[kConsumingWarps];
};
template <>
struct BiasTiles<false> {};
static_assert(sizeof(BiasTiles<true>) % 1024 == 0);

template <bool kIsThere>
struct OutTile {
  Element out[kPanelsV][kQueryTile][kPanel];
};
template <>
struct OutTile<false> {};

struct alignas(1024) Smem : OutTile<kPassesOut>, BiasTiles<kHasBias> {  // a swizzle repeats every 1024 bytes
  Element q[kQueryStages][kPanels][kQueryTile][kPanel];
  Element k[kStages][kPanels][kKeyTile][kPanel];
  Element v[kStages][kPanelsV][kKeyTile][kPanel];
  ptx::Barrier q_full[kQueryStages], q_empty[kQueryStages], k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  ptx::Barrier tile_full[kTiles], tile_empty[kTiles];
  Tile tiles[kTiles];
};
static_assert(sizeof(Smem) == kSmemBytes, "host arithmetic has drifted");
constexpr int kQueryBytes = sizeof(Smem::q) / kQueryStages, kKeyBytes = sizeof(Smem::k) / kStages, kValueBytes = sizeof(Smem::v) / kStages;
constexpr int kQueryPanelBytes = kQueryTile * kPanel * 2, kKeyPanelBytes = kKeyTile * kPanel * 2;

using Switches = attn::Switches<float, BiasElement, kIsMasked, kHasSoftcap, kHasAlibi, kHasBias, kIsScaleNegative, true>;
using TileScores = attn::ScoreMap<Switches, Band>;
using SFragment = warp::Fragment<1, kKeyTile / 8>;
constexpr int kHalfTile = kKeyTile / 2;  // of keys
constexpr bool kTakesHalves = kIsMasked && kConsumers == 2 && Switches::kIsRaw && !kHasDropout;  // of the diagonal's tile, each as it is seen
constexpr bool kLooksAhead = kConsumers == 2;  // at the next tile, under this one's last product
static_assert(kLooksAhead || !kHasBias, "a tile's first bias is on its way before the tile before is done");
using SHalf = warp::Fragment<1, kHalfTile / 8>;
using OutFragment = warp::Fragment<1, kHeadDimV / 8>;
using Softmax = attn::Softmax<1, float, false>;
// Of a bounded row the first tile's maximum serves all tiles, kept so high that no p exceeds 2^64, and at 0 or above: with the softcaps that
// get here none falls below 2^-80 of a row's largest then, or of 1.
constexpr float kHeadroom = 64;

// Place by place through `heads` heads of `tiles` tiles: some heads at a time in turn, so that L2 keeps their keys.
struct Spot {
  uint32 head, rank;
};
__device__ __forceinline__ Spot spot_of(uint32 place, uint32 heads, uint32 tiles, uint32 at_a_time) {
  const uint32 first = place / (at_a_time * tiles) * at_a_time, i = place % (at_a_time * tiles), heads_here = min_of(at_a_time, heads - first);
  return {first + i % heads_here, i / heads_here};
}

// The i-th query tile of this block as find_work counts them, or one past the last. Under a mask tiles differ: of two heads the longest
// tile of one goes with the shortest of the other, the next with the next, and a block takes the two. The heads that are left, unmasked
// all of them, go tile by tile, the longest first, there and back again. Blocks behind those that stay have one tile, of the last ones.
__device__ __forceinline__ uint32 tile_of(const FwdSm90Params& params, int i) {
  const uint32 blocks = params.staying_blocks, block = blockIdx.x, singles = gridDim.x - blocks, all = params.places;
  const uint32 tiles = params.problem.tiles_q, paired = kIsMasked ? params.paired_heads : 0;
  const uint32 pairs = paired / 2 * tiles, pairs_here = pairs > block ? ceil_div(pairs - block, blocks) : 0;
  if (i < 2 * pairs_here) {
    const Spot pair = spot_of(i / 2 * blocks + block, paired / 2, tiles, params.heads_at_a_time / 2);
    return i % 2 ? (2 * pair.head + 1) * tiles + pair.rank : 2 * pair.head * tiles + tiles - 1 - pair.rank;
  }
  uint32 place = all;
  if (block >= blocks) {
    if (i == 0) place = all - singles + block - blocks;
  } else {
    const uint32 round = i - pairs_here;
    const uint32 next = round * blocks + ((round - pairs / blocks) % 2 ? blocks - 1 - block : block) - pairs;
    if (next < all - paired * tiles - singles) place = next;
  }
  if (place == all) return all;
  const uint32 heads = all / tiles - paired;
  const Spot spot = spot_of(place, heads, tiles, kIsMasked ? heads : params.heads_at_a_time);
  return (paired + spot.head) * tiles + tiles - 1 - spot.rank;
}

constexpr int kOwnBarrier = 1, kTurnBarrier = kOwnBarrier + kConsumers;  // of consumer 0, the others' behind; 0 is __syncthreads

__device__ __forceinline__ int rows_per_query(const Problem& problem) { return kPacksHeads ? problem.heads_q / problem.heads_kv : 1; }
// Of a tile's row, which need not be there.
__device__ __forceinline__ float sink_of(const FwdSm90Params& params, const Tile& tile, int row) {
  const int head = tile.head + (kPacksHeads ? (tile.query_begin + row) % rows_per_query(params.problem) : 0);
  return tile.has_sink ? static_cast<const float*>(params.scores.sink)[head] : 0;
}

// Zeros and -inf (or the sink) for rows that see no key. By a whole warp.
__device__ __forceinline__ void store_empty(const FwdSm90Params& params, const Tile& tile) {
  const int rows = min_of(kQueryTile, tile.band.len_q - tile.query_begin);
  for (int row = 0; row < rows; ++row) {
    const float lse = tile.has_sink ? sink_of(params, tile, row) : -kInfinity;
    for (int col = warp::lane(); col < params.problem.head_dim_v; col += kWarpSize)
      tile.out[row * params.out.stride_n + col] = convert<Result>(0.0f);
    if (warp::lane() == 0) tile.lse[row * params.lse.stride_n] = lse;
  }
}

// Writes the next tile that has keys, if there is one; `i` counts this block's.
__device__ __forceinline__ bool find_next(Tile& tile, int& i, const FwdSm90Params& params) {
  const Problem& problem = params.problem;
  for (;;) {
    const uint32 number = tile_of(params, i++);
    if (number >= static_cast<uint32>(params.places)) return false;
    const int of_a_split = params.places / params.num_splits, split = kIsSplit ? static_cast<int>(number) / of_a_split : 0;
    const int place = kIsSplit ? static_cast<int>(number) % of_a_split : static_cast<int>(number);
    const attn::Work work = attn::find_work<true, kQueryTile, kPacksHeads>(
        problem, attn::in_order_of_bias<kHasBias>(problem, params.scores, place, problem.tiles_q, problem.heads_q));
    if (work.tile < 0) continue;
    if (warp::lane() == 0) {
      Band band(problem, work.sequence);
      int split_begin = 0;
      if constexpr (kIsSplit) {
        const int len_k = work.sequence.len_k, part = ceil_div(ceil_div(len_k, params.num_splits), kKeyTile) * kKeyTile;
        split_begin = static_cast<int>(min_of<int64>(static_cast<int64>(split) * part, len_k));
        band.end_at(split_begin + min_of(part, len_k - split_begin));
      }
      const int begin = work.tile * kQueryTile;
      attn::Range keys = band.keys_of(begin, min_of(begin + kQueryTile, band.len_q));
      keys.begin = max_of(keys.begin, split_begin);
      tile.sequence = work.sequence;
      tile.band = band;
      const int group = problem.heads_q / problem.heads_kv, first_row = work.sequence.q_begin * rows_per_query(problem);
      tile.out = attn::rows<Result>(params.out, work.sequence, first_row, work.head, begin) + split * params.out_stride_split;
      tile.lse = attn::rows<float>(params.lse, work.sequence, first_row, work.head, begin) + split * params.lse_stride_split;
      tile.has_sink = params.scores.sink && !work.sequence.is_slack && split == 0;
      tile.head = kPacksHeads ? work.head * group : work.head;
      tile.kv_head = tile.head / group;
      tile.query_begin = begin;
      tile.end = ceil_div(keys.end, kKeyTile);
      tile.count = keys.begin < keys.end ? tile.end - keys.begin / kKeyTile : 0;
      if (kHasDropout && tile.count > 0) tile.dropout = attn::Dropout(params.scores, problem, work.sequence, work.head);
    }
    __syncwarp();
    if (tile.count > 0) return true;
    store_empty(params, tile);
    __syncwarp();
  }
}

__device__ __forceinline__ void schedule(Smem& smem, const FwdSm90Params& params) {
  Ring<kTiles> tiles;
  for (int i = 0;; tiles.advance()) {
    Tile& tile = smem.tiles[tiles.stage];
    ptx::mbarrier_wait(smem.tile_empty[tiles.stage], tiles.parity ^ 1);
    const bool is_found = find_next(tile, i, params);
    __syncwarp();
    if (warp::lane() == 0) {
      if (!is_found) tile.count = 0;
      ptx::mbarrier_arrive(smem.tile_full[tiles.stage]);
    }
    if (!is_found) return;
  }
}

// The key or the value tiles of all query tiles, by one thread. Behind the first of each `load_more` may load what else it needs.
template <class Panels, class LoadMore>
__device__ __forceinline__ void load_all(Smem& smem, Panels (&places)[kStages], const TensorMap& map, ptx::Barrier (&full)[kStages],
                                         ptx::Barrier (&empty)[kStages], LoadMore load_more) {
  Ring<kTiles> tiles;
  Ring<kStages> stages;
  for (;; tiles.advance()) {
    const Tile& tile = smem.tiles[tiles.stage];
    ptx::mbarrier_wait(smem.tile_full[tiles.stage], tiles.parity);
    if (tile.count == 0) return;
    for (int i = 0; i < tile.count; ++i) {
      ptx::mbarrier_wait(empty[stages.stage], stages.parity ^ 1);
      warpgroup::load(places[stages.stage], map, full[stages.stage], tile.sequence.k_begin + (tile.end - 1 - i) * kKeyTile, tile.kv_head,
           tile.sequence.batch);
      stages.advance();
      if (i == 0) load_more(tile);
    }
    ptx::mbarrier_arrive(smem.tile_empty[tiles.stage]);
  }
}

__device__ __forceinline__ void load_keys(Smem& smem, const FwdSm90Params& params) {
  Ring<kQueryStages> queries;
  load_all(smem, smem.k, params.k, smem.k_full, smem.k_empty, [&](const Tile& tile) {
    ptx::mbarrier_wait(smem.q_empty[queries.stage], queries.parity ^ 1);
    if constexpr (kPacksHeads) {
      const int query = tile.sequence.q_begin + tile.query_begin / rows_per_query(params.problem);
      warpgroup::load_heads(smem.q[queries.stage], params.q, smem.q_full[queries.stage], query, tile.kv_head, tile.sequence.batch);
    } else {
      warpgroup::load(smem.q[queries.stage], params.q, smem.q_full[queries.stage], tile.sequence.q_begin + tile.query_begin, tile.head,
                      tile.sequence.batch);
    }
    queries.advance();
  });
}

__device__ __forceinline__ void load_values(Smem& smem, const FwdSm90Params& params) {
  load_all(smem, smem.v, params.v, smem.v_full, smem.v_empty, [](const Tile&) {});
}

using BiasFragment = attn::BiasFragment<BiasElement, 1, kKeyTile / 8>;
using BiasRows = attn::BiasRows<BiasElement, kKeyTile>;
template <bool kIsThere>
__device__ __forceinline__ typename BiasRows::Tile& bias_place(BiasTiles<kIsThere>& places) {
  return places.bias[threadIdx.x / kWarpSize - kGroup / kWarpSize];
}

// s = q k^T of this consumer's rows.
__device__ __forceinline__ void multiply_keys(SFragment& s, uint64 q, uint64 k) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int panel = step / 4, inside = step % 4 * 32;
    ptx::Wgmma<Element, kKeyTile>::template shared<false>(registers(s), ptx::advance(q, panel * kQueryPanelBytes + inside),
                                                          ptx::advance(k, panel * kKeyPanelBytes + inside), step > 0);
  }
}
// out += p v.
__device__ __forceinline__ void multiply_values(OutFragment& out, const uint32 (&p)[kKeyTile / 16][4], uint64 v) {
#pragma unroll
  for (int step = 0; step < kKeyTile / 16; ++step)
    ptx::Wgmma<Element, kHeadDimV>::template registers<true>(registers(out), p[step], ptx::advance(v, step * 16 * kPanel * 2), true);
}

__device__ __forceinline__ void pack_probabilities(uint32 (&p)[kKeyTile / 16][4], const SFragment& s) {
#pragma unroll
  for (int step = 0; step < kKeyTile / 16; ++step) warpgroup::pack_pairs<Element>(p[step], s, step);
}

__device__ __forceinline__ void multiply_rows(OutFragment& out, const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kHeadDimV / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) out.x[0][n][i] *= factor[i / 2];
}
// The same for good: a row without keys becomes zeros, whatever was multiplied with its zeros.
__device__ __forceinline__ void finish_rows(OutFragment& out, float (&factor)[2], float scale) {
  if (__any_sync(kFullWarp, factor[0] == 0 || factor[1] == 0)) {
#pragma unroll
    for (int n = 0; n < kHeadDimV / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) out.x[0][n][i] = factor[i / 2] == 0 ? 0.0f : out.x[0][n][i];
  }
  factor[0] *= scale;
  factor[1] *= scale;
  multiply_rows(out, factor);
}

// s becomes p. Whether `out` is to be multiplied with `rescale`.
template <int kN>
__device__ __forceinline__ bool to_probabilities(warp::Fragment<1, kN>& s, Softmax& softmax, float (&rescale)[2],
                                                 const TileScores& scores, float fold, const attn::Dropout& dropout,
                                                 int query, int key, bool is_first,
                                                 const attn::BiasFragment<BiasElement, 1, kN>* bias = nullptr) {
  if (bias && scores.bias.has_chunks) {  // it has been read
    scores.apply(s, query, key, static_cast<warp::Fragment<1, kN>*>(nullptr), bias);
  } else if (kTakesHalves && is_first && 8 * kN == kKeyTile) {
    SHalf* const halves = reinterpret_cast<SHalf*>(&s);
#pragma unroll
    for (int half = 0; half < 2; ++half) scores.apply(halves[half], query, key + half * kHalfTile, static_cast<SHalf*>(nullptr));
  } else {
    scores.apply(s, query, key, static_cast<warp::Fragment<1, kN>*>(nullptr));
  }
  const Softmax::Step step = kIsBounded && !is_first ? softmax.keep(fold) : softmax.raise(s, fold);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rescale[half] = step.rescale[0][half];
    softmax.sum[0][half] *= rescale[half];
  }
  // The LSE is of the undropped row. Random numbers are drawn in the gaps that exponentials leave.
  const auto drop = [&](int m, int n, int i, bool is_kept) { s.x[m][n][i] = is_kept ? s.x[m][n][i] : 0.0f; };
  if (!kHasDropout) {
    softmax.add(s, step, fold);
  } else if (dropout.is_aligned<kN>(query, key)) {
    dropout.for_each_aligned<1, kN>(query, key, drop, [&](int begin, int end) { softmax.add(s, step, fold, begin, end); });
  } else {
    softmax.add(s, step, fold);
    dropout.for_each_apart<1, kN>(query, key, drop);
  }
  return step.has_risen;
}

// What lies behind a sequence's last key is another's, or dead: its p is 0, but 0 times a NaN is none. Each consumer zeroes it for itself.
__device__ __forceinline__ void zero_values(int consumer, Element (&v)[kPanelsV][kKeyTile][kPanel], int first_row) {
  constexpr int kChunk = 16 / sizeof(Element), kChunks = kPanel / kChunk;
  for (int i = threadIdx.x % kGroup; i < (kKeyTile - first_row) * kPanelsV * kChunks; i += kGroup)
    *reinterpret_cast<uint4*>(&v[i / kChunks % kPanelsV][first_row + i / kChunks / kPanelsV][i % kChunks * kChunk]) = uint4{0, 0, 0, 0};
  ptx::fence_async_proxy();
  ptx::named_barrier_sync(kOwnBarrier + consumer, kGroup);
}

// out of a warp's rows: through shared memory, or from registers where there is no room, and where a box would reach into another sequence,
// or past a row's end, as boxes are written in whole 16 bytes. Warps do not wait for each other.
template <bool kPasses>
__device__ __forceinline__ void store(int consumer, OutTile<kPasses>& smem, const FwdSm90Params& params, const Tile& tile,
                                      const OutFragment& out) {
  const int warp_row = consumer * kRows + warp::uniform(threadIdx.x % kGroup / kWarpSize) * kWarpRows;
  const int rows = tile.band.len_q - tile.query_begin - warp_row;
  if constexpr (kPasses) {
    if (params.problem.head_dim_v % 8 == 0 && (!params.problem.cu_seqlens_q || kWarpRows <= rows)) {
      const int lane = warp::lane(), row = warp_row + lane % 16;
      if (lane == 0) ptx::tma_wait_read();  // of the tile before
      __syncwarp();
#pragma unroll
      for (int step = 0; step < kHeadDimV / 16; ++step) {
        uint32 pairs[4];
        warpgroup::pack_pairs<Element>(pairs, out, step);
        const int chunk = 2 * (step % 4) + lane / 16;
        ptx::stmatrix(ptx::shared_address(&smem.out[step / 4][row][(chunk ^ row % 8) * 8]), pairs);
      }
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int panel = 0; panel < kPanelsV; ++panel)
          ptx::tma_store(params.out_boxes, smem.out[panel][warp_row], panel * kPanel, tile.sequence.q_begin + tile.query_begin + warp_row,
                         tile.head, tile.sequence.batch);
        ptx::tma_commit();
      }
      return;
    }
  }
  Result* const dst = tile.out + warp_row * params.out.stride_n;
  __builtin_assume(__isGlobal(dst));  // it came out of shared memory
  warp::store_global<Result, kCopyBytes, false>(dst, params.out.stride_n, rows, params.problem.head_dim_v, out);
}

__device__ __forceinline__ void consume(int consumer, Smem& smem, const FwdSm90Params& params) {
  const Problem& problem = params.problem;
  const bool is_lead = threadIdx.x % kGroup == 0;
  const int warp_row = consumer * kRows + threadIdx.x % kGroup / kWarpSize * kWarpRows;
  const uint64 q = ptx::descriptor(ptx::shared_address(smem.q[0][0][consumer * kRows]), 16);
  const uint64 k = ptx::descriptor(ptx::shared_address(smem.k), 16), v = ptx::descriptor(ptx::shared_address(smem.v), kKeyPanelBytes);
  const float fold = ptx::settled(static_cast<float>(params.scores.fold));
  Ring<kTiles> tiles;
  Ring<kQueryStages> queries;
  Ring<kStages> keys, values;
  SFragment s;
  OutFragment out;
  uint32 p[kKeyTile / 16][4];
  float rescale[2];
  BiasRows bias_rows;
  BiasFragment bias;

  const auto await_tile = [&] {  // whether there is another one
    ptx::mbarrier_wait(smem.tile_full[tiles.stage], tiles.parity);
    if (smem.tiles[tiles.stage].count == 0) return false;
    ptx::mbarrier_wait(smem.q_full[queries.stage], queries.parity);
    ptx::mbarrier_wait(smem.k_full[keys.stage], keys.parity);
    return true;
  };
  const auto issue_scores = [&] {
    ptx::pin(registers(s));
    ptx::wgmma_fence();
    // At D 256 the steps' addresses of the only q are more than there are uniform registers: computed anew.
    const int q_bytes = kQueryStages > 1 ? queries.stage * kQueryBytes : ptx::settled(0);
    multiply_keys(s, ptx::advance(q, q_bytes), ptx::advance(k, keys.stage * kKeyBytes));
    ptx::wgmma_commit();
  };
  const auto take_scores = [&](bool are_last) {
    ptx::pin(registers(s));
    if (is_lead) ptx::mbarrier_arrive(smem.k_empty[keys.stage]);
    if (is_lead && are_last) ptx::mbarrier_arrive(smem.q_empty[queries.stage]);
    keys.advance();
  };
  const auto issue_values = [&] {
    ptx::mbarrier_wait(smem.v_full[values.stage], values.parity);
    ptx::pin(registers(out));
    ptx::wgmma_fence();
    multiply_values(out, p, ptx::advance(v, values.stage * kValueBytes));
    ptx::wgmma_commit();
  };
  const auto take_values = [&] {
    ptx::pin(registers(out));
    if (is_lead) ptx::mbarrier_arrive(smem.v_empty[values.stage]);
    values.advance();
  };
  // Out of step one consumer's products run under the other's softmax.
  const auto take_turn = [&] { ptx::named_barrier_sync(kTurnBarrier + consumer, 2 * kGroup); };
  const auto give_turn = [&] { ptx::named_barrier_arrive(kTurnBarrier + (consumer + 1) % kConsumers, 2 * kGroup); };

  struct Start {
    Band band;
    int query, key, left;  // of the first key tile, and how many are left behind it
  };
  const auto start_of_tile = [&] {
    const Tile& tile = smem.tiles[tiles.stage];
    return Start{tile.band.uniform(), warp::uniform(tile.query_begin + warp_row), warp::uniform(tile.end - 1) * kKeyTile,
                 warp::uniform(tile.count) - 1};
  };
  // A tile's first bias is asked for where the tile comes into sight, the others as soon as their place is free.
  const auto ask_for_bias = [&](const Start& start) {
    if constexpr (kHasBias) {
      const Tile& tile = smem.tiles[tiles.stage];
      bias_rows = BiasRows(attn::Bias<BiasElement>(params.scores, tile.sequence, tile.head), start.query, start.key, start.band.len_q);
      if (bias_rows.has_chunks) bias_rows.copy_next(bias_place(smem), start.band.len_k - start.key);
    }
  };
  const auto take_bias = [&](int keys, bool is_last) {
    if constexpr (kHasBias) {
      if (!bias_rows.has_chunks) return;
      ptx::cp_async_wait<0>();
      __syncwarp();
      attn::read_rows<BiasElement, kKeyTile>(bias, bias_place(smem));
      __syncwarp();
      if (!is_last) bias_rows.copy_next(bias_place(smem), keys + kKeyTile);
    }
  };
  bool has_tile = await_tile();
  if (!has_tile) return;
  Start next = start_of_tile();
  ask_for_bias(next);
  issue_scores();
  if (consumer == kConsumers - 1) give_turn();
  while (has_tile) {
    const Tile& tile = smem.tiles[tiles.stage];
    const attn::Sequence& seq = tile.sequence;
    if (!kLooksAhead) next = start_of_tile();
    const Band band = next.band;
    const int query = next.query;
    TileScores scores(band, params.scores, seq, tile.head);
    scores.settle();
    Softmax softmax(kIsBounded ? max_of(0.0f, 1 - kHeadroom / fold) : -kInfinity);
    const auto probabilities = [&](int key, bool is_first) {
      return to_probabilities(s, softmax, rescale, scores, fold, tile.dropout, query, key, is_first, kHasBias ? &bias : nullptr);
    };

    int key = next.key, left = next.left;
    take_bias(band.len_k - key, left == 0);
    out.zero();
    ptx::wgmma_wait<0>();
    take_scores(left == 0);
    if (kTakesHalves && band.keys_of(query, min_of(query + kWarpRows, band.len_q)).end <= key + kHalfTile) {  // the other half is seen by none
      SHalf* const halves = reinterpret_cast<SHalf*>(&s);
      to_probabilities(halves[0], softmax, rescale, scores, fold, tile.dropout, query, key, true);
      halves[1].zero();
    } else {
      probabilities(key, true);
    }
    bool has_risen = false;  // the first product finds zeros
    pack_probabilities(p, s);
    const int live_rows = band.len_k - key;  // of the first tile; a tensor's end reads as zeros anyway
    if (live_rows < kKeyTile && (problem.cu_seqlens_k || band.len_k < problem.len_k)) {
      ptx::mbarrier_wait(smem.v_full[values.stage], values.parity);
      zero_values(consumer, smem.v[values.stage], live_rows);
    }

    for (; left > 0; --left) {
      key -= kKeyTile;
      ptx::mbarrier_wait(smem.k_full[keys.stage], keys.parity);
      take_turn();
      issue_scores();
      if (has_risen) multiply_rows(out, rescale);
      issue_values();
      give_turn();
      take_bias(band.len_k - key, left == 1);
      ptx::wgmma_wait<1>();
      take_scores(left == 1);
      has_risen = probabilities(key, false);
      ptx::wgmma_wait<0>();
      take_values();
      pack_probabilities(p, s);
    }

    if (has_risen) multiply_rows(out, rescale);
    take_turn();
    issue_values();
    const int stage = tiles.stage;
    tiles.advance();
    queries.advance();
    has_tile = await_tile();
    issue_scores();  // of nothing, if there is none: a product under a condition would be waited for at once
    if (has_tile || consumer < kConsumers - 1) give_turn();
    if (kLooksAhead) next = start_of_tile();
    if (has_tile) ask_for_bias(next);
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + warp::fragment_row(2 * half);
      const float lse = softmax.finish(0, half, fold * float(kLn2), tile.has_sink, sink_of(params, tile, row), factor[half]);
      if (tile.query_begin + row < band.len_q && warp::lane() % 4 == 0) tile.lse[row * params.lse.stride_n] = lse;
    }
    ptx::wgmma_wait<1>();
    take_values();
    finish_rows(out, factor, kHasDropout ? float(params.scores.keep_scale) : 1.0f);
    store(consumer, smem, params, tile, out);
    ptx::mbarrier_arrive(smem.tile_empty[stage]);
  }
  ptx::wgmma_wait<0>();
  if (kPassesOut) ptx::tma_wait_read();  // shared memory outlives its copies
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads, 1) fwd_sm90(const __grid_constant__ cf::FwdSm90Params params) {
  using namespace cf;
  if (kIsSplit) ptx::let_next_start();
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int stage = 0; stage < kQueryStages; ++stage) {
      ptx::mbarrier_init(smem.q_full[stage], 1);
      ptx::mbarrier_init(smem.q_empty[stage], kConsumers);
    }
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(smem.k_full[stage], 1);
      ptx::mbarrier_init(smem.v_full[stage], 1);
      ptx::mbarrier_init(smem.k_empty[stage], kConsumers);
      ptx::mbarrier_init(smem.v_empty[stage], kConsumers);
    }
#pragma unroll
    for (int stage = 0; stage < kTiles; ++stage) {
      ptx::mbarrier_init(smem.tile_full[stage], 1);
      ptx::mbarrier_init(smem.tile_empty[stage], kConsumers * kGroup + 2);
    }
    ptx::mbarrier_init_fence();
  }
  if (kIsSplit) ptx::await_previous();
  __syncthreads();
  const int group = warp::uniform(threadIdx.x / kGroup);
  if (group == 0) {
    ptx::give_registers<kProducerRegisters>();
    const int role = threadIdx.x / kWarpSize;
    if (role == 0) schedule(smem, params);
    if (role == 1 && warp::lane() == 0) load_keys(smem, params);
    if (role == 2 && warp::lane() == 0) load_values(smem, params);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    consume(group - 1, smem, params);
  }
}
