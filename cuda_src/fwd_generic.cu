// The forward for every GPU since sm_80: out = softmax(x) v and the natural-log LSE, one query tile of one head per block.
//
//   for each key tile:   s = q k^T   x = score(s)   m, p, l = online softmax(x)   out = out exp(m_old - m) + p v
//   at the end:          out / l,    lse = m + log(l)
//
// Tiles     q [kQueryTile, kHeadDim], k [kKeyTile, kHeadDim], v [kKeyTile, kHeadDimV]; a warp owns kQueryTile / kWarps query rows
//           for all keys, so no softmax statistic leaves the warp.
// Shared    q for the whole block; k and v are the two stages of one cp.async pipeline: v(j) arrives while s(j) is multiplied,
//           k(j - 1) while p(j) v(j) is. For double, p passes through shared memory, each warp its own rows.
// Registers s and out fragments of a warp: kQueryTile / kWarps x (kKeyTile + kHeadDimV) / 32 numbers a lane.
// Order     key tiles from the last to the first, so that a causal block meets its diagonal first; sums are in a fixed order.
// Switches  kIsSplit: a block has some of the keys, and its result is one of several that fwd_combine merges, or with one split the call's.
//           kPacksHeads: a row is (query, head), all heads of a KV head side by side, so that few queries fill a tile. kIsPaged: keys lie
//           in pages.
#include "attn/dropout.cuh"
#include "attn/pages.cuh"
#include "attn/scores.cuh"
#include "attn/softmax.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/load.cuh"
#include "tile/matmul.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
constexpr int kWarpRows = kQueryTile / kWarps;
constexpr int kM = kWarpRows / 16;
static_assert(kQueryTile == kWarps * kM * 16, "a warp owns whole 16-row tiles");
static_assert(kKeyTile % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0);
static_assert(!kPacksHeads || kIsSplit, "packed rows leave one by one, or as partial results");
static_assert(!kPacksHeads || !(kHasAlibi || kHasBias || kHasDropout), "what depends on the head is not packed");

struct Smem : warp::Passage<Element, kQueryTile, kKeyTile>, attn::PageRows<kIsPaged, kKeyTile> {  // of p
  tile::Shared<Element, kQueryTile, kHeadDim> q;
  tile::Shared<Element, kKeyTile, kHeadDim> k;
  tile::Shared<Element, kKeyTile, kHeadDimV> v;
};
static_assert(sizeof(Smem) == kSmemBytes, "host arithmetic has drifted");

