// acc += A B for 16-bit types, on the tensor cores.
#pragma once
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "tile/cursor.cuh"
#include "tile/fragment.cuh"

namespace cf::warp {

// The operand's 16x16 blocks along (own axis, contraction), the first at index `mn0`, a multiple of the warp's share kExtent, of
// the own axis.
template <Major kMajor, bool kIsA, int kExtent, class Tile>
struct HalfOperand {
  Cursor<Tile> cursor;
  int mn0;

  // ldmatrix orders its four 8x8 matrices by lane / 8: A wants (m, k), (m + 8, k), (m, k + 8), (m + 8, k + 8); B the middle two swapped.
  static constexpr bool kRowsFirst = (kMajor == Major::K) == kIsA;
  __device__ __forceinline__ HalfOperand(const Tile& tile, int mn0)
      : cursor(tile, (kMajor == Major::K ? mn0 : 0) + lane() % 8 + (kRowsFirst ? lane() / 8 % 2 : lane() / 16) * 8,
               (kRowsFirst ? lane() / 16 : lane() / 8 % 2) * 8 + (kIsMoved<kMajor, kExtent> ? mn0 : 0)),
        mn0(kIsMoved<kMajor, kExtent> ? 0 : mn0) {}
  __device__ __forceinline__ void load(uint32 (&x)[4], int mn, int k) const {
    ptx::ldmatrix<kMajor == Major::MN>(x, kMajor == Major::K ? cursor.at(mn, k) : cursor.at(k, mn0 + mn));
  }
};

// A's rows from m0 on, B's columns from n0 on, the contraction over [0, kK).
template <Major kMajorA, Major kMajorB, int kK, int kM, int kN, class TileA, class TileB>
__device__ __forceinline__ void matmul_half(Fragment<kM, kN>& acc, const TileA& a_smem, int m0, const TileB& b_smem, int n0) {
  using T = typename TileA::Type;
  static_assert(kK % 16 == 0 && kN % 2 == 0);
  const HalfOperand<kMajorA, true, 16 * kM, TileA> a_blocks(a_smem, m0);
  const HalfOperand<kMajorB, false, 8 * kN, TileB> b_blocks(b_smem, n0);
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
}

// The same with A in registers: an accumulator fragment, rounded. B has its own axis along its rows. Two 16x8 tiles side by side are one 16x16 A fragment.
template <int kM, int kKTiles, int kN, class TileB>
__device__ __forceinline__ void matmul_half(Fragment<kM, kN>& acc, const Fragment<kM, kKTiles>& a, const TileB& b_smem) {
  static_assert(kKTiles % 2 == 0 && kN % 2 == 0);
  using T = typename TileB::Type;
  const HalfOperand<Major::MN, false, 8 * kN, TileB> b_blocks(b_smem, 0);
#pragma unroll
  for (int k = 0; k < kKTiles; k += 2) {
    uint32 a_frag[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = a.x[m][k + i / 2] + i % 2 * 2;
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

}  // namespace cf::warp
