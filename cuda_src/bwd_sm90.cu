// The backward on Hopper, for 16-bit types, by wgmma and the copy engine: one key tile of one KV head per block, dk and dv in registers.
//
//   loader, one thread:      copies k and v once, then q and dout tile by tile into a ring of stages
//   statistician, one warp:  lse and D of the tile's rows, and what is special about them
//   one more warp:           the bias, if there is one, piece by piece into a ring of its own
//   consumers, 64 keys each, for each query head of the group, for each query tile that sees the keys:
//     p^T = exp(x^T - lse)                              of s^T, which the tile before has asked for
//     dv += p^T dout         dp^T - D = v dout^T - D
//     ds^T = p^T (dp^T - D) dx/ds                       for dq too, through shared memory
//     dk += ds^T q           s^T = k q^T                of the next tile
//   a warpgroup for dq:      dq = ds k, 64 x 64 at a time, into shared memory
//   adders, a thread each:   from there into dq_accum, a bulk reduction a tile
//   at the end:  dv, scale dk              (bwd_finish brings scale dq home, unless kStoresDq)
//
// s and dp take turns in one fragment and p lives on as 16 bits, which leaves registers for dq's warpgroup. So consumers wait neither for dq
// nor for each other, but for one thing, where they alternate: exponentials of the one run beside products of the other.
// Shared    k, v [kKeyTile, kHeadDim] for the whole block; q, dout [kStages][kQueryTile, kHeadDim]; ds [kDsStages][kQueryTile, kKeyTile]:
//           all in panels of 64 columns, swizzled; dq of a tile in fragment order; two pieces of the bias, of 16 KiB.
// Barriers  of attn/key_tile.cuh. Of a place of ds, full: every consumer's warp; empty: every warp of dq's. Of dq, for each adder's tiles,
//           full: every warp of dq's; empty: the adder. weighed, of a consumer: each of its warps, once the products behind its exponentials
//           are issued. Of a piece of the bias, full: all who load it; empty: every consumer's thread. Named, of both consumers: keys have
//           been zeroed.
// Order     dk and dv: fixed, head by head and tile by tile. dq: the order in which blocks arrive, or if kIsOrdered that of their keys, the
//           last ones first, by a counter for each tile of queries. A block waits for blocks of smaller numbers alone, which run already.
//           If kStoresDq, who comes first stores, and who comes last takes the sum along and writes dq itself: fewer passes over memory,
//           at the price of dq's warpgroup waiting for its turn.
#include "attn/key_scores.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/turn.cuh"

