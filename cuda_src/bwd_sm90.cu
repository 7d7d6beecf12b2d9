// The backward on Hopper, for 16-bit types, by wgmma and the copy engine: one key tile of one KV head per block, dk and dv in registers.
//
//   loader, one thread:      copies k and v once, then q and dout tile by tile into a ring of stages
//   statistician, one warp:  lse and D of the tile's rows, and what is special about them
//   the other two warps:     the bias, if there is one, piece by piece into a ring of its own
//   consumers, 64 keys each, for each query head of the group, for each query tile that sees the keys:
//     s^T = k q^T            dp^T - D = v dout^T - D
//     p^T = exp(x^T - lse)   ds^T = p^T (dp^T - D) dx/ds
//     dv += p^T dout         dk += ds^T q             from registers
//     dq = ds k            of the rows or columns that are this consumer's, ds of both consumers through shared memory;
//                          added to dq_accum by bulk reductions, each warp its own part
//   at the end:  dv, scale dk              (bwd_finish brings scale dq home)
//
// Without kMakesDq the last product is left to bwd_dq_sm90. kIsAlone: there is one key tile; then a block's dq is all of it, and stored.
// Shared    k, v [kKeyTile, kHeadDim] for the whole block; q, dout [kStages][kQueryTile, kHeadDim]; ds [2][kQueryTile, kKeyTile]: all in
//           panels of 64 columns, swizzled; dq of each warp in fragment order; two pieces of 16 KiB of the bias.
// Barriers  of attn/key_tile.cuh. Of a piece of the bias, full: all who load it; empty: every consumer's thread. Named, of both consumers:
//           ds is written, or rows have been zeroed. One for each tile is enough, as ds has two places: whoever writes a place again has
//           passed the barrier that the other reaches only after its product with it.
// Order     dk and dv: fixed, head by head and tile by tile. dq: the order in which blocks arrive.
#include "attn/key_scores.cuh"

namespace cf {

static_assert(kKeyTile == kConsumers * kRows && kHeadDim == kHeadDimV);
// dq is split so that each product is 64 x 64: by query rows, or by panels of columns.
constexpr bool kSplitsRows = kQueryTile == kConsumers * kRows;
static_assert(!kMakesDq || (kSplitsRows ? kPanels == 1 : kQueryTile == kRows && kPanels == kConsumers));
// Where scores stay as they are registers hold what every tile needs again, at D 128 all of it; else it is read or computed again.
constexpr bool kIsPlain = !kHasSoftcap && !kHasAlibi && !kHasBias && !kHasDropout;
[[maybe_unused]] constexpr bool kHasRoom = kIsPlain && kHeadDim == 128;
// Whether the product of v and dout is issued once p is there, where registers hold no second fragment until then.
constexpr bool kIsLate = kHasSoftcap || (kHasAlibi && kHasDropout) || (kHeadDim == 64 && (kHasBias || kHasDropout || !kMakesDq));

constexpr int kDsStages = 2;
using DqFragment = warp::Fragment<1, kPanel / 8>;
constexpr int kDqFloats = sizeof(DqFragment) / 4 * kWarpSize;  // of a warp

// One base after the other: at an offset of its own a base would be reached through a test for null.
template <bool kIsThere>
struct WithDs : Tiles {
  warpgroup::Panels<Element, kConsumers, kQueryTile> ds[kDsStages];
};
template <>
struct WithDs<false> : Tiles {};
template <bool kIsThere>
struct WithDq : WithDs<kMakesDq> {
  alignas(128) float dq[kConsumerThreads / kWarpSize][kDqFloats];
};
template <>
struct WithDq<false> : WithDs<kMakesDq> {};

// Read tile by tile, unless plain.
struct Factors {
  int64 first, head_floats;  // in dq_accum: of head 0 and query 0, and from head to head
  Exponents exponents;
  float keep_scale;
};

struct alignas(1024) Smem : WithDq<kMakesDq && !kIsAlone> {  // a swizzle repeats every 1024 bytes
  BiasRing<kHasBias> bias;
  Control control;
  attn::Dropout dropout;  // of head 0
  Factors factors;
};
static_assert(sizeof(Smem) == kSmemBytes, "host arithmetic has drifted");
[[maybe_unused]] constexpr int kDsBytes = sizeof(WithDs<true>::ds) / kDsStages;

using KeyFragment = warp::Fragment<1, kHeadDim / 8>;

// What a consumer does for dq, or nothing.
template <bool kIsThere>
struct DqPart {
  int consumer, warp_number;
  uint64 ds, k;              // operands: this consumer's rows or columns
  uint32 ds_row;             // where this lane writes its part of ds
  int64 first, head_floats;  // if plain
  int place = 0;             // of ds
  DqFragment dq;

