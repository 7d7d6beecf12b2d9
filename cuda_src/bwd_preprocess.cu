// Per query row, before the backward: D = rowsum(dout * out) - dlse, and what the main kernel wants beside it.
//
// One warp per row of one head. Writes (lse log2(e), D) as one float2, zeroes the row's FP32 dq accumulator, rounds dout to q's type
// where it came as float, and adds the row's share of dsink = -sum exp(sink - lse) D (contract, Backward).
// An empty row (lse -inf) gets (+inf, 0): P = exp2(x - inf) is then exactly 0, and its dout is not used.
#include "attn/sequence.cuh"
#include "ptx/math.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
static_assert(attn::kRowPad % kQueryTile == 0, "workspaces are padded to whole tiles");

template <class T>
__device__ __forceinline__ const T* row_of(const Tensor& t, const attn::Sequence& s, int head, int row) {
  return attn::rows<const T>(t, s, s.q_begin, head, row);
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) bwd_preprocess(const __grid_constant__ cf::BwdPreprocessParams params) {
  using namespace cf;
  const Problem& problem = params.problem;
  const attn::Work work = attn::find_work<true, kQueryTile>(problem, blockIdx.x);
  if (work.tile < 0) return;
  const attn::Sequence seq = work.sequence;
  const int head = work.head, lane = threadIdx.x % kWarpSize;
  const bool has_sink = params.dsink && !seq.is_slack;
  const float sink = has_sink ? params.sink[head] : -kInfinity;
  const int64 padded_begin = static_cast<int64>(head) * attn::padded_rows(problem) +
                             attn::padded_begin(problem, seq) + work.tile * kQueryTile;
  float dsink = 0.0f;

  for (int row_in_tile = threadIdx.x / kWarpSize; row_in_tile < kQueryTile; row_in_tile += kWarps) {
    const int row = work.tile * kQueryTile + row_in_tile;
    const bool is_row = row < seq.len_q;
    const float lse = is_row && !seq.is_slack && params.lse.data ? *row_of<float>(params.lse, seq, head, row) : -kInfinity;
    const bool is_empty = lse == -kInfinity && params.lse.data;
    float delta = 0.0f;
    if (is_row && !is_empty) {
      if (params.delta_in.data) {
        delta = *row_of<float>(params.delta_in, seq, head, row);
      } else {
        const DoutElement* dout = row_of<DoutElement>(params.dout, seq, head, row);
        const OutElement* out = row_of<OutElement>(params.out, seq, head, row);
        for (int col = lane; col < problem.head_dim_v; col += kWarpSize) delta += to_float(dout[col]) * to_float(out[col]);
#pragma unroll
        for (int d = kWarpSize / 2; d > 0; d /= 2) delta += __shfl_xor_sync(kFullWarp, delta, d);
        if (params.dlse.data) delta -= *row_of<float>(params.dlse, seq, head, row);
      }
      if (has_sink && sink != -kInfinity) dsink -= ptx::exp2((sink - lse) * kLog2E) * delta;
    }
    if (is_row && params.delta_out.data && lane == 0)
      *attn::rows<float>(params.delta_out, seq, seq.q_begin, head, row) = delta;
    if (params.dout_rounded && is_row) {
      Element* rounded = static_cast<Element*>(params.dout_rounded) +
          ((static_cast<int64>(seq.batch) * problem.len_q + seq.q_begin + row) * problem.heads_q + head) * problem.head_dim_v;
      const DoutElement* dout = row_of<DoutElement>(params.dout, seq, head, row);
      for (int col = lane; col < problem.head_dim_v; col += kWarpSize) rounded[col] = from_float<Element>(to_float(dout[col]));
    }
    if (params.stats && !seq.is_slack) {
      if (lane == 0) params.stats[padded_begin + row_in_tile] = make_float2(is_row && !is_empty ? lse * kLog2E : kInfinity, delta);
      float4* accum = reinterpret_cast<float4*>(params.dq_accum + (padded_begin + row_in_tile) * kHeadDim);
      for (int i = lane; i < kHeadDim / 4; i += kWarpSize) accum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  if (has_sink && lane == 0 && dsink != 0.0f) atomicAdd(params.dsink + head, dsink);
}