using Accum = AccumOf<Element>::Type;
using Result = ChooseOf<kIsSplit, Accum, OutElement>::Type;  // what `out` is written in
using Switches = attn::Switches<Accum, BiasElement, kIsMasked, kHasSoftcap, kHasAlibi, kHasBias, kIsScaleNegative, kIsHalf<Element>>;
using Band = ChooseOf<kPacksHeads, attn::PackedBand<kIsMasked>, attn::Band<kIsMasked>>::Type;
using SFragment = warp::Fragment<kM, kKeyTile / 8, Accum>;
using OutFragment = warp::Fragment<kM, kHeadDimV / 8, Accum>;

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads, cf::kBlocksPerSm)
fwd_generic(const __grid_constant__ cf::FwdParams params) {
  using namespace cf;
  const bool is_alone = kIsSplit && params.num_splits == 1;
  if constexpr (kIsSplit) {
    if (!is_alone) ptx::let_next_start();
    ptx::await_previous();
  }
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const Problem& problem = params.problem;

  // The longest rows of a causal problem first: the last tile of a head starts before the first.
  int block = kIsMasked ? gridDim.x - 1 - blockIdx.x : blockIdx.x, split = 0;
  if constexpr (kIsSplit) {  // the heads of the same keys side by side: they lie so in memory
    const int heads = kPacksHeads ? problem.heads_kv : problem.heads_q, place = blockIdx.x / heads / params.num_splits;
    split = blockIdx.x / heads % params.num_splits;
    block = (place / problem.tiles_q * heads + blockIdx.x % heads) * problem.tiles_q + place % problem.tiles_q;
  }
  const attn::Work work = attn::find_work<true, kQueryTile, kPacksHeads>(problem, block);
  if (work.tile < 0) return;
  const attn::Sequence seq = work.sequence;
  const int head = work.head, group = problem.heads_q / problem.heads_kv, rows_per_query = kPacksHeads ? group : 1;
  const int kv_head = kPacksHeads ? head : head / group;
  const int query_begin = work.tile * kQueryTile;  // here and below a row's number, where heads are packed
  const int query_end = min_of(query_begin + kQueryTile, seq.len_q * rows_per_query);
  if (query_begin >= query_end) return;

  attn::ScoreMap<Switches, Band> scores(Band(problem, seq), params.scores, seq, head);
  int split_begin = 0;
  if constexpr (kIsSplit) {
    const int part = params.split_len ? params.split_len : ceil_div(ceil_div(seq.len_k, params.num_splits), kKeyTile) * kKeyTile;
    split_begin = static_cast<int>(min_of<int64>(static_cast<int64>(split) * part, seq.len_k));
    scores.band.end_at(split_begin + min_of(part, seq.len_k - split_begin));
    scores.bias.has_pairs &= split_begin % 2 == 0;
  }
  attn::Range keys = scores.band.keys_of(query_begin, query_end);
  keys.begin = max_of(keys.begin, split_begin);
  const int first_tile = (keys.begin - split_begin) / kKeyTile;
  const int end_tile = keys.begin < keys.end ? ceil_div(keys.end - split_begin, kKeyTile) : first_tile;
  const int last_key = split_begin + (end_tile - 1) * kKeyTile;  // where the first tile to be loaded begins
  cta::RowLoader<kThreads, kCopyBytes, decltype(smem.k)> k_loader(
      attn::rows<Element>(params.k, seq, seq.k_begin, kv_head, last_key), params.k.stride_n, problem.head_dim);
  cta::RowLoader<kThreads, kCopyBytes, decltype(smem.v)> v_loader(
      attn::rows<Element>(params.v, seq, seq.k_begin, kv_head, last_key), params.v.stride_n, problem.head_dim_v);
  attn::PageFinder<kIsPaged, kThreads, kKeyTile> pages(params, seq, keys);
  // Keys outside the tile's visible range are not even read: a NaN there can reach no row of this block.
  const auto load_k = [&](int tile) {
    const int key = split_begin + tile * kKeyTile;
    if constexpr (kIsPaged) {
      attn::load_pages<kThreads, kCopyBytes, &attn::PageRow::k>(smem.k, smem, tile, params.k, kv_head, problem.head_dim);
    } else {
      k_loader.load(smem.k, keys.begin - key, keys.end - key);
      k_loader.advance(-kKeyTile);
    }
  };
  const auto load_v = [&](int tile) {
    const int key = split_begin + tile * kKeyTile;
    if constexpr (kIsPaged) {
      attn::load_pages<kThreads, kCopyBytes, &attn::PageRow::v>(smem.v, smem, tile, params.v, kv_head, problem.head_dim_v);
    } else {
      v_loader.load(smem.v, keys.begin - key, keys.end - key);
      v_loader.advance(-kKeyTile);
    }
  };

  const int warp_row = threadIdx.x / kWarpSize * kWarpRows;
  OutFragment out;
  out.zero();
  attn::Softmax<kM, Accum, !kIsHalf<Element>> softmax;
  const Accum fold = params.scores.fold;

  if (first_tile < end_tile) {
    if constexpr (!kPacksHeads) {
      const Element* q_gmem = attn::rows<Element>(params.q, seq, seq.q_begin, head, query_begin);
      cta::load_rows<kThreads, kCopyBytes>(smem.q, q_gmem, params.q.stride_n, 0, query_end - query_begin, problem.head_dim);
    }
    pages.find(last_key);
    pages.publish(smem, end_tile - 1);
    if constexpr (kIsPaged) __syncthreads();
    load_k(end_tile - 1);
    if constexpr (kPacksHeads) {  // keys are on their way while it is found out where the rows of q are
      cta::gather_rows<kThreads, kCopyBytes>(smem.q, query_end - query_begin, problem.head_dim, [&](int row) {
        return attn::rows<Element>(params.q, seq, seq.q_begin, head * group + (query_begin + row) % group, (query_begin + row) / group);
      });
    }
    ptx::cp_async_commit();
  }
  for (int tile = end_tile - 1; tile >= first_tile; --tile) {
    const int key = split_begin + tile * kKeyTile;
    if constexpr (kIsSplit) {  // memory is what is waited for: k(tile) need not be there before v(tile) is asked for
      __syncthreads();  // everyone is done with v(tile + 1)
      load_v(tile);
      ptx::cp_async_commit();
      ptx::cp_async_wait<1>();
      __syncthreads();  // k(tile) is there for everyone
    } else {
      ptx::cp_async_wait<0>();
      __syncthreads();  // k(tile) is there for everyone, and everyone is done with v(tile + 1)
      load_v(tile);
      ptx::cp_async_commit();
    }
    pages.find(key - kKeyTile);  // on its way during the product

    SFragment s;
    s.zero();
    warp::matmul<warp::Major::K, warp::Major::K, kHeadDim>(s, smem.q, warp_row, smem.k, 0);

    pages.publish(smem, tile - 1);
    ptx::cp_async_wait<0>();
    __syncthreads();  // v(tile) is there, and everyone is done with k(tile)
    if (tile > first_tile) {
      load_k(tile - 1);
      ptx::cp_async_commit();
    }

    const int query = query_begin + warp_row;
    scores.apply(s, query, key, static_cast<SFragment*>(nullptr));
    if constexpr (kIsPaged) attn::hide_dead(s, smem, tile);
    softmax.update(s, out, fold);
    if constexpr (kHasDropout) {  // the LSE is of the undropped row
      const attn::Dropout dropout(params.scores, problem, seq, head);
      const auto drop = [&](int m, int n, int i, bool is_kept) { s.x[m][n][i] = is_kept ? s.x[m][n][i] : Accum(0); };
      dropout.for_each<kM, kKeyTile / 8>(query, key, drop);
    }
    warp::matmul(out, s, smem, warp_row, smem.v);
  }

  // No sooner, or blocks of the next call would take what this one's leave on some multiprocessors, and all of them end up unevenly laden.
  if (is_alone) ptx::let_next_start();
  const int rows = query_end - query_begin - warp_row;
  const bool has_sink = params.scores.sink && !seq.is_slack && split == 0;
  const Accum unit = params.scores.fold * kLn2;
  const Accum* const sinks = static_cast<const Accum*>(params.scores.sink) + head * rows_per_query;
  Accum* const lse = static_cast<Accum*>(params.lse.data) + split * params.lse_stride_split + seq.batch * params.lse.stride_b +
                     head * params.lse.stride_h + seq.q_begin * rows_per_query + query_begin + warp_row;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (kPacksHeads && 16 * m + 8 * half >= rows) continue;  // few of a tile's rows are any
      Accum factor;
      const int row = 16 * m + warp::fragment_row(2 * half);
      const Accum sink = has_sink ? sinks[kPacksHeads ? (query_begin + warp_row + row) % group : 0] : Accum(0);
      const Accum row_lse = softmax.finish(m, half, unit, has_sink, sink, factor);
      const bool is_empty = factor == 0;  // selected, not multiplied: zero even where v holds a NaN
      if constexpr (kHasDropout) factor *= Accum(params.scores.keep_scale);
#pragma unroll
      for (int n = 0; n < kHeadDimV / 8; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) out.x[m][n][i] = is_empty ? Accum(0) : out.x[m][n][i] * factor;
      if (row >= rows) continue;
      if (!is_alone) {
        if (warp::lane() % 4 == 0) lse[row] = row_lse;
        if constexpr (kPacksHeads) {
          Result* const dst = attn::rows<Result>(params.out, seq, seq.q_begin * rows_per_query, head, query_begin + warp_row + row);
          warp::store_row<kCopyBytes>(dst + split * params.out_stride_split, problem.head_dim_v, out, m, half);
        }
      } else {  // each row to where its query and head are
        const int number = query_begin + warp_row + row, query = number / rows_per_query;
        const int query_head = head * rows_per_query + number % rows_per_query;
        if (warp::lane() % 4 == 0) *attn::rows<Accum>(params.lse, seq, seq.q_begin, query_head, query) = row_lse;
        OutElement* const dst = attn::rows<OutElement>(params.out, seq, seq.q_begin, query_head, query);
        warp::store_row<kCopyBytes>(dst, problem.head_dim_v, out, m, half);
      }
    }
  if constexpr (!kPacksHeads) {
    if (is_alone) return;
    Result* const out_gmem = attn::rows<Result>(params.out, seq, seq.q_begin, head, query_begin + warp_row) + split * params.out_stride_split;
    warp::store_global<Result, kCopyBytes, false>(out_gmem, params.out.stride_n, rows, problem.head_dim_v, out);
  }
}