  __device__ __forceinline__ DqPart(int consumer, Smem& smem)
      : consumer(consumer), warp_number(warp::uniform(threadIdx.x % kGroup / kWarpSize)) {
    ds = ptx::descriptor(ptx::shared_address(smem.ds[0][0][kSplitsRows ? consumer * kRows : 0]), 16);
    k = ptx::descriptor(ptx::shared_address(smem.k[kSplitsRows ? 0 : consumer]), 16);
    if (kHasRoom) ds_row = ptx::settled(row_of(smem, warp::lane()));
    if (!kIsPlain) return;
    first = ptx::settled(smem.factors.first);
    head_floats = ptx::settled(smem.factors.head_floats);
  }
  __device__ __forceinline__ int row_of(Smem& smem, int lane) const {  // of stmatrix: 8 queries and 8 keys a matrix
    const int row = lane / 16 * 8 + lane % 8, chunk = 2 * warp_number + lane / 8 % 2;
    return static_cast<int>(ptx::shared_address(&smem.ds[0][consumer][row][(chunk ^ row % 8) * 8]));
  }
  // Before a tile's are written.
  __device__ __forceinline__ void find_place(Smem& smem, int lane) {
    if (!kHasRoom) ds_row = row_of(smem, lane);
  }
  // ds of 16 queries.
  __device__ __forceinline__ void write(int step, const uint32 (&pairs)[4]) const {
    ptx::stmatrix_transposed(ds_row + place * kDsBytes + step * 16 * kPanel * 2, pairs);
  }
  // Issues dq = ds k over the keys, once ds of both consumers is there.
  __device__ __forceinline__ void multiply() {
    ptx::fence_async_proxy();
    meet();
    ptx::pin(registers(dq));
    ptx::wgmma_fence();
    const uint64 here = ptx::advance(ds, place * kDsBytes);
#pragma unroll
    for (int step = 0; step < kKeyTile / 16; ++step)
      ptx::Wgmma<Element, kPanel>::template shared<true>(registers(dq), ptx::advance(here, step / 4 * kQueryPanelBytes + step % 4 * 32),
                                                         ptx::advance(k, step * 16 * kPanel * 2), step > 0);
    ptx::wgmma_commit();
    place ^= 1;
  }
  // Behind the wait for it.
  __device__ __forceinline__ void deliver(int head, int query, Smem& smem, const BwdSm90Params& params) {
    if constexpr (kIsAlone) store(head, query, smem, params);
    else add(head, query, smem, params);
  }
  __device__ __forceinline__ void store(int head, int query, Smem& smem, const BwdSm90Params& params) {
    const attn::Sequence& seq = smem.control.job.sequence;
    const int row = query + (kSplitsRows ? consumer * kRows : 0) + warp_number * kWarpRows, col = kSplitsRows ? 0 : consumer * kPanel;
    ptx::pin(registers(dq));
    scale(dq, static_cast<float>(params.scores.scale));
    warp::store_global<GradElement, kCopyBytes, kAccumulate>(attn::rows<GradElement>(params.dq, seq, seq.q_begin, head, row) + col,
                                                             params.dq.stride_n, seq.len_q - row, params.problem.head_dim - col, dq);
  }
  __device__ __forceinline__ void add(int head, int query, Smem& smem, const BwdSm90Params& params) {
    const int lane = ptx::settled(warp::lane());
    float* const stage = smem.dq[consumer * (kGroup / kWarpSize) + warp_number];
    ptx::pin(registers(dq));
    if (lane == 0) ptx::tma_wait_read();  // of the tile before
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kPanel / 8; ++n) {
      const float* x = dq.x[0][n];
      reinterpret_cast<float4*>(stage)[n * kWarpSize + lane] = float4{x[0], x[1], x[2], x[3]};
    }
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      constexpr int kWarpFloats = kWarpRows * kHeadDim;
      const int part = kSplitsRows ? (consumer * (kRows / kWarpRows) + warp_number) * kWarpFloats : warp_number * kWarpFloats + consumer * kDqFloats;
      const int64 of_head = kIsPlain ? first + head * head_floats : smem.factors.first + head * smem.factors.head_floats;
      ptx::bulk_reduce_add(static_cast<float*>(params.dq_accum) + of_head + static_cast<int64>(query) * kHeadDim + part, stage, kDqFloats * 4);
      ptx::tma_commit();
    }
  }
  __device__ __forceinline__ void finish() const {
    if (warp::lane() == 0) ptx::tma_wait_read();  // shared memory outlives its copies
  }
};
template <>
struct DqPart<false> {
  __device__ __forceinline__ DqPart(int, Smem&) {}
  __device__ __forceinline__ void find_place(Smem&, int) {}
  __device__ __forceinline__ void write(int, const uint32 (&)[4]) const {}
  __device__ __forceinline__ void multiply() {}
  __device__ __forceinline__ void deliver(int, int, Smem&, const BwdSm90Params&) {}
  __device__ __forceinline__ void finish() const {}
};

