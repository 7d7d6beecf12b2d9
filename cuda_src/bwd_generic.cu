// The backward for every GPU since sm_80: one key tile of one KV head per block, dk and dv in registers.
//
//   for each query head of the group, for each query tile that sees the keys:
//     s = q k^T        p = exp(x - lse)      dp = dout v^T      ds = p (dp - D) dx/ds
//     dv += p^T dout   dk += ds^T q          dq += ds k   (reductions into dq_accum, unless bwd_dq_generic makes dq)
//   at the end:  dv, scale dk              (bwd_finish brings scale dq home)
//
// Tiles     k, v [kKeyTile, .] for the whole block; q, dout [kQueryTile, .] in kStages cp.async stages; p, ds [kQueryTile, kKeyTile].
// Warps     s, dp: kScoreWarps along the queries; dk, dv: kKeyWarps along the keys; dq: kQueryWarps along the queries; the rest of
//           the kWarps along the other axis.
// Order     dk and dv: fixed, head by head and tile by tile. dq: the order in which blocks arrive.
// Barriers  a: the stage's q, dout and stats are there (and the other stage is free); b: p and ds are written; then a again.
#include "attn/gradient.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/reduce.cuh"
#include "tile/load.cuh"
#include "tile/matmul.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
static_assert(attn::kRowPad % kQueryTile == 0, "workspaces are padded to whole tiles");
using Accum = AccumOf<Element>::Type;
constexpr int kScoreM = kQueryTile / kScoreWarps / 16;
constexpr int kScoreN = kKeyTile / (kWarps / kScoreWarps) / 8;
constexpr int kKeyM = kKeyTile / kKeyWarps / 16;
constexpr int kKeyN = kHeadDim / (kWarps / kKeyWarps) / 8;
constexpr int kKeyNV = kHeadDimV / (kWarps / kKeyWarps) / 8;
constexpr int kQueryM = kQueryTile / kQueryWarps / 16;
constexpr int kQueryN = kHeadDim / (kWarps / kQueryWarps) / 8;
static_assert(kScoreM * 16 * kScoreWarps == kQueryTile && kScoreN * 8 * (kWarps / kScoreWarps) == kKeyTile);
static_assert(kKeyN * 8 * (kWarps / kKeyWarps) == kHeadDim && kKeyNV * 8 * (kWarps / kKeyWarps) == kHeadDimV);
static_assert(kQueryN * 8 * (kWarps / kQueryWarps) == kHeadDim);
static_assert(kQueryTile <= kThreads, "a thread watches over one row's statistics");
static_assert(kKeyM * 16 * kKeyWarps == kKeyTile && kQueryM * 16 * kQueryWarps == kQueryTile);

struct Stage {
  tile::Shared<Element, kQueryTile, kHeadDim> q;
  tile::Shared<Element, kQueryTile, kHeadDimV> dout;
  alignas(128) attn::RowStats<Accum> stats[kQueryTile];
};
struct Smem {
  tile::Shared<Element, kKeyTile, kHeadDim> k;
  tile::Shared<Element, kKeyTile, kHeadDimV> v;
  tile::Shared<Element, kQueryTile, kKeyTile> p;
  tile::Shared<Element, kQueryTile, kKeyTile> ds;
  Stage stages[kStages];
};
static_assert(sizeof(Smem) == kSmemBytes, "host arithmetic has drifted");

