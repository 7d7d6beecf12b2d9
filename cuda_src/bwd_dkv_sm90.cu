// dk and dv on Hopper, for 16-bit types and wide head dims, by wgmma and the copy engine: one key tile of one KV head per block.
//
//   loader, one thread:      copies k and v once, then q and dout tile by tile into a ring of stages
//   statistician, one warp:  lse and D of the tile's rows, and what is special about them
//   two more warps:          the bias, if there is one, piece by piece into a ring of its own
//   for each query head of the group, for each query tile that sees the keys:
//     consumer 0:  s^T = k q^T             p^T = exp(x^T - lse), p^T dx/ds for consumer 1          dv += p^T dout
//     consumer 1:  dp^T - D = v dout^T - D           ds^T = p^T (dp^T - D) dx/ds                   dk += ds^T q
//   each asks for the next tile's first product before it waits for this tile's last one
//   at the end:  dv, scale dk
//
// An accumulator of 64 x 256 fills half of a consumer's registers: so each has one of the two. bwd_dq_sm90 makes dq.
// Shared    k, v for the whole block; q, dout [kStages]: all in panels of 64 columns, swizzled; p [kPlaces] as its lanes have it; two pieces
//           of the bias, of 8 KiB.
// Barriers  of attn/key_tile.cuh. Of each place of p, full: every thread of consumer 0, empty: of consumer 1. Of a piece
//           of the bias, full: all who load it; empty: every thread of consumer 0.
// Order     dk and dv: fixed, head by head and tile by tile.
#include "attn/key_scores.cuh"
#include "ptx/griddepcontrol.cuh"

