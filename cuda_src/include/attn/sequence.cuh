// Where a tile's rows are: the sequence, its live lengths, and the shift between query and key positions.
#pragma once
#include "params.cuh"

namespace cf::attn {

struct Sequence {
  int index;       // number of the sequence; names its sink, slopes and dropout stream
  int batch;       // coordinate on the batch axis: index when dense, 0 when packed
  int q_begin;     // first row on the sequence axis
  int k_begin;
  int len_q;
  int len_k;       // live keys
  int all_k;       // live or not
  int shift;       // q_start - k_start: key j lies at distance j - (i + shift) from query i; saturated at kFar
  int64 exact_shift;
  bool is_slack;   // packed rows that no sequence covers: no keys, zeros out
};

// Distances saturate here; a position further away is masked or discounted alike.
constexpr int64 kFar = int64{1} << 30;

__device__ __forceinline__ int read_offset(const void* cu_seqlens, bool is_64, int64 i, int total) {
  const int64 raw = is_64 ? static_cast<const int64*>(cu_seqlens)[i] : static_cast<const int*>(cu_seqlens)[i];
  return static_cast<int>(clamp<int64>(raw, 0, total));  // garbage never leads out of bounds
}

__device__ __forceinline__ Sequence dense_sequence(const Problem& p, int index) {
  Sequence s;
  s.index = s.batch = index;
  s.q_begin = s.k_begin = 0;
  s.len_q = p.len_q;
  s.all_k = p.len_k;
  s.is_slack = false;
  return s;
}

// Packed: sequence number `index` in [0, B); B is the slack behind the last offset, B + 1 the slack before the first.
__device__ __forceinline__ Sequence packed_sequence(const Problem& p, int index) {
  Sequence s;
  s.batch = 0;
  s.index = min_of(index, p.batch - 1);
  s.is_slack = index >= p.batch;
  const int row = index == p.batch ? p.batch : index == p.batch + 1 ? -1 : index;
  const auto q_bound = [&](int i) {
    return i < 0 ? 0 : i > p.batch ? p.len_q : read_offset(p.cu_seqlens_q, p.is_cu_seqlens_q_64, i * p.cu_seqlens_q_stride, p.len_q);
  };
  const auto k_bound = [&](int i) {  // in pages every sequence has as many as its table names
    if (!p.cu_seqlens_k) return i <= row ? 0 : p.len_k;
    return i < 0 ? 0 : i > p.batch ? p.len_k : read_offset(p.cu_seqlens_k, p.is_cu_seqlens_k_64, i * p.cu_seqlens_k_stride, p.len_k);
  };
  s.q_begin = q_bound(row);
  s.k_begin = k_bound(row);
  s.len_q = max_of(q_bound(row + 1) - s.q_begin, 0);
  s.all_k = max_of(k_bound(row + 1) - s.k_begin, 0);
  return s;
}

// Whether where a row is, and what it may see, is to be read.
__device__ __forceinline__ bool are_lengths_in_memory(const Problem& p) {
  return p.cu_seqlens_q || p.cu_seqlens_k || p.seqused_k || p.q_start || p.k_start;
}

// Live keys and the shift, once the lengths are set.
__device__ __forceinline__ void set_live(const Problem& p, Sequence& s) {
  s.len_k = s.shift = 0;
  s.exact_shift = 0;
  if (s.is_slack) return;
  s.len_k = p.seqused_k ? clamp(p.seqused_k[s.index], 0, s.all_k) : s.all_k;
  const int64 k_start = p.k_start ? p.k_start[s.index] : p.k_start_value;
  const int64 q_start = !p.is_q_start_given ? s.len_k - s.len_q : p.q_start ? p.q_start[s.index] : p.q_start_value;
  s.exact_shift = q_start - k_start;
  s.shift = static_cast<int>(clamp(s.exact_shift, -kFar, kFar));
}

struct Work {
  Sequence sequence;
  int head;
  int tile;       // within the sequence; negative: nothing to do
};

// What a block is to do, as its number says.
struct Place {
  int index;  // of a sequence, where they are not packed
  int head;
  int tile;   // of the sequence, or of all packed ones
};

// To (sequence, head, tile). kQueries: tiles of queries, else of keys. kPacksHeads: of rows that are (query, head of a group); then the head
// is a KV head. Packed tiles are found by a scan of the offsets, 32 sequences at a time, the same in every warp.
template <bool kQueries, int kTile, bool kPacksHeads = false>
__device__ __forceinline__ Work find_work(const Problem& p, const Place& place) {
  const int group = kPacksHeads ? p.heads_q / p.heads_kv : 1;
  Work w;
  w.head = place.head;
  w.tile = place.tile;
  if (!p.cu_seqlens_q) {
    w.sequence = dense_sequence(p, place.index);
    set_live(p, w.sequence);
    return w;
  }
  const int lane = threadIdx.x % kWarpSize;
  const auto tiles_of = [&](int index) {
    if (index >= p.batch + 2) return 0;
    const Sequence s = packed_sequence(p, index);
    return ceil_div(kQueries ? s.len_q * group : s.all_k, kTile);
  };
  int next_count = tiles_of(lane);
  for (int base = 0; base < p.batch + 2; base += kWarpSize) {
    const int count = next_count;
    next_count = tiles_of(base + kWarpSize + lane);  // on their way meanwhile
    int upto = count;
#pragma unroll
    for (int d = 1; d < kWarpSize; d *= 2) {
      const int below = __shfl_up_sync(kFullWarp, upto, d);
      if (lane >= d) upto += below;
    }
    const unsigned holds = __ballot_sync(kFullWarp, w.tile < upto);
    if (holds) {
      const int owner = __ffs(holds) - 1;
      w.tile -= __shfl_sync(kFullWarp, upto - count, owner);
      w.sequence = packed_sequence(p, base + owner);
      set_live(p, w.sequence);
      return w;
    }
    w.tile -= __shfl_sync(kFullWarp, upto, kWarpSize - 1);
  }
  w.tile = -1;
  w.sequence = {};  // of no rows
  return w;
}
// Of blocks that are tile after tile, head after head.
template <bool kQueries, int kTile, bool kPacksHeads = false>
__device__ __forceinline__ Work find_work(const Problem& p, int block) {
  const int tiles = kQueries ? p.tiles_q : p.tiles_k, heads = kQueries && !kPacksHeads ? p.heads_q : p.heads_kv;
  return find_work<kQueries, kTile, kPacksHeads>(p, Place{block / tiles / heads, block / tiles % heads, block % tiles});
}

// Rows of per-row workspaces (stats, dq_accum): every sequence begins at a multiple of kRowPad, so that the whole tiles of two
// sequences never overlap, whatever the tile.
constexpr int kRowPad = 128;
constexpr int kTurnRows = 64;  // for so many rows of dq there is a counter of who has added to them

__device__ __forceinline__ int64 padded_rows(const Problem& p) {
  const int64 per_batch = static_cast<int64>(ceil_div(p.len_q, kRowPad)) * kRowPad;
  return p.cu_seqlens_q ? per_batch + static_cast<int64>(p.batch) * kRowPad : per_batch * p.batch;
}
__device__ __forceinline__ int64 padded_begin(const Problem& p, const Sequence& s) {
  if (!p.cu_seqlens_q) return static_cast<int64>(s.index) * ceil_div(p.len_q, kRowPad) * kRowPad;
  return (s.q_begin + static_cast<int64>(s.index) * kRowPad) / kRowPad * kRowPad;
}

template <class T>
__device__ __forceinline__ T* rows(const Tensor& t, const Sequence& s, int begin, int head, int row) {
  return static_cast<T*>(t.data) + s.batch * t.stride_b + (begin + static_cast<int64>(row)) * t.stride_n + head * t.stride_h;
}

}  // namespace cf::attn
