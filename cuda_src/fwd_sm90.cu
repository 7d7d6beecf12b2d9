// The forward on Hopper: out = softmax(x) v and the natural-log LSE, for 16-bit types, by wgmma and the copy engine.
//
//   producer, one warp, for each query tile: publishes it, then loads q, k(j + 1), v(j) tile by tile through a ring of kStages
//   consumers, 64 rows each, for each key tile from the last to the first:
//     issue s(j) = q k(j)^T;   out *= r(j - 1);   issue out += p(j - 1) v(j - 1)
//     wait for s(j);   p(j), r(j) = online softmax of s(j), while the product with v(j - 1) runs;   wait for out
//   at the end: out / l through the consumer's own rows of q, lse = m + log(l)
//
// Threads   kConsumers warpgroups behind the producer's, whose registers they take over.
// Shared    q [kQueryTile, kHeadDim], k [kStages][kKeyTile, kHeadDim], v [kStages][kKeyTile, kHeadDimV], in panels of 64 columns as the
//           copy engine swizzles them.
// Barriers  full: one arrival, of the thread that asks for the copies, and their bytes. empty: one arrival a consumer warpgroup, after the
//           wait that proves its products done. q's guard the published tile too: full, it can be read; empty, the result has left q's
//           place. Where that is not the only one, it is waited for within the next tile.
// Order     blocks stay. Head by head a block takes a pair of query tiles at a time, of a masked head its longest and its shortest, so that
//           neighbours share k and v in L2; or, where few heads have many tiles, all heads in turn, the longest rows first.
#include "attn/dropout.cuh"
#include "attn/scores.cuh"
#include "attn/softmax.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace cf {

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kRows = 64;    // of a consumer
constexpr int kConsumers = 2;
constexpr int kThreads = kGroup * (1 + kConsumers);
static_assert(kThreads == kWarps * kWarpSize && kQueryTile == kConsumers * kRows);
static_assert(kQueryStages == 1 || kQueryStages == 2);
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // 128 x 40 + 256 x 232: what the launch gave
constexpr int kPanel = 64;  // columns
constexpr int kPanels = kHeadDim / kPanel, kPanelsV = kHeadDimV / kPanel;
static_assert(kHeadDim % kPanel == 0 && kHeadDimV % kPanel == 0 && kKeyTile % 16 == 0);

// A query tile, as the producer publishes it.
struct Tile {
  attn::Sequence sequence;
  int head;
  int kv_head;
  int query_begin;
  int end;    // key tiles [end - count, end)
  int count;  // 0: there are no more
};

struct alignas(1024) Smem {  // a swizzle repeats every 1024 bytes
  Element q[kQueryStages][kPanels][kQueryTile][kPanel];
  Element k[kStages][kPanels][kKeyTile][kPanel];
  Element v[kStages][kPanelsV][kKeyTile][kPanel];
  ptx::Barrier q_full[kQueryStages], q_empty[kQueryStages], k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  Tile tiles[kQueryStages + 1];  // in turn: the next one is written while the consumers may still read those whose q are here
};
static_assert(sizeof(Smem) == kSmemBytes, "host arithmetic has drifted");
constexpr int kQueryBytes = sizeof(Smem::q) / kQueryStages, kKeyBytes = sizeof(Smem::k) / kStages, kValueBytes = sizeof(Smem::v) / kStages;
constexpr int kQueryPanelBytes = kQueryTile * kPanel * 2, kKeyPanelBytes = kKeyTile * kPanel * 2;
constexpr bool kStoresBoxes = kIsSame<OutElement, Element> && kHeadDimV <= kHeadDim;  // out passes through q's place

using Switches = attn::Switches<float, BiasElement, kIsMasked, kHasSoftcap, kHasAlibi, kHasBias, kIsScaleNegative, true>;
using SFragment = warp::Fragment<1, kKeyTile / 8>;
using OutFragment = warp::Fragment<1, kHeadDimV / 8>;
using Softmax = attn::Softmax<1, float, false>;

template <int kN>
__device__ __forceinline__ float (&registers(warp::Fragment<1, kN>& f))[4 * kN] { return reinterpret_cast<float (&)[4 * kN]>(f.x); }

