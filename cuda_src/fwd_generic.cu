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
// Groups    kKeyGroups > 1: so many groups of kWarps warps do all of this apart, each with tiles of its own, and take the block's key tiles
//           in turn. What they have found meets in shared memory, where every warp joins some rows of all groups.
// Switches  kIsSplit: a block has some of the keys, and its result is one of several that fwd_combine merges, or with one split the call's.
//           kPacksHeads: a row is (query, head), all heads of a KV head side by side, so that few queries fill a tile. kIsPaged: keys lie
//           in pages.
#include "attn/dropout.cuh"
#include "attn/found.cuh"
#include "attn/pages.cuh"
#include "attn/scores.cuh"
#include "attn/softmax.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/group.cuh"
#include "tile/load.cuh"
#include "tile/matmul.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
constexpr int kWarpRows = kQueryTile / kWarps;
constexpr int kM = kWarpRows / 16;
constexpr int kKeyStep = kKeyGroups * kKeyTile;
// What rows of partial results are aligned to, and rows of out, which may be of a narrower type than what is copied.
constexpr int kPartialBytes = 16, kOutBytes = kCopyBytes == 16 ? 16 : sizeof(OutElement);
static_assert(kQueryTile == kWarps * kM * 16, "a warp owns whole 16-row tiles");
static_assert(kKeyTile % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0);
static_assert(kKeyGroups == 1 || kIsSplit, "keys are divided among groups as among blocks");
static_assert(!kPacksHeads || kIsSplit, "packed rows leave one by one, or as partial results");
static_assert(!kPacksHeads || !(kHasAlibi || kHasBias || kHasDropout), "what depends on the head is not packed");

struct Smem : warp::Passage<Element, kQueryTile, kKeyTile>, attn::PageRows<kIsPaged, kKeyTile> {  // of p
  tile::Shared<Element, kQueryTile, kHeadDim> q;
  tile::Shared<Element, kKeyTile, kHeadDim> k;
  tile::Shared<Element, kKeyTile, kHeadDimV> v;
};
static_assert(kKeyGroups * sizeof(Smem) == kSmemBytes, "host arithmetic has drifted");

using Accum = AccumOf<Element>::Type;
using Result = ChooseOf<kIsSplit, Accum, OutElement>::Type;  // what `out` is written in
using Switches = attn::Switches<Accum, BiasElement, kIsMasked, kHasSoftcap, kHasAlibi, kHasBias, kIsScaleNegative, kIsHalf<Element>>;
using Band = ChooseOf<kPacksHeads, attn::PackedBand<kIsMasked>, attn::Band<kIsMasked>>::Type;
using SFragment = warp::Fragment<kM, kKeyTile / 8, Accum>;
using OutFragment = warp::Fragment<kM, kHeadDimV / 8, Accum>;
using Softmax = attn::Softmax<kM, Accum, !kIsHalf<Element>>;
using Found = attn::Found<kQueryTile, kHeadDimV, Accum>;  // of a group, in place of its tiles when they are done with
static_assert(kKeyGroups == 1 || sizeof(Found) <= sizeof(Smem));

