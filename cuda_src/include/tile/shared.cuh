// A row-major tile in shared memory whose 16-byte chunks are permuted so that eight consecutive rows of one chunk column
// fall into eight different bank groups: ldmatrix, fragment stores and cp.async are then free of conflicts.
#pragma once
#include "types.cuh"

namespace cf::tile {

template <class T>
struct alignas(16) Chunk { T x[16 / sizeof(T)]; };
template <class T>
struct alignas(2 * sizeof(T)) Pair { T x[2]; };

template <class T, int kRows_, int kCols_>
struct Shared {
  using Type = T;
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kChunk = 16 / sizeof(T);  // elements
  static constexpr int kChunks = kCols / kChunk;  // of a row
  static_assert(kCols % kChunk == 0);

  alignas(128) T data[kRows * kCols];

  // A row of 128-byte multiples shifts by row % 8; one of an odd multiple of 64 bytes already alternates between two halves
  // of the banks, so a shift by (row / 2) % 4 suffices; of 32 bytes, (row / 4) % 2.
  static constexpr int kPhaseMask = kChunks % 8 == 0 ? 7 : kChunks % 4 == 0 ? 3 : kChunks % 2 == 0 ? 1 : 0;
  static constexpr int kPhaseRows = 8;  // every so many rows the permutations are the same
  // Lanes read four-byte numbers as (8 rows, 4 x 2 or 4 numbers) and as (8 numbers, 4 rows of one parity): two rows of different
  // parity must then fall into different halves of the banks, and so must a row and the fourth after it.
  __device__ __forceinline__ static int phase(int row) {
    if constexpr (sizeof(T) == 4 && kPhaseMask == 7) return (row ^ (row & 1) << 2) & 7;
    else return row / (8 / (kPhaseMask + 1)) & kPhaseMask;
  }
  __device__ __forceinline__ T* at(int row, int col) {
    return data + row * kCols + (col / kChunk ^ phase(row)) * kChunk + col % kChunk;
  }
  __device__ __forceinline__ const T* at(int row, int col) const { return const_cast<Shared*>(this)->at(row, col); }
};

}  // namespace cf::tile