// Where a role stands in a ring of stages. A phase's parity is what its barriers are waited for by.
template <int kCount>
struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage < kCount) return;
    stage = 0;
    parity ^= 1;
  }
};

// The i-th place of this block among those of the query tiles of all heads; past the last one nothing is left. The first past it may
// leave 31 bits.
__device__ __forceinline__ uint32 place_of(const FwdSm90Params& params, int i) {
  if (params.is_in_turn) return i * gridDim.x + (i % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  return 2 * (i / 2 * gridDim.x + blockIdx.x) + i % 2;
}

// Which tile is at a place, as find_work counts them.
__device__ __forceinline__ int tile_at(const FwdSm90Params& params, int place) {
  if (!kIsMasked) return place;
  const int tiles = params.problem.tiles_q;
  if (params.is_in_turn) {
    const int heads = params.places / tiles;  // of all batches
    return place % heads * tiles + tiles - 1 - place / heads;
  }
  const int head = place / tiles, i = place % tiles;
  return head * tiles + (i % 2 ? i / 2 : tiles - 1 - i / 2);
}

template <class T, int kPanelCount, int kRowsOfBox>
__device__ __forceinline__ void load(T (&panels)[kPanelCount][kRowsOfBox][kPanel], const TensorMap& map, ptx::Barrier& full, int row,
                                     int head, int batch) {
  ptx::mbarrier_expect(full, sizeof(panels));
#pragma unroll
  for (int panel = 0; panel < kPanelCount; ++panel) ptx::tma_load(panels[panel], map, full, panel * kPanel, row, head, batch);
}

// Zeros and -inf (or the sink) for rows that see no key.
__device__ __forceinline__ void store_empty(const FwdSm90Params& params, const Tile& tile) {
  const attn::Sequence& seq = tile.sequence;
  const bool has_sink = params.scores.sink && !seq.is_slack;
  const float lse = has_sink ? static_cast<const float*>(params.scores.sink)[tile.head] : -kInfinity;
  for (int query = tile.query_begin; query < min_of(tile.query_begin + kQueryTile, seq.len_q); ++query) {
    OutElement* out = attn::rows<OutElement>(params.out, seq, seq.q_begin, tile.head, query);
    for (int col = threadIdx.x; col < params.problem.head_dim_v; col += kWarpSize) out[col] = convert<OutElement>(0.0f);
    if (threadIdx.x == 0) attn::rows<float>(params.lse, seq, seq.q_begin, tile.head, query)[0] = lse;
  }
}

// Publishes the next tile that has keys, or one of no key tiles after the last. By the producer's whole warp; `i` counts this block's
// places.
__device__ __forceinline__ void publish_next(Tile& tile, int& i, const FwdSm90Params& params) {
  const Problem& problem = params.problem;
  for (;; ++i) {
    const uint32 place = place_of(params, i);
    if (place >= static_cast<uint32>(params.places)) {
      tile.count = 0;
      break;
    }
    const attn::Work work = attn::find_work<true, kQueryTile>(problem, tile_at(params, static_cast<int>(place)));
    if (work.tile < 0) continue;
    if (threadIdx.x == 0) {
      const attn::Band<kIsMasked> band(problem, work.sequence);
      const int begin = work.tile * kQueryTile;
      const attn::Range keys = band.keys_of(begin, min_of(begin + kQueryTile, work.sequence.len_q));
      tile.sequence = work.sequence;
      tile.head = work.head;
      tile.kv_head = work.head / (problem.heads_q / problem.heads_kv);
      tile.query_begin = begin;
      tile.end = ceil_div(keys.end, kKeyTile);
      tile.count = keys.begin < keys.end ? tile.end - keys.begin / kKeyTile : 0;
    }
    __syncwarp();
    if (tile.count > 0) {
      ++i;
      break;
    }
    store_empty(params, tile);
    __syncwarp();
  }
  __syncwarp();
}

__device__ __forceinline__ void produce(Smem& smem, const FwdSm90Params& params) {
  const bool is_lead = threadIdx.x == 0;
  int i = 0;
  Ring<kQueryStages> queries;
  Ring<kQueryStages + 1> published;
  Ring<kStages> keys_ring, values_ring;
  publish_next(smem.tiles[0], i, params);
  while (smem.tiles[published.stage].count > 0) {
    const Tile& tile = smem.tiles[published.stage];  // read anew each time: the producer has few registers
    int k_left = tile.count, v_left = tile.count;
    const auto load_k = [&] {
      ptx::mbarrier_wait(smem.k_empty[keys_ring.stage], keys_ring.parity ^ 1);
      load(smem.k[keys_ring.stage], params.k, smem.k_full[keys_ring.stage],
           tile.sequence.k_begin + (tile.end - tile.count + --k_left) * kKeyTile, tile.kv_head, tile.sequence.batch);
      keys_ring.advance();
    };
    const auto load_v = [&] {
      ptx::mbarrier_wait(smem.v_empty[values_ring.stage], values_ring.parity ^ 1);
      load(smem.v[values_ring.stage], params.v, smem.v_full[values_ring.stage],
           tile.sequence.k_begin + (tile.end - tile.count + --v_left) * kKeyTile, tile.kv_head, tile.sequence.batch);
      values_ring.advance();
    };
    if (is_lead) {
      load_k();
      ptx::mbarrier_wait(smem.q_empty[queries.stage], queries.parity ^ 1);
      load(smem.q[queries.stage], params.q, smem.q_full[queries.stage], tile.sequence.q_begin + tile.query_begin, tile.head,
           tile.sequence.batch);
      if (k_left > 0) load_k();
      load_v();
    }
    __syncwarp();
    published.advance();
    publish_next(smem.tiles[published.stage], i, params);  // while these copies are under way
    if (is_lead) {
      while (v_left > 0) {
        if (k_left > 0) load_k();
        load_v();
      }
    }
    queries.advance();
  }
  if (!is_lead) return;
  ptx::mbarrier_wait(smem.q_empty[queries.stage], queries.parity ^ 1);
  ptx::mbarrier_arrive(smem.q_full[queries.stage]);
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

// 16 columns of an accumulator as pairs of 16 bits.
template <int kN>
__device__ __forceinline__ void pack_pairs(uint32 (&pairs)[4], const warp::Fragment<1, kN>& f, int step) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = f.x[0][2 * step + i / 2] + i % 2 * 2;
    pairs[i] = pack<Element>(pair[0], pair[1]);
  }
}
__device__ __forceinline__ void pack_probabilities(uint32 (&p)[kKeyTile / 16][4], const SFragment& s) {
#pragma unroll
  for (int step = 0; step < kKeyTile / 16; ++step) pack_pairs(p[step], s, step);
}