using Switches = attn::Switches<Accum, BiasElement, kIsMasked, kHasSoftcap, kHasAlibi, kHasBias, kIsScaleNegative, kIsHalf<Element>>;
using warp::Major;

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads, cf::kBlocksPerSm)
bwd_generic(const __grid_constant__ cf::BwdParams params) {
  using namespace cf;
  ptx::let_next_start();
  ptx::await_previous();
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const Problem& problem = params.problem;

  const attn::Work work = attn::find_work<false, kKeyTile>(problem, blockIdx.x);
  if (work.tile < 0) return;
  const attn::Sequence seq = work.sequence;
  const int key_begin = work.tile * kKeyTile;
  const int key_end = min_of(key_begin + kKeyTile, seq.len_k);
  const int group = problem.heads_q / problem.heads_kv;
  const attn::Band<kIsMasked> band(problem, seq);
  const attn::Range queries = band.queries_of(key_begin, key_end);
  const int64 padded_rows = attn::padded_rows(problem);
  const int64 padded_begin = attn::padded_begin(problem, seq);

  const int warp = threadIdx.x / kWarpSize;
  const int score_row = warp % kScoreWarps * kScoreM * 16, score_col = warp / kScoreWarps * kScoreN * 8;
  const int kv_row = warp % kKeyWarps * kKeyM * 16;
  const int dk_col = warp / kKeyWarps * kKeyN * 8, dv_col = warp / kKeyWarps * kKeyNV * 8;
  const int dq_row = warp % kQueryWarps * kQueryM * 16, dq_col = warp / kQueryWarps * kQueryN * 8;

  warp::Fragment<kKeyM, kKeyN, Accum> dk;
  warp::Fragment<kKeyM, kKeyNV, Accum> dv;
  dk.zero();
  dv.zero();

  const int first_query = queries.begin / kQueryTile * kQueryTile;
  const int end_head = (work.head + 1) * group;

  bool has_empty_row = false;  // of the stage under way, in this thread's row
  cta::RowLoader<kThreads, kCopyBytes, decltype(Stage::q)> q_loader(
      attn::rows<Element>(params.q, seq, seq.q_begin, work.head * group, first_query), params.q.stride_n, problem.head_dim);
  cta::RowLoader<kThreads, kCopyBytes, decltype(Stage::dout)> dout_loader(
      attn::rows<Element>(params.dout, seq, seq.q_begin, work.head * group, first_query), params.dout.stride_n, problem.head_dim_v);
  // Queries outside the keys' visible range are not even read: a NaN there can reach no key of this block.
  const auto load_stage = [&](Stage& stage, int head, int query) {
    if (query == first_query) {
      q_loader.seek(attn::rows<Element>(params.q, seq, seq.q_begin, head, query));
      dout_loader.seek(attn::rows<Element>(params.dout, seq, seq.q_begin, head, query));
    }
    q_loader.load(stage.q, queries.begin - query, queries.end - query);
    dout_loader.load(stage.dout, queries.begin - query, queries.end - query);
    q_loader.advance(kQueryTile);
    dout_loader.advance(kQueryTile);
    const auto* stats = static_cast<const attn::RowStats<Accum>*>(params.stats) + head * padded_rows + padded_begin + query;
    has_empty_row = false;
    if (threadIdx.x < kQueryTile) {
      constexpr int kBytes = sizeof(attn::RowStats<Accum>);
      ptx::cp_async<kBytes>(ptx::shared_address(stage.stats + threadIdx.x), stats + threadIdx.x, kBytes);
      has_empty_row = stats[threadIdx.x].lse == kInfinity;
    }
    ptx::cp_async_commit();
  };

  int head = work.head * group, query = first_query, stage_number = 0;
  bool has_more = queries.begin < queries.end;
  if (has_more) {
    // Keys that no query sees are not read either: theirs could reach dq.
    const attn::Range keys = band.keys_of(0, seq.len_q);
    cta::load_rows<kThreads, kCopyBytes>(smem.k, attn::rows<Element>(params.k, seq, seq.k_begin, work.head, key_begin),
                                         params.k.stride_n, keys.begin - key_begin, keys.end - key_begin, problem.head_dim);
    cta::load_rows<kThreads, kCopyBytes>(smem.v, attn::rows<Element>(params.v, seq, seq.k_begin, work.head, key_begin),
                                         params.v.stride_n, keys.begin - key_begin, keys.end - key_begin, problem.head_dim_v);
    load_stage(smem.stages[0], head, query);
  }
  while (has_more) {
    Stage& stage = smem.stages[stage_number];
    stage_number = (stage_number + 1) % kStages;
    const bool is_last_tile = query + kQueryTile >= queries.end;
    const int next_head = head + is_last_tile, next_query = is_last_tile ? first_query : query + kQueryTile;
    has_more = next_head < end_head;
    ptx::cp_async_wait<0>();
    // a. Nothing of an empty row is used: were its q or dout a NaN, 0 times it would reach dk or dv.
    if (__syncthreads_or(has_empty_row)) {
      cta::zero_rows<kThreads>(stage.q, [&](int row) { return stage.stats[row].lse == kInfinity; });
      cta::zero_rows<kThreads>(stage.dout, [&](int row) { return stage.stats[row].lse == kInfinity; });
      __syncthreads();
    }
    if (kStages > 1 && has_more) load_stage(smem.stages[stage_number], next_head, next_query);

    using ScoreFragment = warp::Fragment<kScoreM, kScoreN, Accum>;
    ScoreFragment s, dp;
    s.zero();
    warp::matmul<Major::K, Major::K, kHeadDim>(s, stage.q, score_row, smem.k, score_col);
    const attn::ScoreMap<Switches> scores(band, params.scores, seq, head);
    const int row = query + score_row, key = key_begin + score_col;
    const bool is_full = scores.apply(s, row, key, kHasSoftcap ? &dp : static_cast<ScoreFragment*>(nullptr));
    attn::probabilities(s, stage.stats + score_row, Accum(params.scores.fold));
    if constexpr (kHasDropout) attn::mark_dropped(s, attn::Dropout(params.scores, problem, seq, head), row, key);
    if constexpr (kHasDropout) warp::store_shared(smem.p, score_row, score_col, attn::kept(s));
    else warp::store_shared(smem.p, score_row, score_col, s);
    if constexpr (kHasSoftcap) attn::multiply(s, dp);  // dx/ds joins p once p itself is stored

    dp.zero();
    warp::matmul<Major::K, Major::K, kHeadDimV>(dp, stage.dout, score_row, smem.v, score_col);
    attn::score_gradient<kHasDropout>(dp, s, stage.stats + score_row, Accum(params.scores.keep_scale), is_full);
    warp::store_shared(smem.ds, score_row, score_col, dp);
    __syncthreads();  // b

    warp::matmul<Major::MN, Major::MN, kQueryTile>(dv, smem.p, kv_row, stage.dout, dv_col);
    if constexpr (kSumsDq) {
      warp::Fragment<kQueryM, kQueryN, Accum> dq;
      dq.zero();
      warp::matmul<Major::K, Major::MN, kKeyTile>(dq, smem.ds, dq_row, smem.k, dq_col);
      Accum* accum = static_cast<Accum*>(params.dq_accum) + (head * padded_rows + padded_begin + query + dq_row) * kHeadDim;
#pragma unroll
      for (int m = 0; m < kQueryM; ++m)
#pragma unroll
        for (int n = 0; n < kQueryN; ++n)
          ptx::reduce_add_fragment(accum + (m * (kHeadDim / 8) + dq_col / 8 + n) * 128, warp::lane(), dq.x[m][n]);
    }
    warp::matmul<Major::MN, Major::MN, kQueryTile>(dk, smem.ds, kv_row, stage.q, dk_col);
    if (kStages == 1 && has_more) {
      __syncthreads();  // everyone is done with the only stage
      load_stage(stage, next_head, next_query);
    }
    head = next_head;
    query = next_query;
  }

  // Keys past the live ones still get their zeros.
  const int rows = seq.all_k - key_begin - kv_row;
#pragma unroll
  for (int m = 0; m < kKeyM; ++m)
#pragma unroll
    for (int n = 0; n < kKeyN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dk.x[m][n][i] = ptx::fma(dk.x[m][n][i], Accum(params.scores.scale), Accum(0));  // never -0
  if constexpr (kHasDropout) {
#pragma unroll
    for (int m = 0; m < kKeyM; ++m)
#pragma unroll
      for (int n = 0; n < kKeyNV; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) dv.x[m][n][i] *= Accum(params.scores.keep_scale);
  }
  GradElement* dk_gmem = attn::rows<GradElement>(params.dk, seq, seq.k_begin, work.head, key_begin + kv_row) + dk_col;
  GradElement* dv_gmem = attn::rows<GradElement>(params.dv, seq, seq.k_begin, work.head, key_begin + kv_row) + dv_col;
  warp::store_global<GradElement, kCopyBytes, kAccumulate>(dk_gmem, params.dk.stride_n, rows, problem.head_dim - dk_col, dk);
  warp::store_global<GradElement, kCopyBytes, kAccumulate>(dv_gmem, params.dv.stride_n, rows, problem.head_dim_v - dv_col, dv);
}
