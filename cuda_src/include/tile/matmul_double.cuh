// acc += A B for double, by FMA in the tensor cores' fragment layout.
#pragma once
#include "ptx/math.cuh"
#include "tile/cursor.cuh"
#include "tile/fragment.cuh"

namespace cf::warp {

// Four values along the contraction from k on, at index `mn` of the other axis.
template <Major kMajor, class Tile, class T = typename Tile::Type>
__device__ __forceinline__ void load_4(T (&x)[4], const Tile& tile, int mn, int k) {
  if constexpr (kMajor == Major::K) {
#pragma unroll
    for (int i = 0; i < 4; i += Tile::kChunk) {
      const auto chunk = *reinterpret_cast<const tile::Chunk<T>*>(tile.at(mn, k + i));
#pragma unroll
      for (int j = 0; j < Tile::kChunk; ++j) x[i + j] = chunk.x[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = *tile.at(k + i, mn);
  }
}

// A's rows from m0 on, B's columns from n0 on, the contraction over [0, kK).
template <Major kMajorA, Major kMajorB, int kK, int kM, int kN, class TileA, class TileB>
__device__ __forceinline__ void matmul_double(Fragment<kM, kN, double>& acc, const TileA& a_smem, int m0, const TileB& b_smem, int n0) {
  using T = double;
#pragma unroll 1
  for (int k = 0; k < kK; k += 4) {
    T a[kM][2][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) load_4<kMajorA>(a[m][half], a_smem, m0 + 16 * m + fragment_row(2 * half), k);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      T b[2][4];
      const int col = n0 + 8 * n + fragment_col(0);
      if constexpr (kMajorB == Major::K) {
        load_4<Major::K>(b[0], b_smem, col, k);
        load_4<Major::K>(b[1], b_smem, col + 1, k);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto pair = *reinterpret_cast<const tile::Pair<T>*>(b_smem.at(k + i, col));
          b[0][i] = pair.x[0];
          b[1][i] = pair.x[1];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc.x[m][n][e] = ptx::fma(a[m][e / 2][i], b[e % 2][i], acc.x[m][n][e]);
    }
  }
}

}  // namespace cf::warp
