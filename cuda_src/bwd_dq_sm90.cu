// dq alone on Hopper, for 16-bit types, by wgmma and the copy engine: one query tile of one head per block, dq in registers.
//
//   loader, one thread:  copies q and dout once, then the key and value tiles, first to last, into rings of stages
//   consumers, 64 rows each, for each key tile:
//     issue dq += ds(j - 1) k(j - 1);   issue s(j) = q k(j)^T;   issue dp(j) = dout v(j)^T
//     wait for s(j);    p(j) = exp(x(j) - lse)
//     wait for dp(j);   ds(j) = p(j) (dp(j) - D) dx/ds
//   at the end:  scale dq
//
// Beside a kernel for dk and dv it makes a backward without sums in memory: 7 matrix products instead of 5.
// Shared    q, dout for the whole block; k [kStages], v [kValueStages]: in panels of 64 columns, swizzled; (lse, D) of each row.
// Barriers  full: the loader's arrival and its bytes. empty: one arrival a consumer, after the wait that proves its products done.
//           Named: each consumer's own, and its turn, which the other gives.
// Order     every sum is in the order of the tiles.
#include "attn/gradient.cuh"
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
constexpr int kConsumers = 2, kThreads = kGroup * (1 + kConsumers);
static_assert(kThreads == kWarps * kWarpSize && kQueryTile == kConsumers * kRows && kKeyTile % 16 == 0);
static_assert(kHeadDim % kPanel == 0 && kHeadDimV % kPanel == 0);
static_assert(kStages > 1, "the next tile's scores are asked for before this tile's keys are done with");
static_assert(attn::kRowPad % kQueryTile == 0, "workspaces are padded to whole tiles");
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // 128 x 24 + 256 x 240: what the launch gave
constexpr int kPanels = kHeadDim / kPanel, kPanelsV = kHeadDimV / kPanel;

using Stats = attn::RowStats<float>;
using Switches = attn::Switches<float, BiasElement, kIsMasked, kHasSoftcap, kHasAlibi, kHasBias, kIsScaleNegative, true>;
using SFragment = warp::Fragment<1, kKeyTile / 8>;
using DqFragment = warp::Fragment<1, kHeadDim / 8>;
using Packed = uint32[kKeyTile / 16][4];

// What this block does: a query tile of a head, and the key tiles that it sees.
struct Job {
  attn::Sequence sequence;
  attn::Band<kIsMasked> band;
  attn::Range keys;  // that some query of the tile sees
  int head;
  int kv_head;
  int query_begin;
  int query_end;
  int first, count;  // key tiles

  __device__ __forceinline__ Job(const Problem& problem, const attn::Work& work)
      : sequence(work.sequence), band(problem, work.sequence), head(work.head), query_begin(work.tile * kQueryTile) {
    kv_head = head / (problem.heads_q / problem.heads_kv);
    query_end = min_of(query_begin + kQueryTile, sequence.len_q);
    keys = band.keys_of(query_begin, query_end);
    first = keys.begin / kKeyTile;
    count = keys.begin < keys.end ? ceil_div(keys.end, kKeyTile) - first : 0;
  }
};

struct alignas(1024) Smem {  // a swizzle repeats every 1024 bytes
  warpgroup::Panels<Element, kPanels, kQueryTile> q;
  warpgroup::Panels<Element, kPanelsV, kQueryTile> dout;
  warpgroup::Panels<Element, kPanels, kKeyTile> k[kStages];
  warpgroup::Panels<Element, kPanelsV, kKeyTile> v[kValueStages];
  Stats stats[kQueryTile];
  Job job;
  ptx::Barrier q_full, dout_full, k_full[kStages], k_empty[kStages], v_full[kValueStages], v_empty[kValueStages];
};
static_assert(sizeof(Smem) == kSmemBytes, "host arithmetic has drifted");
constexpr int kKeyBytes = sizeof(Smem::k) / kStages, kValueBytes = sizeof(Smem::v) / kValueStages;
constexpr int kQueryPanelBytes = kQueryTile * kPanel * 2, kKeyPanelBytes = kKeyTile * kPanel * 2;