__device__ __forceinline__ void sync_group() { cta::sync_group<kThreads, kKeyGroups>(); }

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads * cf::kKeyGroups, cf::kBlocksPerSm)
fwd_generic(const __grid_constant__ cf::FwdParams params) {
  using namespace cf;
  const bool is_alone = kIsSplit && params.num_splits == 1;
  const Problem& problem = params.problem;
  if (kIsSplit && !is_alone) ptx::let_next_start();
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  const int key_group = kKeyGroups > 1 ? threadIdx.y : 0;
  Smem& smem = reinterpret_cast<Smem*>(smem_bytes)[key_group];

  int split = 0;
  attn::Work work;
  if constexpr (kIsSplit) {  // the heads of the same keys side by side: they lie so in memory
    const uint32 heads = kPacksHeads ? problem.heads_kv : problem.heads_q, splits = params.num_splits, tiles = problem.tiles_q;
    const uint32 of_head = blockIdx.x / heads, of_split = of_head / splits, index = of_split / tiles;
    split = of_head - of_split * splits;
    const attn::Place place{static_cast<int>(index), static_cast<int>(blockIdx.x - of_head * heads), static_cast<int>(of_split - index * tiles)};
    if (kHasAlibi || attn::are_lengths_in_memory(problem)) ptx::await_previous();  // else what there is to do is found out meanwhile
    work = attn::find_work<true, kQueryTile, kPacksHeads>(problem, place);
  } else {  // the longest rows of a causal problem first: the last tile of a head starts before the first
    const int block = kIsMasked ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    work = attn::find_work<true, kQueryTile>(problem, block);
  }
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
  const int last_tile = end_tile - 1 - key_group;           // of this group, which takes every kKeyGroups-th
  const int last_key = split_begin + last_tile * kKeyTile;  // where the first tile to be loaded begins
  cta::RowLoader<kThreads, kCopyBytes, decltype(smem.k)> k_loader(
      attn::rows<Element>(params.k, seq, seq.k_begin, kv_head, last_key), params.k.stride_n, problem.head_dim);
  cta::RowLoader<kThreads, kCopyBytes, decltype(smem.v)> v_loader(
      attn::rows<Element>(params.v, seq, seq.k_begin, kv_head, last_key), params.v.stride_n, problem.head_dim_v);
  const auto number_of = [](int tile) { return (tile + kKeyGroups) / kKeyGroups; };  // among its group's; 0 is behind the last
  attn::PageFinder<kIsPaged, kThreads, kKeyTile> pages(params, seq, keys);
  // Keys outside the tile's visible range are not even read: a NaN there can reach no row of this block.
  const auto load_k = [&](int tile) {
    const int key = split_begin + tile * kKeyTile;
    if constexpr (kIsPaged) {
      attn::load_pages<kThreads, kCopyBytes, &attn::PageRow::k>(smem.k, smem, number_of(tile), params.k, kv_head, problem.head_dim);
    } else {
      k_loader.load(smem.k, keys.begin - key, keys.end - key);
      k_loader.advance(-kKeyStep);
    }
  };
  const auto load_v = [&](int tile) {
    const int key = split_begin + tile * kKeyTile;
    if constexpr (kIsPaged) {
      attn::load_pages<kThreads, kCopyBytes, &attn::PageRow::v>(smem.v, smem, number_of(tile), params.v, kv_head, problem.head_dim_v);
    } else {
      v_loader.load(smem.v, keys.begin - key, keys.end - key);
      v_loader.advance(-kKeyStep);
    }
  };

  const int warp_row = threadIdx.x / kWarpSize * kWarpRows;
  OutFragment out;
  out.zero();
  Softmax softmax;
  const Accum fold = params.scores.fold;

  if constexpr (kIsSplit) ptx::await_previous();
  if (first_tile <= last_tile) {
    if constexpr (!kPacksHeads) {
      const Element* q_gmem = attn::rows<Element>(params.q, seq, seq.q_begin, head, query_begin);
      cta::load_rows<kThreads, kCopyBytes>(smem.q, q_gmem, params.q.stride_n, 0, query_end - query_begin, problem.head_dim);
    }
    pages.find(last_key);
    pages.publish(smem, number_of(last_tile));
    if constexpr (kIsPaged) sync_group();
    load_k(last_tile);
    if constexpr (kPacksHeads) {  // keys are on their way while it is found out where the rows of q are
      cta::gather_rows<kThreads, kCopyBytes>(smem.q, query_end - query_begin, problem.head_dim, [&](int row) {
        return attn::rows<Element>(params.q, seq, seq.q_begin, head * group + (query_begin + row) % group, (query_begin + row) / group);
      });
    }
    ptx::cp_async_commit();
  }
  for (int tile = last_tile; tile >= first_tile; tile -= kKeyGroups) {
    const int key = split_begin + tile * kKeyTile;
    if constexpr (kIsSplit) {  // memory is what is waited for: k(tile) need not be there before v(tile) is asked for
      sync_group();  // everyone is done with v(tile + 1)
      load_v(tile);
      ptx::cp_async_commit();
      ptx::cp_async_wait<1>();
      sync_group();  // k(tile) is there for everyone
    } else {
      ptx::cp_async_wait<0>();
      sync_group();  // k(tile) is there for everyone, and everyone is done with v(tile + 1)
      load_v(tile);
      ptx::cp_async_commit();
    }
    pages.find(key - kKeyStep);  // on its way during the product

    SFragment s;
    s.zero();
    warp::matmul<warp::Major::K, warp::Major::K, kHeadDim>(s, smem.q, warp_row, smem.k, 0);

    pages.publish(smem, number_of(tile - kKeyGroups));
    ptx::cp_async_wait<0>();
    sync_group();  // v(tile) is there, and everyone is done with k(tile)
    if (tile - kKeyGroups >= first_tile) {
      load_k(tile - kKeyGroups);
      ptx::cp_async_commit();
    }

    const int query = query_begin + warp_row;
    scores.apply(s, query, key, static_cast<SFragment*>(nullptr));
    if constexpr (kIsPaged) attn::hide_dead(s, smem, number_of(tile));
    softmax.update(s, out, fold);
    if constexpr (kHasDropout) {  // the LSE is of the undropped row
      const attn::Dropout dropout(params.scores, problem, seq, head);
      const auto drop = [&](int m, int n, int i, bool is_kept) { s.x[m][n][i] = is_kept ? s.x[m][n][i] : Accum(0); };
      dropout.for_each<kM, kKeyTile / 8>(query, key, drop);
    }
    warp::matmul(out, s, smem, warp_row, smem.v);
  }

  // No sooner, or blocks of the next call would take what this one's leave on some multiprocessors, and all of them end up unevenly laden.
  if (kKeyGroups == 1 && is_alone) ptx::let_next_start();
  const int rows = query_end - query_begin - warp_row;  // of this warp, or fewer
  const bool has_sink = params.scores.sink && !seq.is_slack && split == 0;
  const Accum unit = params.scores.fold * kLn2;
  const Accum* const sinks = static_cast<const Accum*>(params.scores.sink) + head * rows_per_query;
  Accum* const lse = static_cast<Accum*>(params.lse.data) + split * params.lse_stride_split + seq.batch * params.lse.stride_b +
                     head * params.lse.stride_h + seq.q_begin * rows_per_query + query_begin;
  // Where a row of partial results begins, and where what is final does, as its query and head say.
  const auto partial_row = [&](int row) {
    return attn::rows<Result>(params.out, seq, seq.q_begin * rows_per_query, head, query_begin + row) + split * params.out_stride_split;
  };
  struct Place { int query, head; };
  const auto place_of = [&](int row) -> Place {
    const int number = query_begin + row;
    return {number / rows_per_query, head * rows_per_query + number % rows_per_query};
  };
  const auto final_lse = [&](Place place) { return attn::rows<Accum>(params.lse, seq, seq.q_begin, place.head, place.query); };
  const auto final_row = [&](Place place) { return attn::rows<OutElement>(params.out, seq, seq.q_begin, place.head, place.query); };

  const auto sink_of = [&](int row) { return has_sink ? sinks[kPacksHeads ? (query_begin + row) % group : 0] : Accum(0); };

  if constexpr (kKeyGroups > 1) {
    sync_group();  // its tiles are done with
    reinterpret_cast<Found*>(&smem)->put(warp_row, rows, softmax, out);
    __syncthreads();
    if (is_alone) ptx::let_next_start();
    constexpr int kBlockWarps = kKeyGroups * kWarps;
    for (int row = key_group * kWarps + threadIdx.x / kWarpSize; row < query_end - query_begin; row += kBlockWarps) {
      const attn::Joined<kKeyGroups, kQueryTile, kHeadDimV, Accum, !kIsHalf<Element>> joined(*reinterpret_cast<const Found*>(smem_bytes), sizeof(Smem), row, fold);
      Accum factor;
      const Accum row_lse = Softmax::finish(joined.sum, joined.max, unit, has_sink, sink_of(row), factor);
      if constexpr (kHasDropout) factor *= Accum(params.scores.keep_scale);
      const Place place = place_of(row);
      if (warp::lane() == 0) *(is_alone ? final_lse(place) : &lse[row]) = row_lse;
      if (is_alone) {
        joined.template store<kOutBytes>(final_row(place), problem.head_dim_v, factor);
      } else {
        joined.template store<kPartialBytes>(partial_row(row), problem.head_dim_v, factor);
      }
    }
  } else {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (kPacksHeads && 16 * m + 8 * half >= rows) continue;  // few of a tile's rows are any
        Accum factor;
        const int in_warp = 16 * m + warp::fragment_row(2 * half), row = warp_row + in_warp;
        const Accum row_lse = softmax.finish(m, half, unit, has_sink, sink_of(row), factor);
        const bool is_empty = factor == 0;  // selected, not multiplied: zero even where v holds a NaN
        if constexpr (kHasDropout) factor *= Accum(params.scores.keep_scale);
#pragma unroll
        for (int n = 0; n < kHeadDimV / 8; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) out.x[m][n][i] = is_empty ? Accum(0) : out.x[m][n][i] * factor;
        if (in_warp >= rows) continue;
        if (!is_alone) {
          if (warp::lane() % 4 == 0) lse[row] = row_lse;
          if constexpr (kPacksHeads) warp::store_row<kPartialBytes>(partial_row(row), problem.head_dim_v, out, m, half);
        } else {
          const Place place = place_of(row);
          if (warp::lane() % 4 == 0) *final_lse(place) = row_lse;
          warp::store_row<kOutBytes>(final_row(place), problem.head_dim_v, out, m, half);
        }
      }
    if constexpr (!kPacksHeads) {
      if (!is_alone) warp::store_global<Result, kIsSplit ? kPartialBytes : kOutBytes, false>(partial_row(warp_row), params.out.stride_n, rows, problem.head_dim_v, out);
    }
  }
}