__device__ __forceinline__ void multiply_rows(OutFragment& out, const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kHeadDimV / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) out.x[0][n][i] *= factor[i / 2];
}
// The same, but a factor of 0 makes zeros of NaNs too.
__device__ __forceinline__ void select_rows(OutFragment& out, const float (&factor)[2], float scale) {
#pragma unroll
  for (int n = 0; n < kHeadDimV / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) out.x[0][n][i] = factor[i / 2] == 0 ? 0.0f : out.x[0][n][i] * (factor[i / 2] * scale);
}

// What lies behind a sequence's last key is another's, or dead: its p is 0, but 0 times a NaN is none. Each consumer zeroes it for itself.
template <int kConsumer>
__device__ __forceinline__ void zero_values(Element (&v)[kPanelsV][kKeyTile][kPanel], int first_row) {
  constexpr int kChunk = 16 / sizeof(Element), kChunks = kPanel / kChunk;
  for (int i = threadIdx.x % kGroup; i < (kKeyTile - first_row) * kPanelsV * kChunks; i += kGroup)
    *reinterpret_cast<uint4*>(&v[i / kChunks % kPanelsV][first_row + i / kChunks / kPanelsV][i % kChunks * kChunk]) = uint4{0, 0, 0, 0};
  ptx::fence_async_proxy();
  ptx::named_barrier_sync<1 + kConsumer, kGroup>();
}

