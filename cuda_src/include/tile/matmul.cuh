// acc += A B for one warp, operands in shared tiles: tensor cores for 16-bit types, FMA in the same fragment layout for the rest.
#pragma once
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "tile/fragment.cuh"
#include "tile/shared.cuh"

namespace cf::warp {

// Which axis of an operand runs along a row of its shared tile: the contraction (K) or the result's own (MN).
enum class Major { K, MN };

// A lane's row of the 16x16 blocks that ldmatrix reads. Moving by whole blocks keeps the row's phase, and below the swizzle's bits
// the address is otherwise zero: a block's address is this one with one XOR and an immediate offset.
template <class Tile>
struct Cursor {
  uint32 address;  // of the lane's chunk in the first block

  __device__ __forceinline__ Cursor(const Tile& tile, int row, int chunk)
      : address(ptx::shared_address(tile.data + row * Tile::kCols) + (chunk ^ Tile::phase(row)) * 16) {}
  __device__ __forceinline__ uint32 at(int rows, int col) const {
    const int chunk = col / Tile::kChunk, swizzled = chunk & Tile::kPhaseMask;
    return (address ^ swizzled * 16) + (chunk - swizzled) * 16 + rows * Tile::kCols * static_cast<int>(sizeof(typename Tile::Type));
  }
};

// The operand blocks along (own axis, contraction), the first at index `mn0`, a multiple of the warp's share kExtent, of the own axis.
template <Major kMajor, bool kIsA, int kExtent, class Tile>
struct Operand {
  Cursor<Tile> cursor;
  int mn0;

  // Indices within a share of a power of two have no bit in common with where it begins, so the cursor can begin there.
  static constexpr bool kIsMoved = kMajor == Major::MN && (kExtent & (kExtent - 1)) == 0;
  // ldmatrix orders its four 8x8 matrices by lane / 8: A wants (m, k), (m + 8, k), (m, k + 8), (m + 8, k + 8); B the middle two swapped.
  static constexpr bool kRowsFirst = (kMajor == Major::K) == kIsA;
  __device__ __forceinline__ Operand(const Tile& tile, int mn0)
      : cursor(tile, (kMajor == Major::K ? mn0 : 0) + lane() % 8 + (kRowsFirst ? lane() / 8 % 2 : lane() / 16) * 8,
               (kRowsFirst ? lane() / 16 : lane() / 8 % 2) + (kIsMoved ? mn0 / Tile::kChunk : 0)),
        mn0(kIsMoved ? 0 : mn0) {}
  __device__ __forceinline__ void load(uint32 (&x)[4], int mn, int k) const {
    ptx::ldmatrix<kMajor == Major::MN>(x, kMajor == Major::K ? cursor.at(mn, k) : cursor.at(k, mn0 + mn));
  }
};

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

// A's rows from m on, B's columns from n on, the contraction over [0, kK).
template <Major kMajorA, Major kMajorB, int kK, int kM, int kN, class A, class TileA, class TileB>
__device__ __forceinline__ void matmul(Fragment<kM, kN, A>& acc, const TileA& a_smem, int m0, const TileB& b_smem, int n0) {
  using T = typename TileA::Type;
  if constexpr (kIsHalf<T>) {
    static_assert(kK % 16 == 0 && kN % 2 == 0);
    const Operand<kMajorA, true, 16 * kM, TileA> a_blocks(a_smem, m0);
    const Operand<kMajorB, false, 8 * kN, TileB> b_blocks(b_smem, n0);
    constexpr int kPairs = kN / 2;
    // Each block is asked for one step before its use, so that ldmatrix runs behind the products.
    uint32 a[2][kM][4], b[2][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) a_blocks.load(a[0][m], 16 * m, 0);
    b_blocks.load(b[0], 0, 0);
#pragma unroll
    for (int k = 0; k < kK / 16; ++k)
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const int now = (k * kPairs + n) % 2;
        const bool is_last = n + 1 == kPairs;
        if (!is_last || k + 1 < kK / 16) b_blocks.load(b[1 - now], is_last ? 0 : 16 * (n + 1), is_last ? 16 * (k + 1) : 16 * k);
        if (is_last && k + 1 < kK / 16) {
#pragma unroll
          for (int m = 0; m < kM; ++m) a_blocks.load(a[(k + 1) % 2][m], 16 * m, 16 * (k + 1));
        }
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::mma_m16n8k16<T>(acc.x[m][2 * n], a[k % 2][m], b[now][0], b[now][1]);
          ptx::mma_m16n8k16<T>(acc.x[m][2 * n + 1], a[k % 2][m], b[now][2], b[now][3]);
        }
      }
  } else {
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
}

// The same with A in registers: an accumulator fragment rounded to T. Two 16x8 tiles side by side are one 16x16 A fragment.
template <Major kMajorB, class T, int kM, int kKTiles, int kN, class A, class TileB>
__device__ __forceinline__ void matmul(Fragment<kM, kN, A>& acc, const Fragment<kM, kKTiles, A>& a, const TileB& b_smem, int n0) {
  static_assert(kIsHalf<T> && kKTiles % 2 == 0 && kN % 2 == 0);
  const Operand<kMajorB, false, 8 * kN, TileB> b_blocks(b_smem, n0);
#pragma unroll
  for (int k = 0; k < kKTiles; k += 2) {
    uint32 a_frag[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const A* pair = a.x[m][k + i / 2] + i % 2 * 2;
        a_frag[m][i] = pack<T>(pair[0], pair[1]);
      }
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32 b[4];
      b_blocks.load(b, 8 * n, 8 * k);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma_m16n8k16<T>(acc.x[m][n], a_frag[m], b[0], b[1]);
        ptx::mma_m16n8k16<T>(acc.x[m][n + 1], a_frag[m], b[2], b[3]);
      }
    }
  }
}

// Where an accumulator fragment becomes operand A. Tensor cores take it from registers; for FMA it passes through shared memory,
// each warp its own rows.
template <class T, int kRows, int kCols, bool kIsNeeded = !kIsHalf<T>>
struct Passage {};
template <class T, int kRows, int kCols>
struct Passage<T, kRows, kCols, true> { tile::Shared<T, kRows, kCols> tile; };

// acc += a B with B's own axis along its rows, a of the warp's rows from `row` on.
template <class T, int kRows, int kCols, bool kIsNeeded, int kM, int kKTiles, int kN, class A, class TileB>
__device__ __forceinline__ void matmul(Fragment<kM, kN, A>& acc, const Fragment<kM, kKTiles, A>& a,
                                       Passage<T, kRows, kCols, kIsNeeded>& passage, int row, const TileB& b_smem) {
  if constexpr (kIsNeeded) {
    store_shared(passage.tile, row, 0, a);
    __syncwarp();
    matmul<Major::K, Major::MN, kCols>(acc, passage.tile, row, b_smem, 0);
    __syncwarp();  // the rows are free for the next tile
  } else {
    matmul<Major::MN, T>(acc, a, b_smem, 0);
  }
}

}  // namespace cf::warp
