// The backward of one key tile on Hopper, by wgmma and the copy engine: what a block does, what it loads, and its products, of scores that
// are made transposed: keys in rows, queries in columns. Shared by the kernels that make dk and dv, whose constants these functions use.
//
// Threads   a warpgroup of producers: thread 0 loads, warp 1 prepares statistics; behind it two of consumers, and what else a kernel has.
// Barriers  full: the loader's arrival and its bytes, or all of the statistician's lanes. empty of dout: one arrival a consumer; of q: one
//           of each consumers' thread, which speaks for the statistics that it has read too.
#pragma once
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
constexpr int kThreads = kWarps * kWarpSize;
static_assert(kHeadDim % kPanel == 0 && kHeadDimV % kPanel == 0);
static_assert(kStages > 1, "the next tile is asked for before this one is done with");
static_assert(attn::kRowPad % kQueryTile == 0, "workspaces are padded to whole tiles");
constexpr int kPanels = kHeadDim / kPanel, kPanelsV = kHeadDimV / kPanel;
constexpr int kKeyPanelBytes = kKeyTile * kPanel * 2, kQueryPanelBytes = kQueryTile * kPanel * 2;

struct alignas(16) Statistics {
  float lse[kQueryTile], minus_delta[kQueryTile];  // (+inf, 0): the row takes no part
  bool has_coarse;                                 // an lse beyond kLargeExponent
  float slope;                                     // of the tile's head, for ALiBi, whose part of a column is in lse
};
using Exponents = attn::Exponents<kHasSoftcap, kHasAlibi, kHasBias, kIsScaleNegative>;

// The query tiles of some heads.
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
  __device__ __forceinline__ bool is_last(int head, int query) const { return head + 1 >= head_end && query + kQueryTile >= query_end; }
};

// What a block does: a key tile of a KV head, and the query tiles that see it.
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

// What every kernel's Smem has beside its own.
struct Tiles {
  warpgroup::Panels<Element, kPanels, kKeyTile> k;
  warpgroup::Panels<Element, kPanelsV, kKeyTile> v;
  warpgroup::Panels<Element, kPanels, kQueryTile> q[kStages];
  warpgroup::Panels<Element, kPanelsV, kQueryTile> dout[kStages];
};
struct Control {
  Statistics statistics[kStages];
  Job job;
  ptx::Barrier k_full, v_full, q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages], statistics_full[kStages];
};
constexpr int kQueryBytes = sizeof(Tiles::q) / kStages, kDoutBytes = sizeof(Tiles::dout) / kStages;

using ScoreFragment = warp::Fragment<1, kQueryTile / 8>;  // of keys x queries
using Packed = uint32[kQueryTile / 16][4];                // the same as an operand

// By one thread.
__device__ __forceinline__ void prepare_block(Control& control, const Problem& problem, const attn::Work& work) {
  ptx::mbarrier_init(control.k_full, 1);
  ptx::mbarrier_init(control.v_full, 1);
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    ptx::mbarrier_init(control.q_full[stage], 1);
    ptx::mbarrier_init(control.dout_full[stage], 1);
    ptx::mbarrier_init(control.statistics_full[stage], kWarpSize);
    ptx::mbarrier_init(control.q_empty[stage], kConsumerThreads);
    ptx::mbarrier_init(control.dout_empty[stage], kConsumers);
  }
  ptx::mbarrier_init_fence();
  control.job = Job(problem, work);
}

// By one thread.
__device__ __forceinline__ void load(Tiles& tiles, Control& control, const BwdSm90Params& params) {
  const Job& job = control.job;
  const attn::Sequence& seq = job.sequence;
  const int key = seq.k_begin + job.key_begin;
  warpgroup::load(tiles.k, params.k, control.k_full, key, job.kv_head, seq.batch);
  warpgroup::load(tiles.v, params.v, control.v_full, key, job.kv_head, seq.batch);
  Ring<kStages> ring;
  job.walk.for_each([&](int head, int query) {
    ptx::mbarrier_wait(control.q_empty[ring.stage], ring.parity ^ 1);
    warpgroup::load(tiles.q[ring.stage], params.q, control.q_full[ring.stage], seq.q_begin + query, head, seq.batch);
    ptx::mbarrier_wait(control.dout_empty[ring.stage], ring.parity ^ 1);
    warpgroup::load(tiles.dout[ring.stage], params.dout, control.dout_full[ring.stage], seq.q_begin + query, head, seq.batch);
    ring.advance();
  });
}

// Rows for which is_zeroed holds, by kByThreads threads of which this is the thread-th.
template <int kByThreads, int kTilePanels, int kTileRows, class Predicate>
__device__ __forceinline__ void zero_rows(warpgroup::Panels<Element, kTilePanels, kTileRows>& tile, int thread, Predicate is_zeroed) {
  constexpr int kChunk = 16 / sizeof(Element), kChunks = kPanel / kChunk;
  for (int i = thread; i < kTilePanels * kTileRows * kChunks; i += kByThreads) {
    const int row = i / kChunks % kTileRows;
    if (is_zeroed(row)) *reinterpret_cast<uint4*>(&tile[i / kChunks / kTileRows][row][i % kChunks * kChunk]) = uint4{0, 0, 0, 0};
  }
}

