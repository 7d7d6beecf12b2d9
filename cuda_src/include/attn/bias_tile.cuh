// A bias on its way through shared memory: for kernels that have threads to spare for it, and no registers.
#pragma once
#include "attn/bias.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"

namespace cf::attn {

// A tile whose first element is (query, key), by kThreads threads, in copies of kBytes. Other queries and keys than those of the sequence
// become zeros, and are never read.
template <int kBytes, int kThreads, class T, class Tile>
__device__ __forceinline__ void copy_bias(Tile& tile, const Bias<T>& bias, int query, int key, int len_q, int len_k, int thread) {
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
  const uint64 alignment = reinterpret_cast<uint64>(bias.data) | uint64(bias.stride_q) * sizeof(T);
  if (bias.stride_k == 1 && alignment % 16 == 0) {
    copy_bias<16, kThreads>(tile, bias, query, key, len_q, len_k, thread);
  } else if (kBytes == kLeast || (bias.stride_k == 1 && alignment % kLeast == 0)) {
    copy_bias<kLeast, kThreads>(tile, bias, query, key, len_q, len_k, thread);
  } else {  // one by one, which no asynchronous copy does
    copy_bias<kBytes, kThreads>(tile, bias, query, key, len_q, len_k, thread);
    ptx::mbarrier_arrive(full);
    return;
  }
  ptx::mbarrier_arrive_behind_copies(full);
}

// A warp's 16 rows on their way into its own place, tile by tile from the last keys to the first, in chunks of 16 bytes.
template <class T, int kKeys>
struct BiasRows {
  using Tile = tile::Shared<T, 16, kKeys>;
  static constexpr int kLanes = Tile::kChunks % 8 == 0 ? 8 : 4, kRowStep = kWarpSize / kLanes;  // lanes of a row
  bool has_chunks = false;  // else they cannot come so
  const T* src;             // the lane's first chunk of the next tile
  int64 stride;
  int rows;                 // that there are

  BiasRows() = default;
  __device__ __forceinline__ BiasRows(const Bias<T>& bias, int query, int key, int len_q)
      : has_chunks(bias.has_chunks), src(bias.at(query + first_row(), key + first_col())), stride(bias.stride_q), rows(len_q - query) {}
  __device__ __forceinline__ static int first_row() { return warp::lane() / kLanes; }
  __device__ __forceinline__ static int first_col() { return warp::lane() % kLanes * Tile::kChunk; }

  // `keys`: that there are from the tile's first on. Others, and other rows, become zeros, and are never read.
  __device__ __forceinline__ void copy_next(Tile& tile, int keys) {
    if (rows >= 16 && keys >= kKeys) copy<true>(tile, keys);
    else copy<false>(tile, keys);
    ptx::cp_async_commit();
    src -= kKeys;
  }
  template <bool kIsWhole>
  __device__ __forceinline__ void copy(Tile& tile, int keys) const {
#pragma unroll
    for (int down = 0; down < 16; down += kRowStep) {
      const int row = first_row() + down, live = row < rows ? keys - first_col() : 0;
#pragma unroll
      for (int i = 0; i < ceil_div(Tile::kChunks, kLanes); ++i) {
        const int along = i * kLanes * Tile::kChunk, col = first_col() + along;
        if (Tile::kChunks % kLanes != 0 && col >= kKeys) break;
        const int valid = kIsWhole ? 16 : clamp(live - along, 0, Tile::kChunk) * static_cast<int>(sizeof(T));
        ptx::cp_async<16>(ptx::shared_address(tile.at(row, col)), src + down * stride + along, valid);
      }
    }
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