namespace cf {

static_assert(kKeyTile == kConsumers * kRows && kHeadDim == kHeadDimV);
static_assert(kIsOrdered || !kStoresDq);
constexpr bool kIsPlain = !kHasSoftcap && !kHasAlibi && !kHasBias && !kHasDropout;
constexpr int kDqGroup = 1 + kConsumers;  // behind the producers' and the consumers'
static_assert(kThreads == kGroup * (1 + kDqGroup));
constexpr int kProducerRegisters = 32, kConsumerRegisters = 208, kDqRegisters = 64;  // 32 + 2 x 208 + 64: what the launch gave, 4 x 128

// Not where the ring holds no piece of the next tile's bias beside this one's: a piece makes room once both have read it.
constexpr bool kAlternates = !kHasBias || kQueryTile < kBiasStages * BiasTile::kRows;
constexpr int kDsStages = 2;
constexpr int kAdders = kHasBias ? 1 : 2, kBiasLoaders = kWarpSize;  // producers' warps that are left, and threads of one
constexpr int kGroupWarps = kGroup / kWarpSize;
// dq's parts, one after the other through the same registers: of the query rows, or panels of columns.
constexpr int kParts = 2;
constexpr bool kSplitsRows = kQueryTile == kParts * kRows;
static_assert(kSplitsRows ? kPanels == 1 : kQueryTile == kRows && kPanels == kParts);
using DqFragment = warp::Fragment<1, kPanel / 8>;

// Read where they are needed, tile by tile.
struct Factors {
  int64 first_row, head_rows;  // in dq_accum: of head 0 and query 0, and from head to head
  Exponents exponents;
  float keep_scale;
  int blocks_before;  // of an ordered launch: those of the same head
};

struct alignas(1024) Smem : Tiles {  // a swizzle repeats every 1024 bytes
  warpgroup::Panels<Element, kConsumers, kQueryTile> ds[kDsStages];
  alignas(128) float dq[kQueryTile * kHeadDim];
  BiasRing<kHasBias> bias;
  Control control;
  ptx::Barrier ds_full[kDsStages], ds_empty[kDsStages], weighed[kConsumers], dq_full[kAdders], dq_empty[kAdders];
  attn::Dropout dropout;  // of head 0
  Factors factors;
};
static_assert(sizeof(Smem) == kSmemBytes, "host arithmetic has drifted");
constexpr int kDsBytes = sizeof(Smem::ds) / kDsStages;

using KeyFragment = warp::Fragment<1, kHeadDim / 8>;

constexpr int kMeetBarrier = 1;  // of both consumers; 0 is __syncthreads
__device__ __forceinline__ void meet() { ptx::named_barrier_sync(kMeetBarrier, kConsumerThreads); }

// What a consumer does for dq.
struct DsWriter {
  Smem& smem;
  uint32 row;  // where this lane writes
  Ring<kDsStages> place;