// By a whole warp. Rows that see none of these keys take no part, whatever they hold: were their q or dout a NaN, 0 times it would reach
// dk or dv, so they are zeroed before the consumers hear of the tile.
__device__ __forceinline__ void prepare_statistics(Tiles& tiles, Control& control, const BwdSm90Params& params) {
  using Pair = attn::RowStats<float>;
  const Job& job = control.job;
  const int64 rows = attn::padded_rows(params.problem), begin = attn::padded_begin(params.problem, job.sequence);
  Ring<kStages> ring;
  job.walk.for_each([&](int head, int query) {
    const Pair* pairs = static_cast<const Pair*>(params.stats) + head * rows + begin + query;
    const float slope = Exponents::slope(params.scores, job.sequence, head);
    Statistics& statistics = control.statistics[ring.stage];
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
    ptx::mbarrier_wait(control.q_empty[ring.stage], ring.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kQueryTile / kWarpSize; ++i) {
      const int row = i * kWarpSize + warp::lane();
      statistics.lse[row] = mine[i].lse + Exponents::column_part(slope, row);
      statistics.minus_delta[row] = -mine[i].delta;
    }
    is_absent = __any_sync(kFullWarp, is_absent);
    is_coarse = __any_sync(kFullWarp, is_coarse);
    if (warp::lane() == 0) {
      statistics.has_coarse = is_coarse;
      statistics.slope = slope;
    }
    if (is_absent) {
      __syncwarp();  // lse is read across lanes
      const auto is_zeroed = [&](int row) { return statistics.lse[row] == kInfinity; };
      ptx::mbarrier_wait(control.q_full[ring.stage], ring.parity);
      zero_rows<kWarpSize>(tiles.q[ring.stage], warp::lane(), is_zeroed);
      ptx::mbarrier_wait(control.dout_full[ring.stage], ring.parity);
      zero_rows<kWarpSize>(tiles.dout[ring.stage], warp::lane(), is_zeroed);
      ptx::fence_async_proxy();
    }
    ptx::mbarrier_arrive(control.statistics_full[ring.stage]);
    ring.advance();
  });
}

// By the producers' warpgroup, of which two warps are left.
__device__ __forceinline__ void produce(Tiles& tiles, Control& control, const BwdSm90Params& params) {
  const int role = threadIdx.x / kWarpSize;
  if (control.job.is_idle()) return;
  if (role == 0 && warp::lane() == 0) load(tiles, control, params);
  if (role == 1) prepare_statistics(tiles, control, params);
}

// d = a b^T, or d += a b^T, over kDim columns, a's 64 rows of a tile of kKeyTile and b a tile of kQueryTile.
template <int kDim, bool kAdds>
__device__ __forceinline__ void multiply_scores(ScoreFragment& d, uint64 a, uint64 b) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const int panel = step / 4, inside = step % 4 * 32;
    ptx::Wgmma<Element, kQueryTile>::template shared<false>(registers(d), ptx::advance(a, panel * kKeyPanelBytes + inside),
                                                            ptx::advance(b, panel * kQueryPanelBytes + inside), kAdds || step > 0);
  }
}
// What a lane needs of numbers that belong to queries, its first column's first. Read at once, whatever comes between this and their use.
struct Columns {
  float pair[kQueryTile / 8][2];
  __device__ __forceinline__ explicit Columns(const float* numbers) {
#pragma unroll
    for (int n = 0; n < kQueryTile / 8; ++n)
      ptx::load_shared(pair[n][0], pair[n][1], ptx::shared_address(numbers + warp::fragment_col(0) + 8 * n));
  }
};
// What dp - D of 16 queries is summed onto: so no subtraction stands beside the products.
__device__ __forceinline__ void begin_with(ScoreFragment& dp, int step, const float* minus_delta) {
#pragma unroll
  for (int n = 2 * step; n < 2 * step + 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      ptx::load_shared(dp.x[0][n][i], dp.x[0][n][i + 1], ptx::shared_address(minus_delta + warp::fragment_col(0) + 8 * n));
}
// d += a b over the queries, b a tile of kDim columns.
template <int kDim>
__device__ __forceinline__ void multiply_queries(warp::Fragment<1, kDim / 8>& d, const Packed& a, uint64 b) {
#pragma unroll
  for (int step = 0; step < kQueryTile / 16; ++step)
    ptx::Wgmma<Element, kDim>::template registers<true>(registers(d), a[step], ptx::advance(b, step * 16 * kPanel * 2), true);
}

template <int kN>
__device__ __forceinline__ void scale(warp::Fragment<1, kN>& x, float factor) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x.x[0][n][i] = ptx::fma(x.x[0][n][i], factor, 0.0f);  // never -0
}
// 64 rows of dk or dv; keys past the live ones get their zeros too. `key`: of the warp's first row.
template <int kN>
__device__ __forceinline__ void store_gradient(const Tensor& tensor, const Job& job, int key, int cols, const warp::Fragment<1, kN>& x) {
  GradElement* const rows = attn::rows<GradElement>(tensor, job.sequence, job.sequence.k_begin, job.kv_head, key);
  warp::store_global<GradElement, kCopyBytes, kAccumulate>(rows, tensor.stride_n, job.sequence.all_k - key, cols, x);
}

}  // namespace cf
