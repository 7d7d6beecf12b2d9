// Global rows into a shared tile. Rows outside [begin, end) and columns from `cols` on become zeros and are never read.
#pragma once
#include "ptx/cp_async.cuh"
#include "tile/shared.cuh"

namespace cf::cta {

// 16 bytes into shared memory, of which the first `valid` elements are read and the others become zeros.
template <int kCopyBytes, class T>
__device__ __forceinline__ void copy_chunk(T* dst, const T* src, int valid) {
  constexpr int kChunk = 16 / sizeof(T);
  if constexpr (kCopyBytes >= 4) {
    constexpr int kPart = kCopyBytes / sizeof(T);
#pragma unroll
    for (int at = 0; at < kChunk; at += kPart)
      ptx::cp_async<kCopyBytes>(ptx::shared_address(dst + at), src + at, clamp(valid - at, 0, kPart) * static_cast<int>(sizeof(T)));
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) dst[i] = i < valid ? src[i] : convert<T>(0.0f);
  }
}

// One thread's share of copying tiles of a strided array. What does not change from tile to tile is computed once.
// kCopyBytes: what every row's address is a multiple of, 16 at best. Below 4 bytes there is no asynchronous copy.
template <int kThreads, int kCopyBytes, class Tile>
class RowLoader {
  using T = typename Tile::Type;
  static constexpr int kLanes = min_of(kThreads, Tile::kChunks);  // threads along a row; beside a wide row of few threads they come again
  static constexpr int kRowStep = min_of(kThreads / kLanes, Tile::kRows);
  static constexpr int kPeriod = Tile::kPhaseRows / gcd(Tile::kPhaseRows, kRowStep);  // steps until chunks are permuted likewise again
  static_assert(kRowStep >= 1);

  const T* rows;  // of the tile that comes next
  int64 stride;
  int cols;

 public:
  __device__ __forceinline__ RowLoader(const T* rows, int64 stride, int cols) : rows(rows), stride(stride), cols(cols) {}
  // The next tile begins at this row, or so many rows further on.
  __device__ __forceinline__ void seek(const T* first_row) { rows = first_row; }
  __device__ __forceinline__ void advance(int count) { rows += count * stride; }

  __device__ __forceinline__ void load(Tile& tile, int begin, int end) const {
    const int first_row = threadIdx.x / kLanes;
    if (kLanes * kRowStep != kThreads && first_row >= kRowStep) return;
#pragma unroll
    for (int part = 0; part < ceil_div(Tile::kChunks, kLanes); ++part) {
      const int chunk = threadIdx.x % kLanes + part * kLanes, col = chunk * Tile::kChunk;
      if (Tile::kChunks % kLanes != 0 && chunk >= Tile::kChunks) break;
      const T* from = rows + first_row * stride + col;
      const int in_row = clamp(cols - col, 0, Tile::kChunk);  // elements

      if (kCopyBytes == 16 && begin <= 0 && end >= Tile::kRows) {  // every row is there: nothing to ask
        uint32 to[kPeriod];
#pragma unroll
        for (int i = 0; i < kPeriod; ++i) to[i] = ptx::shared_address(tile.at(first_row + i * kRowStep, col));
#pragma unroll
        for (int step = 0; step < ceil_div(Tile::kRows, kRowStep); ++step, from += kRowStep * stride) {
          if (Tile::kRows % kRowStep != 0 && first_row + step * kRowStep >= Tile::kRows) break;
          const int further = step / kPeriod * kPeriod * kRowStep * Tile::kCols * static_cast<int>(sizeof(T));
          ptx::cp_async<16>(to[step % kPeriod] + further, from, in_row * static_cast<int>(sizeof(T)));
        }
        continue;
      }
#pragma unroll 1
      for (int row = first_row; row < Tile::kRows; row += kRowStep, from += kRowStep * stride) {
        copy_chunk<kCopyBytes>(tile.at(row, col), from, row >= begin && row < end ? in_row : 0);
      }
    }
  }
};

// A tile that is loaded but once.
template <int kThreads, int kCopyBytes, class Tile>
__device__ __forceinline__ void load_rows(Tile& tile, const typename Tile::Type* rows, int64 stride, int begin, int end, int cols) {
  RowLoader<kThreads, kCopyBytes, Tile>(rows, stride, cols).load(tile, begin, end);
}

// A tile whose rows lie anywhere: `row_at` says where, and is not asked for rows from `count` on, which become zeros.
template <int kThreads, int kCopyBytes, class Tile, class F>
__device__ __forceinline__ void gather_rows(Tile& tile, int count, int cols, const F& row_at) {
#pragma unroll 1
  for (int i = threadIdx.x; i < Tile::kRows * Tile::kChunks; i += kThreads) {
    const int row = i / Tile::kChunks, col = i % Tile::kChunks * Tile::kChunk;
    auto* const dst = tile.at(row, col);
    if (row < count) {
      copy_chunk<kCopyBytes>(dst, row_at(row) + col, clamp(cols - col, 0, Tile::kChunk));
    } else {
      *reinterpret_cast<uint4*>(dst) = uint4{};
    }
  }
}

// Zeroes the rows of a tile that `is_chosen` names.
template <int kThreads, class Tile, class F>
__device__ __forceinline__ void zero_rows(Tile& tile, const F& is_chosen) {
#pragma unroll 1
  for (int i = threadIdx.x; i < Tile::kRows * Tile::kCols; i += kThreads)
    if (is_chosen(i / Tile::kCols)) *tile.at(i / Tile::kCols, i % Tile::kCols) = convert<typename Tile::Type>(0.0f);
}

}  // namespace cf::cta