  __device__ __forceinline__ DsWriter(Smem& smem, int consumer) : smem(smem) {
    const int lane = warp::lane(), warp_number = threadIdx.x % kGroup / kWarpSize;
    const int of_queries = lane / 16 * 8 + lane % 8, chunk = 2 * warp_number + lane / 8 % 2;  // of stmatrix: 8 queries and 8 keys a matrix
    row = ptx::settled(static_cast<int>(ptx::shared_address(&smem.ds[0][consumer][of_queries][(chunk ^ of_queries % 8) * 8])));
  }
  __device__ __forceinline__ void await() const { ptx::mbarrier_wait(smem.ds_empty[place.stage], place.parity ^ 1); }
  // ds of 16 queries.
  __device__ __forceinline__ void write(int step, const uint32 (&pairs)[4]) const {
    ptx::stmatrix_transposed(row + place.stage * kDsBytes + step * 16 * kPanel * 2, pairs);
  }
  __device__ __forceinline__ void tell() {
    ptx::fence_async_proxy();
    __syncwarp();
    if (warp::lane() == 0) ptx::mbarrier_arrive(smem.ds_full[place.stage]);
    place.advance();
  }
};

__device__ __forceinline__ void consume(int consumer, Smem& smem, const BwdSm90Params& params) {
  Control& control = smem.control;
  const Job& job = control.job;
  const attn::Sequence& seq = job.sequence;
  const bool is_lead = threadIdx.x % kGroup == 0;
  const int key_row = consumer * kRows + warp::uniform(threadIdx.x % kGroup / kWarpSize) * kWarpRows;
  const int key = warp::uniform(job.key_begin) + key_row;
  const attn::Band<kIsMasked> band = job.band.uniform();
  const uint64 k_rows = ptx::descriptor(ptx::shared_address(smem.k[0][consumer * kRows]), 16);
  const uint64 v_rows = ptx::descriptor(ptx::shared_address(smem.v[0][consumer * kRows]), 16);
  const uint64 q = ptx::descriptor(ptx::shared_address(smem.q), kQueryPanelBytes);
  const uint64 dout = ptx::descriptor(ptx::shared_address(smem.dout), kQueryPanelBytes);
  DsWriter writer(smem, consumer);
  BiasReader<kHasBias> bias(smem.bias);
  Exponents held(params.scores);
  held.unit = ptx::settled(held.unit);

  KeyFragment dk, dv;
  dk.zero();
  dv.zero();
  ScoreFragment s;  // and dp
  ScoreFragment& dp = s;
  Ring<kStages> ring;
  int other_parity = 1 - consumer;  // consumer 0 begins: it waits for the phase before the first
  const auto issue_scores = [&] {  // of nothing behind the last tile: a product under a condition would be waited for at once
    ptx::pin(registers(s));
    ptx::wgmma_fence();
    multiply_scores<kHeadDim, false>(s, k_rows, ptx::advance(q, ring.stage * kQueryBytes));
    ptx::wgmma_commit();
  };
  const auto await_scores = [&] {
    ptx::mbarrier_wait(control.statistics_full[ring.stage], ring.parity);
    ptx::mbarrier_wait(control.q_full[ring.stage], ring.parity);
  };
  if (!job.is_idle()) {
    ptx::mbarrier_wait(control.k_full, 0);
    // Keys that no query sees take no part: theirs could reach dq.
    const attn::Range keys = band.keys_of(0, seq.len_q);
    const int first = keys.begin - job.key_begin, end = keys.end - job.key_begin;
    if (first > 0 || end < kKeyTile) {
      zero_rows<kConsumerThreads>(smem.k, ptx::settled(static_cast<int>(threadIdx.x)) - kGroup,
                                  [&](int row) { return row < first || row >= end; });
      ptx::fence_async_proxy();
      meet();
    }
    ptx::mbarrier_wait(control.v_full, 0);
    await_scores();
    issue_scores();
  }
  const Walk walk = job.walk.uniform();
  walk.for_each([&](int head, int query) {
    const int stage = ring.stage, stage_bytes = stage * kQueryBytes;
    const Statistics& statistics = control.statistics[stage];
    const bool has_hidden = !band.is_full(query, kQueryTile, key, kWarpRows);
    const bool has_coarse = warp::uniform(statistics.has_coarse);
    const int lane = ptx::settled(warp::lane());  // as in `hide`
    const Exponents exponents = kIsPlain ? held : smem.factors.exponents;
    const Exponents::Side side(statistics.slope, query + seq.shift - key, lane);
    Kept kept;
    if constexpr (kHasDropout) kept = draw(smem.dropout, head, key, query);
    const Columns lse(statistics.lse);
    if (kAlternates) ptx::mbarrier_wait(smem.weighed[1 - consumer], other_parity);
    other_parity ^= 1;
    ptx::wgmma_wait<0>();
    ptx::pin(registers(s));
    Weights weights;
    const auto begin = [&](int step) {
      if constexpr (kPreloadsDelta) begin_with(dp, step, statistics.minus_delta);
    };
    weigh(s, weights, exponents, side, bias, kept, key_row, lane, lse, has_coarse, [&](int step) {
      if constexpr (!Weights::kAreApart) begin(step);
    });
    if (has_hidden) weights.hide(job.band, key, query);

    ptx::mbarrier_wait(control.dout_full[stage], ring.parity);
    ptx::pin(registers(dv));
    ptx::wgmma_fence();
    multiply_queries<kHeadDim>(dv, weights.p, ptx::advance(dout, stage_bytes));
    ptx::wgmma_commit();
    if constexpr (Weights::kAreApart) {
      ptx::wgmma_wait<0>();  // p makes room for dp
#pragma unroll
      for (int step = 0; step < kQueryTile / 16; ++step) begin(step);
    }
    ptx::pin(registers(dp));
    ptx::wgmma_fence();
    multiply_scores<kHeadDim, kPreloadsDelta>(dp, v_rows, ptx::advance(dout, stage_bytes));
    ptx::wgmma_commit();
    if (kAlternates && warp::lane() == 0) ptx::mbarrier_arrive(smem.weighed[consumer]);
    ptx::wgmma_wait<0>();
    ptx::pin(registers(dv));
    ptx::pin(registers(dp));
    if (is_lead) ptx::mbarrier_arrive(control.dout_empty[stage]);

    writer.await();
    if constexpr (kHasDropout) {
      kept = kept.settled();
      drop(dp, kept, smem.factors.keep_scale, statistics.minus_delta);
    }
    if (kHasBias || has_hidden) hide_gradient(dp, weights);  // of a bias, -inf hides
    const Packed& ds = weights.of_ds();
    differentiate(dp, weights, [&](int step) { writer.write(step, ds[step]); });
    ptx::pin(registers(dk));
    ptx::wgmma_fence();
    multiply_queries<kHeadDim>(dk, ds, ptx::advance(q, stage_bytes));
    ptx::wgmma_commit();
    ring.advance();
    if (!walk.is_last(head, query)) await_scores();
    issue_scores();
    writer.tell();
    ptx::wgmma_wait<1>();
    ptx::pin(registers(dk));
    ptx::mbarrier_arrive(control.q_empty[stage]);
  });
  ptx::wgmma_wait<0>();

  if (kHasDropout) scale(dv, static_cast<float>(params.scores.keep_scale));
  scale(dk, static_cast<float>(params.scores.scale));
  store_gradient(params.dk, job, key, params.problem.head_dim, dk);
  store_gradient(params.dv, job, key, params.problem.head_dim_v, dv);
}

// Where a block stands among those that see a tile of queries.
struct Turn {
  int number;
  bool is_last;
  __device__ __forceinline__ Turn(const Smem& smem, int query) {
    const Job& job = smem.control.job;
    const attn::Range keys = job.band.keys_of(query, min_of(query + kQueryTile, job.sequence.len_q));
    // Of garbage offsets not every tile has a block.
    number = min_of(ceil_div(keys.end, kKeyTile) - 1 - job.key_begin / kKeyTile, smem.factors.blocks_before);
    is_last = keys.begin >= job.key_begin;
  }
};
// Where a tile's sums are, and how many blocks have added to them.
struct Sums {
  float* dq;
  int* count;
  __device__ __forceinline__ Sums(const Smem& smem, const BwdSm90Params& params, int head, int query) {
    const int64 rows = smem.factors.first_row + head * smem.factors.head_rows + query;
    dq = static_cast<float*>(params.dq_accum) + rows * kHeadDim;
    count = static_cast<int*>(params.turns) + rows / attn::kTurnRows;
  }
};
// A warp's part of a tile among its floats in fragment order, for this lane.
__device__ __forceinline__ int dq_place(int part) {
  const int warp_number = threadIdx.x % kGroup / kWarpSize;
  const int place = kSplitsRows ? part * kGroupWarps + warp_number : warp_number * kParts + part;
  return (place * kPanel / 8 * kWarpSize + ptx::settled(warp::lane())) * 4;
}

// A tile of dq on its way from registers to an adder.
struct DqWriter {
  Smem& smem;
  int tile = 0;

