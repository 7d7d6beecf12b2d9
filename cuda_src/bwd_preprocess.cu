// Per query row, before the backward: D = rowsum(dout * out) - dlse, and what the main kernel wants beside it.
//
// kGroup lanes share one row of one head, kVector columns each at a time. Writes (lse log2(e), D), zeroes what a main kernel adds to, the
// rows' dq accumulator or all turns and dq of rows that see no key, rounds dout to q's type where it came wider, and sums the block's share
// of dsink = -sum exp(sink - lse) D in a fixed order (contract, Backward). An empty row (lse -inf) gets (+inf, 0): P = exp2(x - inf) is then
// exactly 0, and its dout is not used.
#include "attn/gradient.cuh"
#include "attn/mask.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/shared.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;
constexpr int kGroup = 8;  // a warp's load is then whole 128-byte lines of 16-bit rows, whatever the head dim
using Accum = AccumOf<Element>::Type;
constexpr int kWidest = sizeof(OutElement) > sizeof(DoutElement) ? sizeof(OutElement) : sizeof(DoutElement);
constexpr int kVector = kCopyBytes > kWidest ? kCopyBytes / kWidest : 1;
static_assert(attn::kRowPad % kQueryTile == 0, "workspaces are padded to whole tiles");

// lse log2(e); a finite one stays finite, since x - inf would be a NaN.
__device__ __forceinline__ Accum in_base_2(Accum lse) {
  constexpr Accum kLargest = sizeof(Accum) == 4 ? 3.4028234e38 : 1.7976931348623157e308;
  const Accum scaled = lse * Accum(kLog2E);
  return ptx::abs(lse) <= kLargest ? clamp(scaled, -kLargest, kLargest) : scaled;
}

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
    if (col + kVector <= cols) {
      const auto a = *reinterpret_cast<const Vector<DoutElement>*>(dout + col);
      Vector<OutElement> b{};
      if (out) b = *reinterpret_cast<const Vector<OutElement>*>(out + col);
#pragma unroll
      for (int i = 0; i < kVector; ++i) f(col + i, a.x[i], convert<Accum>(b.x[i]));
    } else {
#pragma unroll 1
      for (int i = col; i < cols; ++i) f(i, dout[i], out ? convert<Accum>(out[i]) : Accum(0));
    }
  }
}

// By the lanes of a group.
__device__ __forceinline__ void zero_row(const BwdPreprocessParams& params, const attn::Sequence& seq, int head, int row) {
  for (int col = threadIdx.x % kGroup; col < params.problem.head_dim; col += kGroup)
    if (params.dq_item_bytes == 2) row_of<unsigned short>(params.dq, seq, head, row)[col] = 0;
    else row_of<float>(params.dq, seq, head, row)[col] = 0;
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) bwd_preprocess(const __grid_constant__ cf::BwdPreprocessParams params) {
  using namespace cf;
  ptx::let_next_start();
  const Problem& problem = params.problem;
  const attn::Work work = attn::find_work<true, kQueryTile>(problem, blockIdx.x);  // none: still a part of dsink, of 0
  const attn::Sequence seq = work.sequence;
  const int head = work.head;
  const bool has_sink = params.dsink_parts && !seq.is_slack;
  const Accum sink = has_sink ? static_cast<const Accum*>(params.sink)[head] : Accum(-kInfinity);
  const int64 padded_begin = head * attn::padded_rows(problem) + attn::padded_begin(problem, seq) + work.tile * kQueryTile;
  const bool is_lead = threadIdx.x % kGroup == 0;
  const attn::Band<true> band(problem, seq);
  Accum dsink = 0;

  const int rows = work.tile < 0 ? 0 : kQueryTile;
  for (int row_in_tile = threadIdx.x / kGroup; row_in_tile < rows; row_in_tile += kThreads / kGroup) {
    const int row = work.tile * kQueryTile + row_in_tile;
    const bool is_row = row < seq.len_q;
    Accum lse = 0, delta = 0;
    if (is_row && params.lse.data) lse = seq.is_slack ? Accum(-kInfinity) : *row_of<Accum>(params.lse, seq, head, row);
    const bool is_used = is_row && lse != -kInfinity;  // asked once dout and out are on their way
    if (is_row && params.dout.data) {
      const DoutElement* dout = row_of<DoutElement>(params.dout, seq, head, row);
      const OutElement* out = params.out.data ? row_of<OutElement>(params.out, seq, head, row) : nullptr;
      if (params.dout_rounded) {
        Element* rounded = static_cast<Element*>(params.dout_rounded) +
            ((static_cast<int64>(seq.batch) * problem.len_q + seq.q_begin + row) * problem.heads_q + head) * params.rounded_cols;
        for_columns(dout, out, problem.head_dim_v, [&](int col, DoutElement d, Accum o) {
          rounded[col] = convert<Element>(d);
          delta += convert<Accum>(d) * o;
        });
      } else if (out) {
        for_columns(dout, out, problem.head_dim_v, [&](int, DoutElement d, Accum o) { delta += convert<Accum>(d) * o; });
      }
    }
#pragma unroll
    for (int d = kGroup / 2; d > 0; d /= 2) delta += __shfl_xor_sync(kFullWarp, delta, d);
    if (!is_used) delta = 0;
    else if (params.delta_in.data) delta = *row_of<Accum>(params.delta_in, seq, head, row);
    else if (params.dlse.data) delta -= *row_of<Accum>(params.dlse, seq, head, row);

    if (is_used && is_lead && sink != -kInfinity) dsink -= ptx::exp2((sink - lse) * Accum(kLog2E)) * delta;
    if (is_row && is_lead && params.delta_out.data) *row_of<Accum>(params.delta_out, seq, head, row) = delta;
    if (is_row && params.dq.data && band.keys_of(row).begin >= band.keys_of(row).end) zero_row(params, seq, head, row);
    if (params.stats && is_lead && !seq.is_slack)
      static_cast<attn::RowStats<Accum>*>(params.stats)[padded_begin + row_in_tile] = {
          is_used ? in_base_2(lse) : Accum(kInfinity), delta};
  }
  if (params.dq_accum && !seq.is_slack) {
    using Chunk = tile::Chunk<Accum>;
    constexpr int kChunk = sizeof(Chunk) / sizeof(Accum);
    Chunk* accum = static_cast<Chunk*>(params.dq_accum) + padded_begin * params.accum_cols / kChunk;
    for (int i = threadIdx.x; i < rows * params.accum_cols / kChunk; i += kThreads) accum[i] = Chunk{};
  }
  if (params.turns) {  // whatever rows the sequences cover: a main kernel would wait for ever for a turn that nobody has zeroed
    const int64 turns = problem.heads_q * attn::padded_rows(problem) / attn::kTurnRows;
    for (int64 i = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x; i < turns; i += static_cast<int64>(gridDim.x) * kThreads)
      static_cast<int*>(params.turns)[i] = 0;
  }
  if (params.dsink_parts) {
    __shared__ Accum parts[kThreads / kGroup];
    if (is_lead) parts[threadIdx.x / kGroup] = dsink;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < kThreads / kGroup; ++i) dsink += parts[i];
    const int tiles = problem.tiles_q, batch = blockIdx.x / tiles / problem.heads_q;
    const int per_head = gridDim.x / problem.heads_q;
    static_cast<Accum*>(params.dsink_parts)[head * per_head + batch * tiles + blockIdx.x % tiles] = dsink;
  }
}
