// A bias on its way through shared memory: for kernels that have threads to spare for it, and no registers.
#pragma once
#include "attn/bias.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"

namespace cf::attn {

// Some queries of one head, 128 bytes of each key.
template <class T, int kKeys>
using BiasTile = tile::Shared<T, 128 / static_cast<int>(sizeof(T)), kKeys>;

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
