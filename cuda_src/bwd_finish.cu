// After the backward: dq = scale dq_accum, from fragment order to the caller's rows and type, and dsink from its parts.
//
// One warp per 16 query rows of one head. Rows that no sequence covers become zero. The first block of a head sums dsink in order.
#include "attn/sequence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/reduce.cuh"
#include "tile/fragment.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
using Accum = AccumElement;
static_assert(attn::kRowPad % kQueryTile == 0, "workspaces are padded to whole tiles");
static_assert(kQueryTile % 16 == 0);
constexpr int kCols = 32;  // under way at once; what every head dim's tile is a multiple of

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) bwd_finish(const __grid_constant__ cf::BwdFinishParams params) {
  using namespace cf;
  ptx::let_next_start();
  ptx::await_previous();
  const Problem& problem = params.problem;
  if (params.dsink && blockIdx.x < problem.heads_q && threadIdx.x == 0) {
    const Accum* parts = static_cast<const Accum*>(params.dsink_parts) + static_cast<int64>(blockIdx.x) * params.parts;
    Accum sum = 0;
    for (int i = 0; i < params.parts; ++i) sum += parts[i];
    Accum& dsink = static_cast<Accum*>(params.dsink)[blockIdx.x];
    dsink = kAccumulate ? dsink + sum : sum;
  }
  const attn::Work work = attn::find_work<true, kQueryTile>(problem, blockIdx.x);
  if (work.tile < 0 || !params.dq.data) return;
  const attn::Sequence seq = work.sequence;
  const int64 padded_begin = work.head * attn::padded_rows(problem) + attn::padded_begin(problem, seq);
  for (int row = threadIdx.x / kWarpSize * 16; row < kQueryTile; row += kWarps * 16) {
    const int query = work.tile * kQueryTile + row;
    const Accum* accum = static_cast<const Accum*>(params.dq_accum) + (padded_begin + query) * params.accum_cols;
    for (int col = 0; col < problem.head_dim; col += kCols) {
      warp::Fragment<1, kCols / 8, Accum> dq;
      dq.zero();
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
        if (!seq.is_slack) ptx::load_fragment(dq.x[0][n], accum + (col / 8 + n) * 128, warp::lane());
#pragma unroll
        for (int i = 0; i < 4; ++i) dq.x[0][n][i] = ptx::fma(dq.x[0][n][i], Accum(params.scale), Accum(0));  // never -0
      }
      warp::store_global<GradElement, kCopyBytes, kAccumulate>(
          attn::rows<GradElement>(params.dq, seq, seq.q_begin, work.head, query) + col, params.dq.stride_n,
          seq.len_q - query, problem.head_dim - col, dq);
    }
  }
}
