// dq alone, in a fixed order, for every GPU since sm_80: one query tile of one head per block, as in the forward.
//
//   for each key tile:   s = q k^T   p = exp(x - lse)   dp = dout v^T   ds = p (dp - D) dx/ds   dq += ds k
//   at the end:          scale dq
//
// Beside bwd_generic it makes a backward without atomics: 7 matrix products instead of 5, every sum in the order of the tiles.
// Tiles     q, dout [kQueryTile, .] for the whole block; k, v [kKeyTile, .] in kStages cp.async stages; a warp owns
//           kQueryTile / kWarps query rows. For double ds passes through shared memory, each warp its own rows.
#include "attn/gradient.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/load.cuh"
#include "tile/matmul.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
constexpr int kWarpRows = kQueryTile / kWarps;
constexpr int kM = kWarpRows / 16;
using Accum = AccumOf<Element>::Type;
using Stats = attn::RowStats<Accum>;
static_assert(kQueryTile == kWarps * kM * 16, "a warp owns whole 16-row tiles");
static_assert(kKeyTile % 16 == 0 && kHeadDim % 16 == 0);
static_assert(attn::kRowPad % kQueryTile == 0, "workspaces are padded to whole tiles");

struct Stage {
  tile::Shared<Element, kKeyTile, kHeadDim> k;
  tile::Shared<Element, kKeyTile, kHeadDimV> v;
};
struct Smem : warp::Passage<Element, kQueryTile, kKeyTile> {  // of ds
  tile::Shared<Element, kQueryTile, kHeadDim> q;
  tile::Shared<Element, kQueryTile, kHeadDimV> dout;
  alignas(128) Stats stats[kQueryTile];
  Stage stages[kStages];
};
static_assert(sizeof(Smem) == kSmemBytes, "host arithmetic has drifted");

using Switches = attn::Switches<Accum, BiasElement, kIsMasked, kHasSoftcap, kHasAlibi, kHasBias, kIsScaleNegative, kIsHalf<Element>>;
using SFragment = warp::Fragment<kM, kKeyTile / 8, Accum>;
using DqFragment = warp::Fragment<kM, kHeadDim / 8, Accum>;
using warp::Major;

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads, cf::kBlocksPerSm)
bwd_dq_generic(const __grid_constant__ cf::BwdParams params) {
  using namespace cf;
  ptx::let_next_start();
  ptx::await_previous();
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const Problem& problem = params.problem;

  const int block = kIsMasked ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const attn::Work work = attn::find_work<true, kQueryTile>(problem, block);
  if (work.tile < 0) return;
  const attn::Sequence seq = work.sequence;
  const int head = work.head, kv_head = head / (problem.heads_q / problem.heads_kv);
  const int query_begin = work.tile * kQueryTile;
  const int query_end = min_of(query_begin + kQueryTile, seq.len_q);
  const attn::ScoreMap<Switches> scores(attn::Band<kIsMasked>(problem, seq), params.scores, seq, head);
  const attn::Range keys = scores.band.keys_of(query_begin, query_end);
  const int first_tile = keys.begin / kKeyTile;
  const int end_tile = keys.begin < keys.end ? ceil_div(keys.end, kKeyTile) : first_tile;

  cta::RowLoader<kThreads, kCopyBytes, decltype(Stage::k)> k_loader(
      attn::rows<Element>(params.k, seq, seq.k_begin, kv_head, first_tile * kKeyTile), params.k.stride_n, problem.head_dim);
  cta::RowLoader<kThreads, kCopyBytes, decltype(Stage::v)> v_loader(
      attn::rows<Element>(params.v, seq, seq.k_begin, kv_head, first_tile * kKeyTile), params.v.stride_n, problem.head_dim_v);
  const auto load_stage = [&](Stage& stage, int tile) {
    const int key = tile * kKeyTile;
    k_loader.load(stage.k, keys.begin - key, keys.end - key);
    v_loader.load(stage.v, keys.begin - key, keys.end - key);
    k_loader.advance(kKeyTile);
    v_loader.advance(kKeyTile);
    ptx::cp_async_commit();
  };

  const int warp_row = threadIdx.x / kWarpSize * kWarpRows;
  DqFragment dq;
  dq.zero();
  bool has_empty_row = false;
  if (first_tile < end_tile) {
    cta::load_rows<kThreads, kCopyBytes>(smem.q, attn::rows<Element>(params.q, seq, seq.q_begin, head, query_begin),
                                         params.q.stride_n, 0, query_end - query_begin, problem.head_dim);
    cta::load_rows<kThreads, kCopyBytes>(smem.dout, attn::rows<Element>(params.dout, seq, seq.q_begin, head, query_begin),
                                         params.dout.stride_n, 0, query_end - query_begin, problem.head_dim_v);
    const Stats* stats = static_cast<const Stats*>(params.stats) + head * attn::padded_rows(problem) +
                         attn::padded_begin(problem, seq) + query_begin;
    for (int row = threadIdx.x; row < kQueryTile; row += kThreads) {
      smem.stats[row] = stats[row];
      has_empty_row |= stats[row].lse == kInfinity;
    }
    load_stage(smem.stages[0], first_tile);
    ptx::cp_async_wait<0>();
    if (__syncthreads_or(has_empty_row)) {  // nothing of an empty row is used
      cta::zero_rows<kThreads>(smem.q, [&](int row) { return smem.stats[row].lse == kInfinity; });
      cta::zero_rows<kThreads>(smem.dout, [&](int row) { return smem.stats[row].lse == kInfinity; });
    }
  }
  for (int tile = first_tile; tile < end_tile; ++tile) {
    Stage& stage = smem.stages[(tile - first_tile) % kStages];
    ptx::cp_async_wait<0>();
    __syncthreads();  // the stage is there for everyone, and the other is free
    if (kStages > 1 && tile + 1 < end_tile) load_stage(smem.stages[(tile + 1 - first_tile) % kStages], tile + 1);

    SFragment s, dp;
    s.zero();
    warp::matmul<Major::K, Major::K, kHeadDim>(s, smem.q, warp_row, stage.k, 0);
    const int query = query_begin + warp_row, key = tile * kKeyTile;
    const bool is_full = scores.apply(s, query, key, kHasSoftcap ? &dp : static_cast<SFragment*>(nullptr));
    attn::probabilities(s, smem.stats + warp_row, Accum(params.scores.fold));
    if constexpr (kHasDropout) attn::mark_dropped(s, attn::Dropout(params.scores, problem, seq, head), query, key);
    if constexpr (kHasSoftcap) attn::multiply(s, dp);
    dp.zero();
    warp::matmul<Major::K, Major::K, kHeadDimV>(dp, smem.dout, warp_row, stage.v, 0);
    attn::score_gradient<kHasDropout>(dp, s, smem.stats + warp_row, Accum(params.scores.keep_scale), is_full);
    warp::matmul(dq, dp, smem, warp_row, stage.k);
    if (kStages == 1 && tile + 1 < end_tile) {
      __syncthreads();  // everyone is done with the only stage
      load_stage(stage, tile + 1);
    }
  }

#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dq.x[m][n][i] = ptx::fma(dq.x[m][n][i], Accum(params.scores.scale), Accum(0));  // never -0
  warp::store_global<GradElement, kCopyBytes, kAccumulate>(
      attn::rows<GradElement>(params.dq, seq, seq.q_begin, head, query_begin + warp_row), params.dq.stride_n,
      query_end - query_begin - warp_row, problem.head_dim, dq);
}