namespace cf {

static_assert(kKeyTile == kRows && kThreads == kGroup + kConsumerThreads);
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // 128 x 40 + 256 x 232: what the launch gave
constexpr int kPlaces = 2;
constexpr int kBiasLoaders = 2 * kWarpSize;  // the producers' warps that are left
using Passage = uint4[kQueryTile / 16][kGroup];

struct alignas(1024) Smem {  // a swizzle repeats every 1024 bytes
  Tiles tiles;
  Passage p[kPlaces];
  BiasRing<kHasBias> bias;
  Control control;
  ptx::Barrier p_full[kPlaces], p_empty[kPlaces];
  attn::Dropout dropout;  // of head 0
};
static_assert(sizeof(Smem) == kSmemBytes, "host arithmetic has drifted");

// Where a consumer stands.
struct Position {
  Ring<kStages> now, next;  // tiles whose scores are used, and whose first product is issued
  Ring<kPlaces> place;      // of the former's p
  __device__ __forceinline__ void advance() {
    now.advance();
    place.advance();
  }
};

__device__ __forceinline__ void make_dv(Smem& smem, const BwdSm90Params& params) {
  Control& control = smem.control;
  const Job& job = control.job;
  const int thread = threadIdx.x % kGroup;
  const attn::Sequence& seq = job.sequence;
  const int key_row = warp::uniform(thread / kWarpSize) * kWarpRows, key = warp::uniform(job.key_begin) + key_row;
  Exponents exponents(params.scores);
  exponents.unit = ptx::settled(exponents.unit);
  exponents.softcap_scale = ptx::settled(exponents.softcap_scale);
  BiasReader<kHasBias> bias(smem.bias);
  const attn::Band<kIsMasked> band = job.band.uniform();
  const Walk walk = job.walk.uniform();
  const uint64 k = ptx::descriptor(ptx::shared_address(smem.tiles.k), 16), q = ptx::descriptor(ptx::shared_address(smem.tiles.q), 16);
  const uint64 dout = ptx::descriptor(ptx::shared_address(smem.tiles.dout), kQueryPanelBytes);

  warp::Fragment<1, kHeadDimV / 8> dv;
  dv.zero();
  ptx::pin(registers(dv));
  Weights weights;
  ScoreFragment s;
  Position at;
  const auto await_scores = [&] {
    ptx::mbarrier_wait(control.statistics_full[at.next.stage], at.next.parity);
    ptx::mbarrier_wait(control.q_full[at.next.stage], at.next.parity);
  };
  const auto issue_scores = [&] {  // of nothing behind the last tile: a product under a condition would be waited for at once
    ptx::pin(registers(s));
    ptx::wgmma_fence();
    multiply_scores<kHeadDim, false>(s, ptx::advance(k, ptx::settled(0)), ptx::advance(q, at.next.stage * kQueryBytes));
    ptx::wgmma_commit();
    at.next.advance();
  };
  if (!job.is_idle()) {
    ptx::mbarrier_wait(control.k_full, 0);
    await_scores();
    issue_scores();
  }
  walk.for_each([&](int head, int query) {
    const int stage = at.now.stage;
    const Statistics& statistics = control.statistics[stage];
    const bool has_hidden = !band.is_full(query, kQueryTile, key, kWarpRows);
    const bool has_coarse = warp::uniform(statistics.has_coarse);
    const int lane = ptx::settled(warp::lane());  // as in `hide`
    const Exponents::Side side(statistics.slope, query + seq.shift - key, lane);
    Kept kept;
    if constexpr (kHasDropout) kept = draw(smem.dropout, head, key, query);
    const Columns lse(statistics.lse);
    ptx::wgmma_wait<0>();
    ptx::pin(registers(s));
    ptx::mbarrier_arrive(control.q_empty[stage]);
    weigh(s, weights, exponents, side, bias, kept, key_row, lane, lse, has_coarse, [](int) {});
    if (has_hidden) weights.hide(job.band, key, query);
    const Packed& passed = weights.of_ds();
    ptx::mbarrier_wait(smem.p_empty[at.place.stage], at.place.parity ^ 1);
#pragma unroll
    for (int step = 0; step < kQueryTile / 16; ++step)
      smem.p[at.place.stage][step][thread] = uint4{passed[step][0], passed[step][1], passed[step][2], passed[step][3]};
    ptx::mbarrier_arrive(smem.p_full[at.place.stage]);
    ptx::mbarrier_wait(control.dout_full[stage], at.now.parity);
    ptx::pin(registers(dv));
    ptx::wgmma_fence();
    multiply_queries<kHeadDimV>(dv, weights.p, ptx::advance(dout, stage * kDoutBytes));
    ptx::wgmma_commit();
    if (!walk.is_last(head, query)) await_scores();
    issue_scores();
    ptx::wgmma_wait<1>();
    ptx::pin(registers(dv));
    if (thread == 0) ptx::mbarrier_arrive(control.dout_empty[stage]);
    at.advance();
  });
  ptx::wgmma_wait<0>();
  if (kHasDropout) scale(dv, static_cast<float>(params.scores.keep_scale));
  store_gradient(params.dv, job, key, params.problem.head_dim_v, dv);
}

__device__ __forceinline__ void make_dk(Smem& smem, const BwdSm90Params& params) {
  Control& control = smem.control;
  const Job& job = control.job;
  const int thread = threadIdx.x % kGroup;
  const int key = warp::uniform(job.key_begin + thread / kWarpSize * kWarpRows);
  const attn::Band<kIsMasked> band = job.band.uniform();
  const Walk walk = job.walk.uniform();
  const uint64 v = ptx::descriptor(ptx::shared_address(smem.tiles.v), 16), dout = ptx::descriptor(ptx::shared_address(smem.tiles.dout), 16);
  const uint64 q = ptx::descriptor(ptx::shared_address(smem.tiles.q), kQueryPanelBytes);

  warp::Fragment<1, kHeadDim / 8> dk;
  dk.zero();
  ptx::pin(registers(dk));
  ScoreFragment dp;
  Position at;
  const auto await_gradient = [&] {
    ptx::mbarrier_wait(control.statistics_full[at.next.stage], at.next.parity);
    ptx::mbarrier_wait(control.dout_full[at.next.stage], at.next.parity);
  };
  const auto issue_gradient = [&] {  // as in make_dv
    if constexpr (kPreloadsDelta) {
#pragma unroll
      for (int step = 0; step < kQueryTile / 16; ++step) begin_with(dp, step, control.statistics[at.next.stage].minus_delta);
    }
    ptx::pin(registers(dp));
    ptx::wgmma_fence();
    multiply_scores<kHeadDimV, kPreloadsDelta>(dp, ptx::advance(v, ptx::settled(0)), ptx::advance(dout, at.next.stage * kDoutBytes));
    ptx::wgmma_commit();
    at.next.advance();
  };
  if (!job.is_idle()) {
    ptx::mbarrier_wait(control.v_full, 0);
    await_gradient();
    issue_gradient();
  }
  walk.for_each([&](int head, int query) {
    const int stage = at.now.stage;
    const bool has_hidden = !band.is_full(query, kQueryTile, key, kWarpRows);
    Kept kept;
    if constexpr (kHasDropout) kept = draw(smem.dropout, head, key, query);
    ptx::wgmma_wait<0>();
    ptx::pin(registers(dp));
    if (thread == 0) ptx::mbarrier_arrive(control.dout_empty[stage]);
    ptx::mbarrier_wait(smem.p_full[at.place.stage], at.place.parity);
    Weights weights;
    Packed& ds = weights.of_ds();
#pragma unroll
    for (int step = 0; step < kQueryTile / 16; ++step) {
      const uint4 pairs = smem.p[at.place.stage][step][thread];
      ds[step][0] = pairs.x, ds[step][1] = pairs.y, ds[step][2] = pairs.z, ds[step][3] = pairs.w;
    }
    ptx::mbarrier_arrive(smem.p_empty[at.place.stage]);
    if constexpr (kHasDropout) {
      drop(dp, kept, static_cast<float>(params.scores.keep_scale), control.statistics[stage].minus_delta);
    }
    if (kHasBias || has_hidden) hide_gradient(dp, weights);  // of a bias, -inf hides
    differentiate(dp, weights, [](int) {});
    ptx::mbarrier_wait(control.q_full[stage], at.now.parity);
    ptx::pin(registers(dk));
    ptx::wgmma_fence();
    multiply_queries<kHeadDim>(dk, ds, ptx::advance(q, stage * kQueryBytes));
    ptx::wgmma_commit();
    if (!walk.is_last(head, query)) await_gradient();
    issue_gradient();
    ptx::wgmma_wait<1>();
    ptx::pin(registers(dk));
    ptx::mbarrier_arrive(control.q_empty[stage]);
    at.advance();
  });
  ptx::wgmma_wait<0>();
  scale(dk, static_cast<float>(params.scores.scale));
  store_gradient(params.dk, job, key, params.problem.head_dim, dk);
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads, 1) bwd_dkv_sm90(const __grid_constant__ cf::BwdSm90Params params) {
  using namespace cf;
  ptx::let_next_start();
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const Problem& problem = params.problem;
  const int number = attn::in_order_of_bias<kHasBias>(problem, params.scores, blockIdx.x, problem.tiles_k, problem.heads_kv);
  const attn::Work work = attn::find_work<false, kKeyTile>(problem, number);
  if (work.tile < 0) {
    ptx::await_previous();  // as all blocks do: kernels must not overtake each other
    return;
  }
  if (threadIdx.x == 0) {
    smem.bias.init(kBiasLoaders, kGroup);
#pragma unroll
    for (int place = 0; place < kPlaces; ++place) {
      ptx::mbarrier_init(smem.p_full[place], kGroup);
      ptx::mbarrier_init(smem.p_empty[place], kGroup);
    }
    prepare_block(smem.control, params.problem, work);
    if constexpr (kHasDropout) smem.dropout = attn::Dropout(params.scores, params.problem, work.sequence, 0);
  }
  ptx::await_previous();
  __syncthreads();
  const int group = warp::uniform(threadIdx.x / kGroup);
  if (group == 0) {
    ptx::give_registers<kProducerRegisters>();
    produce(smem.tiles, smem.control, params);
    if (threadIdx.x >= 2 * kWarpSize) load_bias<kBiasLoaders>(smem.bias, smem.control.job, params.scores, threadIdx.x - 2 * kWarpSize);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    if (group == 1) make_dv(smem, params);
    else make_dk(smem, params);
  }
}
