// acc += A B for one warp: on tensor cores for 16-bit types and float, by FMA in the same fragment layout for double.
#pragma once
#include "tile/matmul_double.cuh"
#include "tile/matmul_float.cuh"
#include "tile/matmul_half.cuh"

namespace cf::warp {

// Operands in shared tiles: A's rows from m0 on, B's columns from n0 on, the contraction over [0, kK).
template <Major kMajorA, Major kMajorB, int kK, int kM, int kN, class A, class TileA, class TileB>
__device__ __forceinline__ void matmul(Fragment<kM, kN, A>& acc, const TileA& a_smem, int m0, const TileB& b_smem, int n0) {
  using T = typename TileA::Type;
  if constexpr (kIsHalf<T>) matmul_half<kMajorA, kMajorB, kK>(acc, a_smem, m0, b_smem, n0);
  else if constexpr (kIsSame<T, float>) matmul_float<kMajorA, kMajorB, kK>(acc, a_smem, m0, b_smem, n0);
  else matmul_double<kMajorA, kMajorB, kK>(acc, a_smem, m0, b_smem, n0);
}

// Where an accumulator fragment becomes operand A. Tensor cores take it from registers; for FMA it passes through shared memory,
// each warp its own rows.
template <class T, int kRows, int kCols, bool kIsNeeded = kIsSame<T, double>>
struct Passage {};
template <class T, int kRows, int kCols>
struct Passage<T, kRows, kCols, true> { tile::Shared<T, kRows, kCols> tile; };

// A is a fragment of the warp's rows from `row` on; B has its own axis along its rows.
template <class T, int kRows, int kCols, bool kIsNeeded, int kM, int kKTiles, int kN, class A, class TileB>
__device__ __forceinline__ void matmul(Fragment<kM, kN, A>& acc, const Fragment<kM, kKTiles, A>& a,
                                       Passage<T, kRows, kCols, kIsNeeded>& passage, int row, const TileB& b_smem) {
  if constexpr (kIsHalf<T>) {
    matmul_half(acc, a, b_smem);
  } else if constexpr (kIsSame<T, float>) {
    matmul_float(acc, a, b_smem);
  } else {
    store_shared(passage.tile, row, 0, a);
    __syncwarp();
    matmul_double<Major::K, Major::MN, kCols>(acc, passage.tile, row, b_smem, 0);
    __syncwarp();  // the rows are free for the next tile
  }
}

}  // namespace cf::warp
