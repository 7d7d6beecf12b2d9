// dbias, for every GPU since sm_80: one tile of the gradient per block, summed over bias's broadcast axes in a fixed order.
//
//   dbias = sum of dx over the batches, heads, queries and keys that share an element;   dx = p (keep / (1 - p_drop) dp - D)
//
// A block walks all (batch, head, query tile, key tile) that fall into its tile: along an axis that bias has, just its own place.
// It recomputes s and dp there: 2 matrix products of small tiles, no atomics.
// Tiles     q, dout, k, v, one stage; the dx sum stays in registers, the warps share its columns. Sums along a broadcast query or key
//           axis end with a reduction of the tile through shared memory, in order.
#include "attn/gradient.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/load.cuh"
#include "tile/matmul.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
constexpr int kM = kQueryTile / 16;
constexpr int kN = kKeyTile / kWarps / 8;
using Accum = AccumOf<Element>::Type;
using Stats = attn::RowStats<Accum>;
static_assert(kKeyTile == kWarps * kN * 8 && kQueryTile == kM * 16);
static_assert(attn::kRowPad % kQueryTile == 0, "workspaces are padded to whole tiles");

struct Smem {
  tile::Shared<Element, kQueryTile, kHeadDim> q;
  tile::Shared<Element, kQueryTile, kHeadDimV> dout;
  tile::Shared<Element, kKeyTile, kHeadDim> k;
  tile::Shared<Element, kKeyTile, kHeadDimV> v;
  alignas(128) Stats stats[kQueryTile];
  alignas(128) Accum dx[kQueryTile * kKeyTile];
};
static_assert(sizeof(Smem) == kSmemBytes, "host arithmetic has drifted");

using Switches = attn::Switches<Accum, BiasElement, kIsMasked, kHasSoftcap, kHasAlibi, kHasBias, kIsScaleNegative, kIsHalf<Element>>;
using warp::Major;