constexpr int kOwnBarrier = 1, kTurnBarrier = kOwnBarrier + kConsumers;  // of consumer 0, the other's behind; 0 is __syncthreads
// Out of step one consumer's products run under the other's exponentials: 5 % at D 128, while elsewhere taking turns costs up to 10 %.
constexpr bool kTakesTurns = kHeadDim == 128;

__device__ __forceinline__ void load(Smem& smem, const BwdSm90Params& params) {
  const Job& job = smem.job;
  const attn::Sequence& seq = job.sequence;
  const int query = seq.q_begin + job.query_begin, key = seq.k_begin + job.first * kKeyTile;
  warpgroup::load(smem.q, params.q, smem.q_full, query, job.head, seq.batch);
  Ring<kStages> keys;
  Ring<kValueStages> values;
  for (int i = 0; i < job.count; ++i) {
    ptx::mbarrier_wait(smem.k_empty[keys.stage], keys.parity ^ 1);
    warpgroup::load(smem.k[keys.stage], params.k, smem.k_full[keys.stage], key + i * kKeyTile, job.kv_head, seq.batch);
    keys.advance();
    if (i == 0) warpgroup::load(smem.dout, params.dout, smem.dout_full, query, job.head, seq.batch);
    ptx::mbarrier_wait(smem.v_empty[values.stage], values.parity ^ 1);
    warpgroup::load(smem.v[values.stage], params.v, smem.v_full[values.stage], key + i * kKeyTile, job.kv_head, seq.batch);
    values.advance();
  }
}

// d = a b^T over kDim columns, a's 64 rows of a tile of kQueryTile and b a tile of kKeyTile.
template <int kDim>
__device__ __forceinline__ void multiply_scores(SFragment& d, uint64 a, uint64 b) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const int panel = step / 4, inside = step % 4 * 32;
    ptx::Wgmma<Element, kKeyTile>::template shared<false>(registers(d), ptx::advance(a, panel * kQueryPanelBytes + inside),
                                                          ptx::advance(b, panel * kKeyPanelBytes + inside), step > 0);
  }
}
// dq += ds k.
__device__ __forceinline__ void multiply_keys(DqFragment& dq, const Packed& ds, uint64 k) {
#pragma unroll
  for (int step = 0; step < kKeyTile / 16; ++step)
    ptx::Wgmma<Element, kHeadDim>::template registers<true>(registers(dq), ds[step], ptx::advance(k, step * 16 * kPanel * 2), true);
}

// Keys outside [begin, end) of a tile are seen by none of these queries; were one a NaN, 0 times it would reach dq. Each consumer zeroes
// them for itself.
__device__ __forceinline__ void zero_keys(int consumer, warpgroup::Panels<Element, kPanels, kKeyTile>& k, int begin, int end) {
  constexpr int kChunk = 16 / sizeof(Element), kChunks = kPanel / kChunk;
  for (int i = threadIdx.x % kGroup; i < kPanels * kKeyTile * kChunks; i += kGroup) {
    const int row = i / kChunks % kKeyTile;
    if (row < begin || row >= end) *reinterpret_cast<uint4*>(&k[i / kChunks / kKeyTile][row][i % kChunks * kChunk]) = uint4{0, 0, 0, 0};
  }
  ptx::fence_async_proxy();
  ptx::named_barrier_sync(kOwnBarrier + consumer, kGroup);
}

// Of rows that see no key.
__device__ __forceinline__ void store_empty(const Job& job, const BwdSm90Params& params) {
  const int cols = params.problem.head_dim;
  GradElement* const dq = attn::rows<GradElement>(params.dq, job.sequence, job.sequence.q_begin, job.head, job.query_begin);
  for (int i = threadIdx.x; i < (job.query_end - job.query_begin) * cols; i += kThreads)
    dq[i / cols * params.dq.stride_n + i % cols] = convert<GradElement>(0.0f);
}

