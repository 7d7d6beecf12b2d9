// A bias on its way through shared memory: for kernels that have threads to spare for it, and no registers.
#pragma once
#include "attn/bias.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"

namespace cf::attn {

// A tile's chunks of 16 bytes as kThreads threads copy them, some lanes to a row and all again further down.
template <class Tile, int kThreads>
struct Chunks {
  using T = typename Tile::Type;
  static constexpr int kLanes = Tile::kChunks % 8 == 0 ? 8 : 4, kRowStep = kThreads / kLanes;  // lanes of a row, rows at once
  static constexpr int kPasses = ceil_div(Tile::kChunks, kLanes), kAlong = kLanes * Tile::kChunk;  // over a row
  static_assert(Tile::kRows % 8 == 0 && kRowStep <= 8);
  int row, col;  // where this thread begins

  __device__ __forceinline__ explicit Chunks(int thread) : row(thread / kLanes), col(thread % kLanes * Tile::kChunk) {}

  // `src`: where this thread begins in global memory. `rows`, `keys`: that there are from the tile's first on. Others become zeros, and are never
  // read.
  __device__ __forceinline__ void copy(Tile& tile, const T* src, int64 stride, int rows, int keys) const {
    if (rows >= Tile::kRows && keys >= Tile::kCols) copy_whole(tile, src, stride);
    else copy_part(tile, src, stride, rows, keys);
  }
  // The eighth row after another has its chunks in the same order, so few addresses serve for all.
  __device__ __forceinline__ void copy_whole(Tile& tile, const T* src, int64 stride) const {
#pragma unroll 1
    for (int begin = 0; begin < 8; begin += kRowStep)
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        if (Tile::kChunks % kLanes != 0 && col + i * kAlong >= Tile::kCols) break;
        const uint32 dst = ptx::shared_address(tile.at(row + begin, col + i * kAlong));
        const T* from = src + begin * stride + i * kAlong;
#pragma unroll
        for (int down = 0; down < Tile::kRows; down += 8, from += 8 * stride)
          ptx::cp_async<16>(dst + down * Tile::kCols * sizeof(T), from, 16);
      }
  }
  __device__ __forceinline__ void copy_part(Tile& tile, const T* src, int64 stride, int rows, int keys) const {
#pragma unroll 1
    for (int down = 0; down < Tile::kRows; down += kRowStep, src += kRowStep * stride)
#pragma unroll 1
      for (int along = 0; col + along < Tile::kCols; along += kAlong) {
        const int valid = row + down < rows ? clamp(keys - col - along, 0, Tile::kChunk) : 0;
        ptx::cp_async<16>(ptx::shared_address(tile.at(row + down, col + along)), src + along, valid * static_cast<int>(sizeof(T)));
      }
  }
};

// A tile whose first element is (query, key), by kThreads threads, in copies of single elements or, of less than four bytes, of two. Other
// queries and keys than those of the sequence become zeros, and are never read.
template <int kBytes, int kThreads, class T, class Tile>
__device__ __forceinline__ void copy_elements(Tile& tile, const Bias<T>& bias, int query, int key, int len_q, int len_k, int thread) {
  constexpr int kCount = kBytes / sizeof(T), kCopies = Tile::kCols / kCount;  // elements of a copy, copies of a row
#pragma unroll(kBytes < 4 ? 4 : 1)
  for (int i = thread; i < Tile::kRows * kCopies; i += kThreads) {
    const int row = i / kCopies, col = i % kCopies * kCount;
    const int valid = query + row < len_q ? clamp(len_k - key - col, 0, kCount) : 0;
    const T* const src = bias.at(query + row, key + col);
    if constexpr (kBytes >= 4) ptx::cp_async<kBytes>(ptx::shared_address(tile.at(row, col)), src, valid * static_cast<int>(sizeof(T)));
    else *tile.at(row, col) = valid ? *src : convert<T>(0.0f);
  }
}

