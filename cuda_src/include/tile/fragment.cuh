// A warp's accumulator: kM x kN tiles of 16x8 numbers in the layout of mma.sync, which the FMA path shares.
// Element i of a tile stands at row g + 8 (i / 2), column 2t + i % 2 (g = lane / 4, t = lane % 4).
#pragma once
#include "ptx/math.cuh"
#include "tile/shared.cuh"

namespace cf::warp {

template <int kM_, int kN_, class T = float>
struct Fragment {
  static constexpr int kM = kM_, kN = kN_;
  T x[kM][kN][4];
  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] = 0;
  }
};

__device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ int fragment_row(int i) { return lane() / 4 + 8 * (i / 2); }
__device__ __forceinline__ int fragment_col(int i) { return lane() % 4 * 2 + i % 2; }

// Over the four lanes that share a row.
template <class T>
__device__ __forceinline__ T row_max(T x) {
  x = ptx::max(x, __shfl_xor_sync(kFullWarp, x, 1));
  return ptx::max(x, __shfl_xor_sync(kFullWarp, x, 2));
}
template <class T>
__device__ __forceinline__ T row_sum(T x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// Rounds a fragment into a shared tile, its first element at (row, col).
template <class Tile, int kM, int kN, class A>
__device__ __forceinline__ void store_shared(Tile& tile, int row, int col, const Fragment<kM, kN, A>& f) {
  using T = typename Tile::Type;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        T* dst = tile.at(row + 16 * m + fragment_row(2 * half), col + 8 * n + fragment_col(0));
        const A lo = f.x[m][n][2 * half], hi = f.x[m][n][2 * half + 1];
        if constexpr (kIsHalf<T>) {
          *reinterpret_cast<uint32*>(dst) = pack<T>(lo, hi);
        } else {
          *reinterpret_cast<tile::Pair<T>*>(dst) = {{T(lo), T(hi)}};
        }
      }
}

// Four neighbouring columns of a row.
template <class T>
union alignas(4 * sizeof(T)) Quad {
  T x[4];
  uint32 pair[2];  // of 16 bits each
};

// Two neighbouring tiles' columns of a row: lane pairs swap a word each, so that each lane owns consecutive ones, `even` first.
template <class Word>
__device__ __forceinline__ void swap_columns(Word& even, Word& odd) {
  const bool is_odd = lane() & 1;
  const Word got = __shfl_xor_sync(kFullWarp, is_odd ? even : odd, 1);
  even = is_odd ? got : even;
  odd = is_odd ? odd : got;
}

// Half the lane's row of a fragment as quads, one for each pair of tiles.
template <class T, int kN>
__device__ __forceinline__ void to_quads(Quad<T> (&quads)[kN / 2], const float (&row)[kN][4], int half) {
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    const float *even = row[n] + 2 * half, *odd = row[n + 1] + 2 * half;
    Quad<T>& quad = quads[n / 2];
    if constexpr (kIsHalf<T>) {
      quad.pair[0] = pack<T>(even[0], even[1]);
      quad.pair[1] = pack<T>(odd[0], odd[1]);
      swap_columns(quad.pair[0], quad.pair[1]);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        quad.x[i] = even[i];
        quad.x[2 + i] = odd[i];
        swap_columns(quad.x[i], quad.x[2 + i]);
      }
    }
  }
}

// Writes a fragment to global rows, its first element at gmem[0]; only rows below `rows` and columns below `cols`.
// By quads where rows allow it: four lanes write whole 32-byte sectors of 16-bit data, and all exchanges come before the first store.
// kBytes: the alignment of every row. With kAdd the values are added.
template <class T, int kBytes, bool kAdd, int kM, int kN, class A>
__device__ __forceinline__ void store_global(T* gmem, int64 row_stride, int rows, int cols, const Fragment<kM, kN, A>& f) {
  constexpr bool kVector = !kAdd && kIsSame<A, float> && kBytes >= 4 * static_cast<int>(sizeof(T)) && kN % 2 == 0;
  const int first = kVector ? lane() % 2 * 8 + lane() % 4 / 2 * 4 : fragment_col(0);  // of this lane's columns in the first tile, or pair
  const int room = cols - first;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * m + fragment_row(2 * half);
      T* const dst = gmem + row * row_stride + first;
      if constexpr (kVector) {
        Quad<T> quads[kN / 2];
        to_quads(quads, f.x[m], half);
        if (row >= rows) continue;
        const bool is_whole = cols == 8 * kN;
#pragma unroll
        for (int n = 0; n < kN; n += 2) {
          const Quad<T>& quad = quads[n / 2];
          if (is_whole || 8 * n + 4 <= room) {
            *reinterpret_cast<Quad<T>*>(dst + 8 * n) = quad;
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
              if (8 * n + i < room) dst[8 * n + i] = quad.x[i];
          }
        }
      } else if (row < rows) {
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (8 * n + i >= room) continue;
            const A value = f.x[m][n][2 * half + i];
            dst[8 * n + i] = convert<T>(kAdd ? value + convert<A>(dst[8 * n + i]) : value);
          }
      }
    }
}

}  // namespace cf::warp