__device__ __forceinline__ void consume(int consumer, Smem& smem, const BwdSm90Params& params) {
  const Job& job = smem.job;
  const attn::Sequence& seq = job.sequence;
  const Problem& problem = params.problem;
  const bool is_lead = threadIdx.x % kGroup == 0;
  const int warp_row = consumer * kRows + warp::uniform(threadIdx.x % kGroup / kWarpSize) * kWarpRows;
  const int query = warp::uniform(job.query_begin) + warp_row;
  const uint64 q = ptx::descriptor(ptx::shared_address(smem.q[0][consumer * kRows]), 16);
  const uint64 dout = ptx::descriptor(ptx::shared_address(smem.dout[0][consumer * kRows]), 16);
  const uint64 k = ptx::descriptor(ptx::shared_address(smem.k), kKeyPanelBytes), v = ptx::descriptor(ptx::shared_address(smem.v), 16);
  const float fold = ptx::settled(static_cast<float>(params.scores.fold));
  attn::ScoreMap<Switches> scores(job.band.uniform(), params.scores, seq, job.head);
  scores.settle();
  const Stats* const stats = smem.stats + warp_row;

  DqFragment dq;
  dq.zero();
  ptx::pin(registers(dq));
  SFragment s, dp;
  Ring<kStages> keys;
  Ring<kValueStages> values;
  int key = warp::uniform(job.first) * kKeyTile, left = warp::uniform(job.count);  // of the tile at hand; it counts
  bool is_full = false;
  // The steps' addresses of q and dout are more than there are uniform registers: computed anew, from a settled 0.
  const auto issue_scores = [&] {
    ptx::mbarrier_wait(smem.k_full[keys.stage], keys.parity);
    const attn::Range visible = {warp::uniform(job.keys.begin), warp::uniform(job.keys.end)};
    if (key < visible.begin || key + kKeyTile > visible.end)
      zero_keys(consumer, smem.k[keys.stage], visible.begin - key, visible.end - key);
    ptx::pin(registers(s));
    ptx::wgmma_fence();
    multiply_scores<kHeadDim>(s, ptx::advance(q, ptx::settled(0)), ptx::advance(k, keys.stage * kKeyBytes));
    ptx::wgmma_commit();
  };
  const auto issue_gradient = [&] {
    ptx::mbarrier_wait(smem.v_full[values.stage], values.parity);
    ptx::pin(registers(dp));
    ptx::wgmma_fence();
    multiply_scores<kHeadDimV>(dp, ptx::advance(dout, ptx::settled(0)), ptx::advance(v, values.stage * kValueBytes));
    ptx::wgmma_commit();
  };
  const auto make_probabilities = [&] {
    ptx::pin(registers(s));
    SFragment derivative;
    is_full = scores.apply(s, ptx::settled(query), key, kHasSoftcap ? &derivative : static_cast<SFragment*>(nullptr));
    attn::probabilities(s, stats, fold);
    if constexpr (kHasDropout) attn::mark_dropped(s, attn::Dropout(params.scores, problem, seq, job.head), query, key);
    if constexpr (kHasSoftcap) attn::multiply(s, derivative);
  };
  // Behind the wait for dp; ds is dp's then.
  Packed ds;
  const auto differentiate = [&] {
    ptx::pin(registers(dp));
    if (is_lead) ptx::mbarrier_arrive(smem.v_empty[values.stage]);
    values.advance();
    attn::score_gradient<kHasDropout>(dp, s, stats, static_cast<float>(params.scores.keep_scale), is_full);
#pragma unroll
    for (int step = 0; step < kKeyTile / 16; ++step) warpgroup::pack_pairs<Element>(ds[step], dp, step);
  };
  const auto take_turn = [&] {
    if (kTakesTurns) ptx::named_barrier_sync(kTurnBarrier + consumer, kConsumers * kGroup);
  };
  const auto give_turn = [&] {
    if (kTakesTurns) ptx::named_barrier_arrive(kTurnBarrier + 1 - consumer, kConsumers * kGroup);
  };
  const auto issue_keys = [&] {
    ptx::pin(registers(dq));
    ptx::wgmma_fence();
    multiply_keys(dq, ds, ptx::advance(k, keys.stage * kKeyBytes));
    ptx::wgmma_commit();
  };
  // Each warp its own rows; what an empty row's q and dout hold reaches that row alone, which becomes zeros at the end.
  const int64 padded_row = job.head * attn::padded_rows(problem) + attn::padded_begin(problem, seq) + query;
  const Stats* const rows = static_cast<const Stats*>(params.stats) + padded_row;
  if (warp::lane() < kWarpRows) smem.stats[warp_row + warp::lane()] = rows[warp::lane()];
  __syncwarp();
  ptx::mbarrier_wait(smem.q_full, 0);
  issue_scores();
  ptx::mbarrier_wait(smem.dout_full, 0);
  issue_gradient();
  ptx::wgmma_wait<1>();
  make_probabilities();
  if (consumer == 1 && left > 1) give_turn();
  while (--left > 0) {
    key += kKeyTile;
    ptx::wgmma_wait<0>();
    differentiate();
    take_turn();
    issue_keys();
    const int stage = keys.stage;
    keys.advance();
    issue_scores();
    issue_gradient();
    if (consumer == 0 || left > 1) give_turn();
    ptx::wgmma_wait<2>();
    ptx::pin(registers(dq));
    if (is_lead) ptx::mbarrier_arrive(smem.k_empty[stage]);
    ptx::wgmma_wait<1>();
    make_probabilities();
  }
  ptx::wgmma_wait<0>();
  differentiate();
  issue_keys();
  ptx::wgmma_wait<0>();
  ptx::pin(registers(dq));

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool is_empty = stats[warp::fragment_row(2 * half)].lse == kInfinity;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i)
        dq.x[0][n][i] = is_empty ? 0.0f : ptx::fma(dq.x[0][n][i], static_cast<float>(params.scores.scale), 0.0f);  // never -0
  }
  warp::store_global<GradElement, kCopyBytes, kAccumulate>(attn::rows<GradElement>(params.dq, seq, seq.q_begin, job.head, query),
                                                           params.dq.stride_n, job.query_end - query, problem.head_dim, dq);
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads, 1) bwd_dq_sm90(const __grid_constant__ cf::BwdSm90Params params) {
  using namespace cf;
  ptx::let_next_start();
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int block = kIsMasked ? gridDim.x - 1 - blockIdx.x : blockIdx.x;  // long tiles first
  const Problem& problem = params.problem;
  const int number = attn::in_order_of_bias<kHasBias>(problem, params.scores, block, problem.tiles_q, problem.heads_q);
  const attn::Work work = attn::find_work<true, kQueryTile>(problem, number);
  if (work.tile < 0) {
    ptx::await_previous();  // as all blocks do: kernels must not overtake each other
    return;
  }
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(smem.q_full, 1);
    ptx::mbarrier_init(smem.dout_full, 1);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(smem.k_full[stage], 1);
      ptx::mbarrier_init(smem.k_empty[stage], kConsumers);
    }
#pragma unroll
    for (int stage = 0; stage < kValueStages; ++stage) {
      ptx::mbarrier_init(smem.v_full[stage], 1);
      ptx::mbarrier_init(smem.v_empty[stage], kConsumers);
    }
    ptx::mbarrier_init_fence();
    smem.job = Job(params.problem, work);
  }
  ptx::await_previous();
  __syncthreads();
  if (smem.job.count == 0) {
    if (!kAccumulate) store_empty(smem.job, params);
    return;
  }
  const int group = warp::uniform(threadIdx.x / kGroup);
  if (group == 0) {
    ptx::give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) load(smem, params);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    consume(group - 1, smem, params);
  }
}