// The same in copies as wide as the bias allows. Arrives at `full` once they are there.
template <int kThreads, class T, class Tile>
__device__ __forceinline__ void load_bias(Tile& tile, ptx::Barrier& full, const Bias<T>& bias, int query, int key, int len_q, int len_k,
                                          int thread) {
  constexpr int kBytes = sizeof(T), kLeast = max_of(4, kBytes);
  if (bias.has_chunks) {
    const Chunks<Tile, kThreads> chunks(ptx::settled(thread));  // settled: addresses are made here, not kept in registers that are not there
    chunks.copy(tile, bias.at(query + chunks.row, key + chunks.col), bias.stride_q, len_q - query, len_k - key);
  } else if (kBytes == kLeast || bias.has_pairs) {
    copy_elements<kLeast, kThreads>(tile, bias, query, key, len_q, len_k, thread);
  } else {  // one by one, which no asynchronous copy does
    copy_elements<kBytes, kThreads>(tile, bias, query, key, len_q, len_k, thread);
    ptx::mbarrier_arrive(full);
    return;
  }
  ptx::mbarrier_arrive_behind_copies(full);
}

// A warp's 16 rows on their way into its own place, tile by tile from the last keys to the first, in chunks of 16 bytes.
template <class T, int kKeys>
struct BiasRows {
  using Tile = tile::Shared<T, 16, kKeys>;
  using WarpChunks = Chunks<Tile, kWarpSize>;
  bool has_chunks = false;  // else they cannot come so
  const T* src;             // the lane's first chunk of the next tile
  int64 stride;
  int rows;                 // that there are

  BiasRows() = default;
  __device__ __forceinline__ BiasRows(const Bias<T>& bias, int query, int key, int len_q)
      : has_chunks(bias.has_chunks), stride(bias.stride_q), rows(len_q - query) {
    const WarpChunks chunks(warp::lane());
    src = bias.at(query + chunks.row, key + chunks.col);
  }
  // `keys`: that there are from the tile's first on.
  __device__ __forceinline__ void copy_next(Tile& tile, int keys) {
    WarpChunks(warp::lane()).copy(tile, src, stride, rows, keys);
    ptx::cp_async_commit();
    src -= kKeys;
  }
};
// What they are then, as an accumulator of queries x keys has it.
template <class T, int kKeys>
__device__ __forceinline__ void read_rows(BiasFragment<T, 1, kKeys / 8>& read, const tile::Shared<T, 16, kKeys>& tile) {
  const int lane = warp::lane();
  if constexpr (kIsHalf<T>) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32 pairs[4];
      ptx::ldmatrix<false>(pairs, ptx::shared_address(tile.at(lane % 16, 16 * step + lane / 16 * 8)));
#pragma unroll
      for (int i = 0; i < 4; ++i) read.pairs[0][i % 2][2 * step + i / 2].word = pairs[i];
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
        read.pairs[0][half][n] = *reinterpret_cast<const BiasPair<T>*>(tile.at(lane / 4 + 8 * half, 8 * n + lane % 4 * 2));
  }
}

// 16 queries x 16 keys of a tile as an accumulator of keys x queries has them. Of 16 bits ldmatrix reads them, transposed.
template <class T, bool kIsPaired = kIsHalf<T>>
struct BiasBlock {
  T x[2][4];
  template <class Tile>
  __device__ __forceinline__ void read(const Tile& tile, int row, int col, int lane) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = *tile.at(row + 8 * n + lane % 4 * 2 + i % 2, col + lane / 4 + i / 2 * 8);
  }
  __device__ __forceinline__ float at(int n, int i) const { return convert<float>(x[n][i]); }
};
template <class T>
struct BiasBlock<T, true> {
  uint32 pairs[4];
  template <class Tile>
  __device__ __forceinline__ void read(const Tile& tile, int row, int col, int lane) {
    ptx::ldmatrix<true>(pairs, ptx::shared_address(tile.at(row + lane / 16 * 8 + lane % 8, col + lane / 8 % 2 * 8)));
  }
  __device__ __forceinline__ float at(int n, int i) const { return unpack<T>(pairs[2 * n + i / 2], i % 2); }
};

}  // namespace cf::attn