  __device__ __forceinline__ void write(const DqFragment& dq, int part) {
    if (part == 0 && tile > 0) ptx::mbarrier_wait(smem.dq_empty[(tile - 1) % kAdders], (tile - 1) / kAdders % 2);
    float* const own = smem.dq + dq_place(part);
#pragma unroll
    for (int n = 0; n < kPanel / 8; ++n) {
      const float* x = dq.x[0][n];
      *reinterpret_cast<float4*>(own + n * kWarpSize * 4) = float4{x[0], x[1], x[2], x[3]};
    }
    if (part < kParts - 1) return;
    ptx::fence_async_proxy();
    __syncwarp();
    if (warp::lane() == 0) ptx::mbarrier_arrive(smem.dq_full[tile % kAdders]);
    ++tile;
  }
};
// Every kAdders-th tile of those, by one thread. Two of them in turn wait for their turn, and for what they have added to be there.
__device__ __forceinline__ void add_dq(Smem& smem, const BwdSm90Params& params, int adder) {
  const Job& job = smem.control.job;
  int tile = 0;
  job.walk.for_each([&](int head, int query) {
    const Turn turn(smem, query);
    if (kStoresDq && turn.is_last) return;
    const int round = tile / kAdders;
    if (tile++ % kAdders != adder) return;
    const Sums sums(smem, params, head, query);
    ptx::mbarrier_wait(smem.dq_full[adder], round % 2);
    if (kStoresDq && turn.number == 0) {
      ptx::bulk_store(sums.dq, smem.dq, sizeof(smem.dq));
    } else {
      if (kIsOrdered) {
        ptx::await_turn(sums.count, turn.number);
        ptx::fence_async_proxy_global();
      }
      ptx::bulk_reduce_add(sums.dq, smem.dq, sizeof(smem.dq));
    }
    ptx::tma_commit();
    ptx::tma_wait_read();
    ptx::mbarrier_arrive(smem.dq_empty[adder]);
    if (kIsOrdered) ptx::pass_turn(sums.count);
  });
}
// The sum so far, of which this lane has a part.
__device__ __forceinline__ void load_sum(DqFragment& dq, const float* sum, int part) {
  const float* const own = sum + dq_place(part);
#pragma unroll
  for (int n = 0; n < kPanel / 8; ++n) {
    const float4 x = __ldcg(reinterpret_cast<const float4*>(own + n * kWarpSize * 4));  // past L1, which may hold an older one
    dq.x[0][n][0] = x.x, dq.x[0][n][1] = x.y, dq.x[0][n][2] = x.z, dq.x[0][n][3] = x.w;
  }
}
// The whole sum.
__device__ __forceinline__ void store(DqFragment& dq, int part, int head, int query, const attn::Sequence& seq, const BwdSm90Params& params) {
  scale(dq, static_cast<float>(params.scores.scale));
  const int row = query + (kSplitsRows ? part * kRows : 0) + threadIdx.x % kGroup / kWarpSize * kWarpRows, col = kSplitsRows ? 0 : part * kPanel;
  warp::store_global<GradElement, kCopyBytes, kAccumulate>(attn::rows<GradElement>(params.dq, seq, seq.q_begin, head, row) + col,
                                                           params.dq.stride_n, seq.len_q - row, params.problem.head_dim - col, dq);
}

// Which tile a block of an ordered launch has: the last keys first, of as many heads in turn as L2 holds rows of. Under a mask every block then
// begins with query rows of its own, and comes to those of the next keys when their block has left them; without one, as few blocks as can be
// queue up for the same rows.
constexpr int kBytesAtOnce = 8 << 20, kRowBytes = (2 + 2 + 4) * kHeadDim;  // of q, dout and dq_accum
__device__ __forceinline__ int ordered_block(const Problem& problem) {
  const int tiles = problem.tiles_k, heads = gridDim.x / tiles, block = gridDim.x - 1 - blockIdx.x;
  const int wanted = clamp(kBytesAtOnce / kRowBytes / max_of(problem.len_q, 1), 1, heads);
  const int head = block / (tiles * wanted) * wanted, at_once = min_of(wanted, heads - head), rest = block - head * tiles;
  return (head + rest % at_once) * tiles + rest / at_once;
}

__device__ __forceinline__ void make_dq(Smem& smem, const BwdSm90Params& params) {
  const Job& job = smem.control.job;
  const Walk walk = job.walk.uniform();
  // Uniform: else every descriptor passes through vector registers.
  const uint64 ds = ptx::descriptor(warp::uniform(ptx::shared_address(smem.ds)), 16);
  const uint64 k = ptx::descriptor(warp::uniform(ptx::shared_address(smem.k)), 16);
  Ring<kDsStages> place;
  DqWriter writer{smem};
  walk.for_each([&](int head, int query) {
    const Turn turn(smem, query);
    const bool is_last = kStoresDq && turn.is_last, has_sum = is_last && turn.number > 0;
    const Sums sums(smem, params, head, query);
    DqFragment dq;
    if (has_sum) {  // comes while ds is waited for
      if (warp::lane() == 0) ptx::await_turn(sums.count, turn.number);
      __syncwarp();
      load_sum(dq, sums.dq, 0);
    }
    ptx::mbarrier_wait(smem.ds_full[place.stage], place.parity);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint64 ds_part = ptx::advance(ds, place.stage * kDsBytes + (kSplitsRows ? part * kRows * kPanel * 2 : 0));
      const uint64 k_part = ptx::advance(k, kSplitsRows ? 0 : part * kKeyPanelBytes);
      if (has_sum && part > 0) load_sum(dq, sums.dq, part);
      ptx::pin(registers(dq));
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kKeyTile / 16; ++step)
        ptx::Wgmma<Element, kPanel>::template shared<true>(registers(dq), ptx::advance(ds_part, step / 4 * kQueryPanelBytes + step % 4 * 32),
                                                           ptx::advance(k_part, step * 16 * kPanel * 2), has_sum || step > 0);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin(registers(dq));
      if (part == kParts - 1 && warp::lane() == 0) ptx::mbarrier_arrive(smem.ds_empty[place.stage]);
      if (is_last) store(dq, part, head, query, job.sequence, params);
      else writer.write(dq, part);
    }
    place.advance();
  });
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads, 1) bwd_sm90(const __grid_constant__ cf::BwdSm90Params params) {
  using namespace cf;
  ptx::let_next_start();
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int block = kIsOrdered ? ordered_block(params.problem) : blockIdx.x;
  const Problem& problem = params.problem;
  const int number = attn::in_order_of_bias<kHasBias>(problem, params.scores, block, problem.tiles_k, problem.heads_kv);
  const attn::Work work = attn::find_work<false, kKeyTile>(problem, number);
  if (work.tile < 0) {
    ptx::await_previous();  // as all blocks do: kernels must not overtake each other
    return;
  }
  if (threadIdx.x == 0) {
    smem.bias.init(kBiasLoaders, kConsumerThreads);
#pragma unroll
    for (int place = 0; place < kDsStages; ++place) {
      ptx::mbarrier_init(smem.ds_full[place], kConsumerThreads / kWarpSize);
      ptx::mbarrier_init(smem.ds_empty[place], kGroupWarps);
    }
#pragma unroll
    for (int adder = 0; adder < kAdders; ++adder) {
      ptx::mbarrier_init(smem.dq_full[adder], kGroupWarps);
      ptx::mbarrier_init(smem.dq_empty[adder], 1);
    }
#pragma unroll
    for (int consumer = 0; consumer < kConsumers; ++consumer) ptx::mbarrier_init(smem.weighed[consumer], kGroupWarps);
    prepare_block(smem.control, params.problem, work);
    smem.factors = {attn::padded_begin(params.problem, work.sequence), attn::padded_rows(params.problem), Exponents(params.scores),
                    static_cast<float>(params.scores.keep_scale), params.problem.tiles_k - 1 - block % params.problem.tiles_k};
    if constexpr (kHasDropout) smem.dropout = attn::Dropout(params.scores, params.problem, work.sequence, 0);
  }
  ptx::await_previous();
  __syncthreads();
  const int group = warp::uniform(threadIdx.x / kGroup);
  if (group == 0) {
    ptx::give_registers<kProducerRegisters>();
    produce(smem, smem.control, params);
    const int first_adder = kGroupWarps - kAdders, adder = threadIdx.x / kWarpSize - first_adder;
    if (adder >= 0 && warp::lane() == 0) add_dq(smem, params, adder);
    if (kHasBias && threadIdx.x / kWarpSize == 2) load_bias<kBiasLoaders>(smem.bias, smem.control.job, params.scores, warp::lane());
  } else if (group < kDqGroup) {
    ptx::take_registers<kConsumerRegisters>();
    consume(group - 1, smem, params);
  } else {
    ptx::give_registers<kDqRegisters>();
    make_dq(smem, params);
  }
}