// dq of rows in tiles that see none of the keys, where no other block has any: by both consumers.
__device__ __forceinline__ void store_unseen(const Job& job, const BwdSm90Params& params) {
  const attn::Sequence& seq = job.sequence;
  const int group = params.problem.heads_q / params.problem.heads_kv, cols = params.problem.head_dim;
  const int begin = job.is_idle() ? 0 : job.walk.query_begin, end = job.is_idle() ? 0 : ceil_div(job.walk.query_end, kQueryTile) * kQueryTile;
  for (int head = job.kv_head * group; head < (job.kv_head + 1) * group; ++head)
    for (int row = threadIdx.x / kWarpSize - kGroup / kWarpSize; row < seq.len_q; row += kConsumerThreads / kWarpSize)
      if (row < begin || row >= end)
        for (int col = warp::lane(); col < cols; col += kWarpSize)
          attn::rows<GradElement>(params.dq, seq, seq.q_begin, head, row)[col] = convert<GradElement>(0.0f);
}

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
  DqPart<kMakesDq> dq(consumer, smem);
  BiasReader<kHasBias> bias(smem.bias);

  KeyFragment dk, dv;
  dk.zero();
  dv.zero();
  Ring<kStages> ring;
  if (!job.is_idle()) {
    ptx::mbarrier_wait(control.k_full, 0);
    // Keys that no query sees take no part: theirs could reach dq.
    const attn::Range keys = band.keys_of(0, seq.len_q);
    const int first = keys.begin - job.key_begin, end = keys.end - job.key_begin;
    if (first > 0 || end < kKeyTile) {
      zero_rows(smem.k, [&](int row) { return row < first || row >= end; });
      ptx::fence_async_proxy();
      meet();
    }
    ptx::mbarrier_wait(control.v_full, 0);
  }
  Exponents held(params.scores);
  held.unit = ptx::settled(held.unit);
  int special = 0;
  const auto await_statistics = [&] {
    ptx::mbarrier_wait(control.statistics_full[ring.stage], ring.parity);
    special = warp::uniform(control.statistics[ring.stage].special);
  };
  const Walk walk = job.walk.uniform();
  if (!job.is_idle()) await_statistics();
  walk.for_each([&](int head, int query) {
    const int stage = ring.stage, stage_bytes = stage * kQueryBytes;
    const Statistics& statistics = control.statistics[stage];
    Weights weights;
    ScoreFragment& s = weights.s;
    ScoreFragment dp;
    if constexpr (kPreloadsDelta && !kIsLate) begin_with(dp, statistics.minus_delta + warp::fragment_col(0));
    ptx::mbarrier_wait(control.q_full[stage], ring.parity);
    const bool is_coarse = special & kCoarse;
    if (special & kAbsent) zero_absent(smem, control, ring);
    ptx::pin(registers(s));
    ptx::pin(registers(dp));
    ptx::wgmma_fence();
    multiply_scores<kHeadDim, false>(s, k_rows, ptx::advance(q, stage_bytes));
    ptx::wgmma_commit();
    const auto multiply_values = [&] {
      ptx::mbarrier_wait(control.dout_full[stage], ring.parity);
      ptx::wgmma_fence();
      multiply_scores<kHeadDim, kPreloadsDelta>(dp, v_rows, ptx::advance(dout, stage_bytes));
      ptx::wgmma_commit();
    };
    if (!kIsLate) multiply_values();

    const int lane = ptx::settled(warp::lane());  // as in `hide`
    dq.find_place(smem, lane);
    Kept kept;
    if constexpr (kHasDropout) kept = draw(smem.dropout, head, key, query);
    const bool has_hidden = !band.is_full(query, kQueryTile, key, kWarpRows);
    ptx::wgmma_wait<kIsLate ? 0 : 1>();
    ptx::pin(registers(s));
    const Exponents exponents = kIsPlain ? held : smem.factors.exponents;
    const Exponents::Side side(statistics.slope, query + seq.shift - key, lane);
    to_probabilities(s, dp, exponents, side, bias, key_row, lane, statistics.lse + warp::fragment_col(0), is_coarse);
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
    Packed ds;
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
      warpgroup::pack_pairs<Element>(ds[step], dp, step);
      dq.write(step, ds[step]);
    }
    ptx::pin(registers(dv));
    ptx::wgmma_fence();
    multiply_queries<kHeadDim>(dv, weights.p, ptx::advance(dout, stage_bytes));
    ptx::wgmma_commit();
    dq.multiply();
    ptx::pin(registers(dk));
    ptx::wgmma_fence();
    multiply_queries<kHeadDim>(dk, ds, ptx::advance(q, stage_bytes));
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::pin(registers(dv));
    if (is_lead) ptx::mbarrier_arrive(control.dout_empty[stage]);
    dq.deliver(head, query, smem, params);
    ring.advance();
    if (!walk.is_last(head, query)) await_statistics();  // under the last product
    ptx::wgmma_wait<0>();
    ptx::pin(registers(dk));
    ptx::mbarrier_arrive(control.q_empty[stage]);
  });

  if (kHasDropout) scale(dv, static_cast<float>(params.scores.keep_scale));
  scale(dk, static_cast<float>(params.scores.scale));
  store_gradient(params.dk, job, key, params.problem.head_dim, dk);
  store_gradient(params.dv, job, key, params.problem.head_dim_v, dv);
  dq.finish();
  if (kIsAlone && !kAccumulate) store_unseen(job, params);
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads, 1) bwd_sm90(const __grid_constant__ cf::BwdSm90Params params) {
  using namespace cf;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const attn::Work work = attn::find_work<false, kKeyTile>(params.problem, blockIdx.x);
  if (work.tile < 0) return;
  if (threadIdx.x == 0) {
    smem.bias.init();
    prepare_block(smem.control, params.problem, work);
    smem.factors = {attn::padded_begin(params.problem, work.sequence) * kHeadDim, attn::padded_rows(params.problem) * kHeadDim,
                    Exponents(params.scores), static_cast<float>(params.scores.keep_scale)};
    if constexpr (kHasDropout) smem.dropout = attn::Dropout(params.scores, params.problem, work.sequence, 0);
  }
  __syncthreads();
  const int group = warp::uniform(threadIdx.x / kGroup);
  if (group == 0) {
    ptx::give_registers<kProducerRegisters>();
    produce(smem, smem.control, params);
    if (threadIdx.x >= 2 * kWarpSize) load_bias(smem.bias, smem.control.job, params.scores, threadIdx.x - 2 * kWarpSize);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    consume(group - 1, smem, params);
  }
}
