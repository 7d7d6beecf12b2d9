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
#include "attn/dropout.cuh"
#include "attn/scores.cuh"
#include "attn/softmax.cuh"
#include "tile/load.cuh"
#include "tile/matmul.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
constexpr int kWarpRows = kQueryTile / kWarps;
constexpr int kM = kWarpRows / 16;
static_assert(kQueryTile == kWarps * kM * 16, "a warp owns whole 16-row tiles");
static_assert(kKeyTile % 16 == 0 && kHeadDim % 16 == 0 && kHeadDimV % 16 == 0);

struct Smem : warp::Passage<Element, kQueryTile, kKeyTile> {  // of p
  tile::Shared<Element, kQueryTile, kHeadDim> q;
  tile::Shared<Element, kKeyTile, kHeadDim> k;
  tile::Shared<Element, kKeyTile, kHeadDimV> v;
};
static_assert(sizeof(Smem) == kSmemBytes, "host arithmetic has drifted");

using Accum = AccumOf<Element>::Type;
using Switches = attn::Switches<Accum, BiasElement, kIsMasked, kHasSoftcap, kHasAlibi, kHasBias, kIsScaleNegative, kIsHalf<Element>>;
using SFragment = warp::Fragment<kM, kKeyTile / 8, Accum>;
using OutFragment = warp::Fragment<kM, kHeadDimV / 8, Accum>;

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads, cf::kBlocksPerSm)
fwd_generic(const __grid_constant__ cf::FwdParams params) {
  using namespace cf;
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const Problem& problem = params.problem;

  // The longest rows of a causal problem first: the last tile of a head starts before the first.
  const int block = kIsMasked ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const attn::Work work = attn::find_work<true, kQueryTile>(problem, block);
  if (work.tile < 0) return;
  const attn::Sequence seq = work.sequence;
  const int head = work.head;
  const int query_begin = work.tile * kQueryTile;
  const int query_end = min_of(query_begin + kQueryTile, seq.len_q);
  if (query_begin >= query_end) return;

  const attn::ScoreMap<Switches> scores(attn::Band<kIsMasked>(problem, seq), params.scores, seq, head);
  const attn::Range keys = scores.band.keys_of(query_begin, query_end);
  const int kv_head = head / (problem.heads_q / problem.heads_kv);
  const Element* q_gmem = attn::rows<Element>(params.q, seq, seq.q_begin, head, query_begin);
  const int first_tile = keys.begin / kKeyTile;
  const int end_tile = keys.begin < keys.end ? ceil_div(keys.end, kKeyTile) : first_tile;
  const int last_key = (end_tile - 1) * kKeyTile;  // where the first tile to be loaded begins
  cta::RowLoader<kThreads, kCopyBytes, decltype(smem.k)> k_loader(
      attn::rows<Element>(params.k, seq, seq.k_begin, kv_head, last_key), params.k.stride_n, problem.head_dim);
  cta::RowLoader<kThreads, kCopyBytes, decltype(smem.v)> v_loader(
      attn::rows<Element>(params.v, seq, seq.k_begin, kv_head, last_key), params.v.stride_n, problem.head_dim_v);
  // Keys outside the tile's visible range are not even read: a NaN there can reach no row of this block.
  const auto load_k = [&](int key) {
    k_loader.load(smem.k, keys.begin - key, keys.end - key);
    k_loader.advance(-kKeyTile);
    ptx::cp_async_commit();
  };
  const auto load_v = [&](int key) {
    v_loader.load(smem.v, keys.begin - key, keys.end - key);
    v_loader.advance(-kKeyTile);
    ptx::cp_async_commit();
  };

  const int warp_row = threadIdx.x / kWarpSize * kWarpRows;
  OutFragment out;
  out.zero();
  attn::Softmax<kM, Accum, !kIsHalf<Element>> softmax;
  const Accum fold = params.scores.fold;

  if (first_tile < end_tile) {
    cta::load_rows<kThreads, kCopyBytes>(smem.q, q_gmem, params.q.stride_n, 0, query_end - query_begin, problem.head_dim);
    load_k(last_key);
  }
  for (int tile = end_tile - 1; tile >= first_tile; --tile) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // k(tile) is there for everyone, and everyone is done with v(tile + 1)
    const int key = tile * kKeyTile;
    load_v(key);

    SFragment s;
    s.zero();
    warp::matmul<warp::Major::K, warp::Major::K, kHeadDim>(s, smem.q, warp_row, smem.k, 0);

    ptx::cp_async_wait<0>();
    __syncthreads();  // v(tile) is there, and everyone is done with k(tile)
    if (tile > first_tile) load_k(key - kKeyTile);

    const int query = query_begin + warp_row;
    scores.apply(s, query, key, static_cast<SFragment*>(nullptr));
    softmax.update(s, out, fold);
    if constexpr (kHasDropout) {  // the LSE is of the undropped row
      const attn::Dropout dropout(params.scores, problem, seq, head);
      const auto drop = [&](int m, int n, int i, bool is_kept) { s.x[m][n][i] = is_kept ? s.x[m][n][i] : Accum(0); };
      dropout.for_each<kM, kKeyTile / 8>(query, key, drop);
    }
    warp::matmul(out, s, smem, warp_row, smem.v);
  }

  const int rows = query_end - query_begin - warp_row;
  const bool has_sink = params.scores.sink && !seq.is_slack;
  const Accum unit = params.scores.fold * kLn2;
  const Accum sink = has_sink ? static_cast<const Accum*>(params.scores.sink)[head] : Accum(0);
  Accum* lse = static_cast<Accum*>(params.lse.data) + seq.batch * params.lse.stride_b + head * params.lse.stride_h +
               seq.q_begin + query_begin + warp_row;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Accum factor;
      const Accum row_lse = softmax.finish(m, half, unit, has_sink, sink, factor);
      const int row = 16 * m + warp::fragment_row(2 * half);
      if (row < rows && warp::lane() % 4 == 0) lse[row] = row_lse;
      const bool is_empty = factor == 0;  // selected, not multiplied: zero even where v holds a NaN
      if constexpr (kHasDropout) factor *= Accum(params.scores.keep_scale);
#pragma unroll
      for (int n = 0; n < kHeadDimV / 8; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) out.x[m][n][i] = is_empty ? Accum(0) : out.x[m][n][i] * factor;
    }
  OutElement* out_gmem = attn::rows<OutElement>(params.out, seq, seq.q_begin, head, query_begin + warp_row);
  warp::store_global<OutElement, kCopyBytes, false>(out_gmem, params.out.stride_n, rows, problem.head_dim_v, out);
}
