// Keys and values in the pages of a pool: which row of the pool a key is, and tiles of such rows.
#pragma once
#include "attn/mask.cuh"
#include "params.cuh"
#include "tile/load.cuh"

namespace cf::attn {

struct PageRow {
  int64 k, v;  // where it begins in a head's pools, in elements; negative: there is none
};

// Of two tiles in turn, those of even and of odd numbers, in shared memory; a base, so that it takes no room where there are no pages.
template <bool kIsThere, int kKeys>
struct PageRows {
  alignas(128) PageRow page_rows[2][kKeys];
};
template <int kKeys>
struct PageRows<false, kKeys> {};

// Where a tile's keys are: found by all threads while something else is done, then published to them.
template <bool kIsThere, int kThreads, int kKeys>
class PageFinder {
  const int* pages_of;  // of the sequence
  const FwdParams& params;
  Range keys;
  PageRow found[ceil_div(kKeys, kThreads)];

 public:
  __device__ __forceinline__ PageFinder(const FwdParams& p, const Sequence& s, Range keys)
      : pages_of(p.block_table + s.index * p.table_stride), params(p), keys(keys) {}

  // No entry is looked at but for visible keys, and what names no page of the pool is none.
  __device__ __forceinline__ void find(int first_key) {
#pragma unroll
    for (int i = 0; i < ceil_div(kKeys, kThreads); ++i) {
      const int key = first_key + threadIdx.x + i * kThreads;
      const bool is_seen = key >= keys.begin && key < keys.end;
      const uint32 page_size = params.page_size, number = static_cast<uint32>(key) / page_size, row = key - number * page_size;
      const int page = is_seen ? pages_of[number] : -1;
      const auto begin = [&](const Tensor& pool) { return page * pool.stride_b + row * pool.stride_n; };
      found[i] = page >= 0 && page < params.pages ? PageRow{begin(params.k), begin(params.v)} : PageRow{-1, -1};
    }
  }
  template <class Smem>
  __device__ __forceinline__ void publish(Smem& smem, int number) const {
#pragma unroll
    for (int i = 0; i < ceil_div(kKeys, kThreads); ++i) {
      const int row = threadIdx.x + i * kThreads;
      if (row < kKeys) smem.page_rows[number & 1][row] = found[i];
    }
  }
};
template <int kThreads, int kKeys>
struct PageFinder<false, kThreads, kKeys> {
  __device__ __forceinline__ PageFinder(const FwdParams&, const Sequence&, Range) {}
  __device__ __forceinline__ void find(int) {}
  template <class Smem>
  __device__ __forceinline__ void publish(Smem&, int) const {}
};

// Rows of a head's pool into a tile, zeros where there is none.
template <int kThreads, int kCopyBytes, int64 PageRow::*kBegin, class Tile, class Smem>
__device__ __forceinline__ void load_pages(Tile& tile, const Smem& smem, int number, const Tensor& pool, int head, int cols) {
  using T = typename Tile::Type;
  const T* const pages = static_cast<const T*>(pool.data) + head * pool.stride_h;
  constexpr int kLanes = min_of(kThreads, Tile::kChunks), kRowStep = kThreads / kLanes;
  if (kLanes * kRowStep != kThreads && threadIdx.x >= kLanes * kRowStep) return;
#pragma unroll 8
  for (int row = threadIdx.x / kLanes; row < Tile::kRows; row += kRowStep) {
    const int64 begin = smem.page_rows[number & 1][row].*kBegin;
    const T* const src = pages + begin;
#pragma unroll
    for (int part = 0; part < ceil_div(Tile::kChunks, kLanes); ++part) {
      const int chunk = threadIdx.x % kLanes + part * kLanes, col = chunk * Tile::kChunk;
      if (Tile::kChunks % kLanes != 0 && chunk >= Tile::kChunks) break;
      cta::copy_chunk<kCopyBytes>(tile.at(row, col), src + col, begin < 0 ? 0 : clamp(cols - col, 0, Tile::kChunk));
    }
  }
}

// Scores of keys that are in no page become -inf.
template <int kM, int kN, class T, class Smem>
__device__ __forceinline__ void hide_dead(warp::Fragment<kM, kN, T>& s, const Smem& smem, int number) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (smem.page_rows[number & 1][8 * n + warp::fragment_col(i)].k < 0)
#pragma unroll
        for (int m = 0; m < kM; ++m) s.x[m][n][i] = -kInfinity;
}

}  // namespace cf::attn
