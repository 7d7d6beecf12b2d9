// Per query row, before the backward: D = rowsum(dout * out) - dlse, and what the main kernel wants beside it.
//
// kGroup lanes share one row of one head, kVector columns each at a time. Writes (lse log2(e), D) as one float2, zeroes the rows' FP32
// dq accumulator, rounds dout to q's type where it came as float, and adds the rows' share of dsink = -sum exp(sink - lse) D
// (contract, Backward). An empty row (lse -inf) gets (+inf, 0): P = exp2(x - inf) is then exactly 0, and its dout is not used.
#include "attn/sequence.cuh"
#include "ptx/math.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
constexpr int kGroup = 16;
constexpr int kWidest = sizeof(OutElement) > sizeof(DoutElement) ? sizeof(OutElement) : sizeof(DoutElement);
constexpr int kVector = kCopyBytes > kWidest ? kCopyBytes / kWidest : 1;
static_assert(attn::kRowPad % kQueryTile == 0, "workspaces are padded to whole tiles");

template <class T>
struct alignas(sizeof(T) * kVector) Vector { T x[kVector]; };

template <class T>
__device__ __forceinline__ T* row_of(const Tensor& t, const attn::Sequence& s, int head, int row) {
  return attn::rows<T>(t, s, s.q_begin, head, row);
}

// Calls f(column, dout, out) for this lane's columns; `out` is zero where it is not given.
template <class F>
__device__ __forceinline__ void for_columns(const DoutElement* dout, const OutElement* out, int cols, const F& f) {
  for (int col = threadIdx.x % kGroup * kVector; col < cols; col += kGroup * kVector) {
    Vector<DoutElement> a;
    Vector<OutElement> b;
    const bool is_whole = col + kVector <= cols;
    if (is_whole) a = *reinterpret_cast<const Vector<DoutElement>*>(dout + col);
    if (is_whole && out) b = *reinterpret_cast<const Vector<OutElement>*>(out + col);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (col + i >= cols) break;
      f(col + i, is_whole ? a.x[i] : dout[col + i], !out ? 0.0f : to_float(is_whole ? b.x[i] : out[col + i]));
    }
  }
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) bwd_preprocess(const __grid_constant__ cf::BwdPreprocessParams params) {
  using namespace cf;
  const Problem& problem = params.problem;
  const attn::Work work = attn::find_work<true, kQueryTile>(problem, blockIdx.x);
  if (work.tile < 0) return;
  const attn::Sequence seq = work.sequence;
  const int head = work.head;
  const bool has_sink = params.dsink && !seq.is_slack;
  const float sink = has_sink ? params.sink[head] : -kInfinity;
  const int64 padded_begin = head * attn::padded_rows(problem) + attn::padded_begin(problem, seq) + work.tile * kQueryTile;
  const bool is_lead = threadIdx.x % kGroup == 0;
  float dsink = 0.0f;

  for (int row_in_tile = threadIdx.x / kGroup; row_in_tile < kQueryTile; row_in_tile += kThreads / kGroup) {
    const int row = work.tile * kQueryTile + row_in_tile;
    const bool is_row = row < seq.len_q;
    float lse = 0.0f, delta = 0.0f;
    if (is_row && params.lse.data) lse = seq.is_slack ? -kInfinity : *row_of<float>(params.lse, seq, head, row);
    const bool is_used = is_row && lse != -kInfinity;
    if (is_row && params.dout.data) {
      const DoutElement* dout = row_of<DoutElement>(params.dout, seq, head, row);
      const OutElement* out = params.out.data && is_used ? row_of<OutElement>(params.out, seq, head, row) : nullptr;
      if (params.dout_rounded) {
        Element* rounded = static_cast<Element*>(params.dout_rounded) +
            ((static_cast<int64>(seq.batch) * problem.len_q + seq.q_begin + row) * problem.heads_q + head) * problem.head_dim_v;
        for_columns(dout, out, problem.head_dim_v, [&](int col, DoutElement d, float o) {
          rounded[col] = from_float<Element>(to_float(d));
          delta += to_float(d) * o;
        });
      } else if (out) {
        for_columns(dout, out, problem.head_dim_v, [&](int, DoutElement d, float o) { delta += to_float(d) * o; });
      }
    }
#pragma unroll
    for (int d = kGroup / 2; d > 0; d /= 2) delta += __shfl_xor_sync(kFullWarp, delta, d);
    if (!is_used) delta = 0.0f;
    else if (params.delta_in.data) delta = *row_of<float>(params.delta_in, seq, head, row);
    else if (params.dlse.data) delta -= *row_of<float>(params.dlse, seq, head, row);

    if (is_used && is_lead && sink != -kInfinity) dsink -= ptx::exp2((sink - lse) * kLog2E) * delta;
    if (is_row && is_lead && params.delta_out.data) *row_of<float>(params.delta_out, seq, head, row) = delta;
    if (params.stats && is_lead && !seq.is_slack)
      params.stats[padded_begin + row_in_tile] = make_float2(is_used ? lse * kLog2E : kInfinity, delta);
  }
  if (params.dq_accum && !seq.is_slack) {
    float4* accum = reinterpret_cast<float4*>(params.dq_accum + padded_begin * params.accum_cols);
    for (int i = threadIdx.x; i < kQueryTile * params.accum_cols / 4; i += kThreads) accum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  if (dsink != 0.0f) atomicAdd(params.dsink + head, dsink);
}