// The same number; but what depends on it is worked out here, and not kept in registers over the loop over tiles.
__device__ __forceinline__ int here(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// out, of which all products of this consumer's rows of q are done: through their place, or from registers where a box would reach into
// another sequence, or past a row's end, as boxes are written in whole 16 bytes. Either way ends with a barrier of the consumer, behind
// which only its lead still reads the tile.
template <int kConsumer>
__device__ __forceinline__ void store(Element (&q)[kPanels][kQueryTile][kPanel], const FwdSm90Params& params, const Tile& tile,
                                      const OutFragment& out) {
  const attn::Sequence& seq = tile.sequence;
  const int first = tile.query_begin + kConsumer * kRows;
  const bool is_lead = threadIdx.x % kGroup == 0;
  const bool is_whole = params.problem.head_dim_v % 8 == 0 && (!params.problem.cu_seqlens_q || first + kRows <= seq.len_q);
  if (kStoresBoxes && is_whole) {
    const int thread = here(threadIdx.x % kGroup), lane = thread % kWarpSize;
    const int row = kConsumer * kRows + thread / kWarpSize * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < kHeadDimV / 16; ++step) {
      uint32 pairs[4];
      pack_pairs(pairs, out, step);
      const int chunk = 2 * (step % 4) + lane / 16;
      ptx::stmatrix(ptx::shared_address(&q[step / 4][row][(chunk ^ row % 8) * 8]), pairs);
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync<1 + kConsumer, kGroup>();
    if (is_lead) {
#pragma unroll
      for (int panel = 0; panel < kPanelsV; ++panel)
        ptx::tma_store(params.out_boxes, q[panel][kConsumer * kRows], panel * kPanel, seq.q_begin + first, tile.head, seq.batch);
      ptx::tma_commit();
    }
  } else {
    const int row = first + threadIdx.x % kGroup / kWarpSize * 16;
    warp::store_global<OutElement, kCopyBytes, false>(attn::rows<OutElement>(params.out, seq, seq.q_begin, tile.head, row),
                                                      params.out.stride_n, seq.len_q - row, params.problem.head_dim_v, out);
    ptx::named_barrier_sync<1 + kConsumer, kGroup>();
  }
}

template <int kConsumer>
__device__ __forceinline__ void consume(Smem& smem, const FwdSm90Params& params) {
  const Problem& problem = params.problem;
  const bool is_lead = threadIdx.x % kGroup == 0;
  const int warp_row = kConsumer * kRows + threadIdx.x % kGroup / kWarpSize * 16;
  const uint64 q = ptx::descriptor(ptx::shared_address(smem.q[0][0][kConsumer * kRows]), 16);
  const uint64 k = ptx::descriptor(ptx::shared_address(smem.k), 16), v = ptx::descriptor(ptx::shared_address(smem.v), kKeyPanelBytes);
  const float fold = params.scores.fold, unit = params.scores.fold * kLn2;
  Ring<kQueryStages> queries;
  Ring<kQueryStages + 1> published;
  Ring<kStages> keys_ring, values_ring;
  // The copy out of q's place takes long to read it: with two places it has the time of the next tile's first scores.
  bool has_stored = false;  // and q's place of the tile before is not given back yet
  const auto give_back = [&] {
    if (is_lead && has_stored) {
      ptx::tma_wait_read();
      ptx::mbarrier_arrive(smem.q_empty[kQueryStages == 1 ? 0 : queries.stage ^ 1]);
    }
    has_stored = false;
  };
  for (;;) {
    const Tile& tile = smem.tiles[published.stage];
    ptx::mbarrier_wait(smem.q_full[queries.stage], queries.parity);
    if (tile.count == 0) break;
    const attn::Sequence& seq = tile.sequence;
    const int query = tile.query_begin + warp_row;
    const attn::ScoreMap<Switches> scores(problem, params.scores, seq, tile.head);
    Softmax softmax;
    SFragment s;
    OutFragment out;
    uint32 p[kKeyTile / 16][4];
    float rescale[2];
    const auto probabilities = [&](int key) {  // s becomes p; whether `out` is to be multiplied with `rescale`
      scores.apply(s, query, key, static_cast<SFragment*>(nullptr));
      const Softmax::Step step = softmax.raise(s, fold);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rescale[half] = step.rescale[0][half];
        softmax.sum[0][half] *= rescale[half];
      }
      softmax.add(s, step, fold);
      if constexpr (kHasDropout) {  // the LSE is of the undropped row
        const attn::Dropout dropout(params.scores, problem, seq, tile.head);
        dropout.for_each(s, query, key, [](float& p, bool is_kept) { p = is_kept ? p : 0.0f; });
      }
      return step.has_risen;
    };

    int key = tile.end * kKeyTile - kKeyTile;
    ptx::mbarrier_wait(smem.k_full[keys_ring.stage], keys_ring.parity);
    ptx::pin(registers(s));
    ptx::wgmma_fence();
    multiply_keys(s, ptx::advance(q, queries.stage * kQueryBytes), ptx::advance(k, keys_ring.stage * kKeyBytes));
    ptx::wgmma_commit();
    out.zero();
    ptx::wgmma_wait<0>();
    ptx::pin(registers(s));
    if (is_lead) ptx::mbarrier_arrive(smem.k_empty[keys_ring.stage]);
    keys_ring.advance();
    probabilities(key);
    bool has_risen = false;  // the first product finds zeros
    pack_probabilities(p, s);
    const int live_rows = seq.len_k - key;  // of the first tile; a tensor's end reads as zeros anyway
    if (live_rows < kKeyTile && (problem.cu_seqlens_k || seq.len_k < problem.len_k)) {
      ptx::mbarrier_wait(smem.v_full[values_ring.stage], values_ring.parity);
      zero_values<kConsumer>(smem.v[values_ring.stage], live_rows);
    }
    if (kQueryStages > 1) give_back();

    for (int left = tile.count - 1; left > 0; --left) {
      key -= kKeyTile;
      ptx::mbarrier_wait(smem.k_full[keys_ring.stage], keys_ring.parity);
      ptx::pin(registers(s));
      ptx::wgmma_fence();
      multiply_keys(s, ptx::advance(q, queries.stage * kQueryBytes), ptx::advance(k, keys_ring.stage * kKeyBytes));
      ptx::wgmma_commit();
      if (has_risen) multiply_rows(out, rescale);
      ptx::mbarrier_wait(smem.v_full[values_ring.stage], values_ring.parity);
      ptx::pin(registers(out));
      ptx::wgmma_fence();
      multiply_values(out, p, ptx::advance(v, values_ring.stage * kValueBytes));
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::pin(registers(s));
      if (is_lead) ptx::mbarrier_arrive(smem.k_empty[keys_ring.stage]);
      keys_ring.advance();
      has_risen = probabilities(key);
      ptx::wgmma_wait<0>();
      ptx::pin(registers(out));
      if (is_lead) ptx::mbarrier_arrive(smem.v_empty[values_ring.stage]);
      values_ring.advance();
      pack_probabilities(p, s);
    }

    if (has_risen) multiply_rows(out, rescale);
    ptx::mbarrier_wait(smem.v_full[values_ring.stage], values_ring.parity);
    ptx::pin(registers(out));
    ptx::wgmma_fence();
    multiply_values(out, p, ptx::advance(v, values_ring.stage * kValueBytes));
    ptx::wgmma_commit();
    const bool has_sink = params.scores.sink && !seq.is_slack;
    const float sink = has_sink ? static_cast<const float*>(params.scores.sink)[tile.head] : 0;
    float factor[2], lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      lse[half] = softmax.finish(0, half, unit, has_sink, sink, factor[half]);
    ptx::wgmma_wait<0>();
    ptx::pin(registers(out));
    if (is_lead) ptx::mbarrier_arrive(smem.v_empty[values_ring.stage]);
    values_ring.advance();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.query_begin + warp_row + warp::fragment_row(2 * half);
      if (row < seq.len_q && warp::lane() % 4 == 0) attn::rows<float>(params.lse, seq, seq.q_begin, tile.head, row)[0] = lse[half];
    }
    select_rows(out, factor, kHasDropout ? float(params.scores.keep_scale) : 1.0f);
    store<kConsumer>(smem.q[queries.stage], params, tile, out);
    has_stored = true;
    queries.advance();
    published.advance();
    if (kQueryStages == 1) give_back();
  }
  if (is_lead) ptx::tma_wait_read();  // shared memory outlives its copies
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads, 1) fwd_sm90(const __grid_constant__ cf::FwdSm90Params params) {
  using namespace cf;
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
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  const int group = __shfl_sync(kFullWarp, threadIdx.x / kGroup, 0);  // uniform, so that roles are no divergence
  if (group == 0) {
    ptx::give_registers<kProducerRegisters>();
    if (threadIdx.x < kWarpSize) produce(smem, params);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    if (group == 1) consume<0>(smem, params);
    else consume<1>(smem, params);
  }
}