// The indices [begin, end) of an axis that fall into place `place` of the gradient: its own one, or all of them.
__device__ __forceinline__ attn::Range share(int place, int extent, int all) {
  return extent == 1 ? attn::Range{0, all} : attn::Range{place, place + 1};
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) bwd_dbias_generic(const __grid_constant__ cf::BwdBiasParams params) {
  using namespace cf;
  ptx::let_next_start();
  ptx::await_previous();
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const Problem& problem = params.problem;
  const int tiles_q = ceil_div(problem.len_q, kQueryTile), tiles_k = ceil_div(problem.len_k, kKeyTile);
  const int places_k = params.dbias_len_k == 1 ? 1 : tiles_k, places_q = params.dbias_len_q == 1 ? 1 : tiles_q;
  int place = blockIdx.x;
  const int place_k = place % places_k;
  place /= places_k;
  const int place_q = place % places_q;
  place /= places_q;
  const int place_h = place % params.dbias_heads, place_b = place / params.dbias_heads;
  const attn::Range batches = share(place_b, params.dbias_batch, problem.batch);
  const attn::Range heads = share(place_h, params.dbias_heads, problem.heads_q);
  const attn::Range query_tiles = share(place_q, params.dbias_len_q, tiles_q);
  const attn::Range key_tiles = share(place_k, params.dbias_len_k, tiles_k);

  const int column = threadIdx.x / kWarpSize * kN * 8;
  warp::Fragment<kM, kN, Accum> sum;
  sum.zero();
  for (int batch = batches.begin; batch < batches.end; ++batch) {
    attn::Sequence seq = attn::dense_sequence(problem, batch);
    attn::set_live(problem, seq);
    for (int head = heads.begin; head < heads.end; ++head) {
      const attn::ScoreMap<Switches> scores(attn::Band<kIsMasked>(problem, seq), params.scores, seq, head);
      const int kv_head = head / (problem.heads_q / problem.heads_kv);
      for (int query_tile = query_tiles.begin; query_tile < query_tiles.end; ++query_tile) {
        const int query = query_tile * kQueryTile, query_end = min_of(query + kQueryTile, seq.len_q);
        const attn::Range keys = scores.band.keys_of(query, query_end);
        for (int key_tile = key_tiles.begin; key_tile < key_tiles.end; ++key_tile) {
          const int key = key_tile * kKeyTile;
          if (keys.begin >= key + kKeyTile || keys.end <= key) continue;
          __syncthreads();  // everyone is done with the tiles before
          cta::load_rows<kThreads, kCopyBytes>(smem.q, attn::rows<Element>(params.q, seq, 0, head, query), params.q.stride_n, 0,
                                               query_end - query, problem.head_dim);
          cta::load_rows<kThreads, kCopyBytes>(smem.dout, attn::rows<Element>(params.dout, seq, 0, head, query),
                                               params.dout.stride_n, 0, query_end - query, problem.head_dim_v);
          cta::load_rows<kThreads, kCopyBytes>(smem.k, attn::rows<Element>(params.k, seq, 0, kv_head, key), params.k.stride_n,
                                               keys.begin - key, keys.end - key, problem.head_dim);
          cta::load_rows<kThreads, kCopyBytes>(smem.v, attn::rows<Element>(params.v, seq, 0, kv_head, key), params.v.stride_n,
                                               keys.begin - key, keys.end - key, problem.head_dim_v);
          const Stats* stats = static_cast<const Stats*>(params.stats) + head * attn::padded_rows(problem) +
                               attn::padded_begin(problem, seq) + query;
          for (int row = threadIdx.x; row < kQueryTile; row += kThreads) smem.stats[row] = stats[row];
          ptx::cp_async_commit();
          ptx::cp_async_wait<0>();
          __syncthreads();

          warp::Fragment<kM, kN, Accum> s, dp;
          s.zero();
          warp::matmul<Major::K, Major::K, kHeadDim>(s, smem.q, 0, smem.k, column);
          scores.apply(s, query, key + column, static_cast<decltype(&s)>(nullptr));
          attn::probabilities(s, smem.stats, Accum(params.scores.fold));
          if constexpr (kHasDropout) attn::mark_dropped(s, attn::Dropout(params.scores, problem, seq, head), query, key + column);
          dp.zero();
          warp::matmul<Major::K, Major::K, kHeadDimV>(dp, smem.dout, 0, smem.v, column);
          attn::score_gradient<kHasDropout>(dp, s, smem.stats, Accum(params.scores.keep_scale), false);
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int n = 0; n < kN; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i)  // an empty row's q may be a NaN: selected by its LSE
                sum.x[m][n][i] += smem.stats[16 * m + warp::fragment_row(i)].lse == kInfinity ? Accum(0) : dp.x[m][n][i];
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        smem.dx[(16 * m + warp::fragment_row(i)) * kKeyTile + column + 8 * n + warp::fragment_col(i)] = sum.x[m][n][i];
  __syncthreads();
  const int rows = params.dbias_len_q == 1 ? 1 : min_of(kQueryTile, problem.len_q - place_q * kQueryTile);
  const int cols = params.dbias_len_k == 1 ? 1 : min_of(kKeyTile, problem.len_k - place_k * kKeyTile);
  const int sum_rows = params.dbias_len_q == 1 ? kQueryTile : 1, sum_cols = params.dbias_len_k == 1 ? kKeyTile : 1;
  for (int i = threadIdx.x; i < rows * cols; i += kThreads) {
    const int row = i / cols, col = i % cols;
    Accum total = 0;
    for (int r = row; r < row + sum_rows; ++r)
      for (int c = col; c < col + sum_cols; ++c) total += smem.dx[r * kKeyTile + c];
    GradElement& dbias = static_cast<GradElement*>(params.dbias)[
        place_b * params.dbias_stride_b + place_h * params.dbias_stride_h + (place_q * kQueryTile + row) * params.dbias_stride_q +
        (place_k * kKeyTile + col) * params.dbias_stride_k];
    dbias = convert<GradElement>(kAccumulate ? total + convert<Accum>(dbias) : total);
  }
}
