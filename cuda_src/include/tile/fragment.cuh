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
// The same number in every lane, and known to be: it stays in a uniform register, and what it decides is no divergence.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(kFullWarp, x, 0); }
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

// Lane pairs swap a word each.
template <class Word>
__device__ __forceinline__ void swap_words(Word& even, Word& odd) {
  const bool is_odd = lane() & 1;
  const Word got = __shfl_xor_sync(kFullWarp, is_odd ? even : odd, 1);
  even = is_odd ? got : even;
  odd = is_odd ? odd : got;
}

// Four columns of a row: two each of two neighbouring tiles, as accumulators have them, or four consecutive ones of one of the two tiles,
// as memory has them.
template <class T>
union alignas(min_of(4 * static_cast<int>(sizeof(T)), 16)) Quad {
  T x[4];
  uint32 pair[2];  // of 16 bits each

  // From one to the other.
  __device__ __forceinline__ void swap() {
    if constexpr (kIsHalf<T>) {
      swap_words(pair[0], pair[1]);
    } else {
      swap_words(x[0], x[2]);
      swap_words(x[1], x[3]);
    }
  }
};

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
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        quad.x[i] = even[i];
        quad.x[2 + i] = odd[i];
      }
    }
    quad.swap();
  }
}

// Eight consecutive columns of a row of 16 bits, out of two neighbouring quads of four tiles: of tile 4 i + lane % 4.
template <class T>
union alignas(16) Oct {
  T x[8];
  uint32 pair[4];
  __device__ __forceinline__ Oct(const Quad<T>& first, const Quad<T>& second) {
    const bool is_second = lane() & 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32 got = __shfl_xor_sync(kFullWarp, is_second ? first.pair[i] : second.pair[i], 2);
      pair[i] = is_second ? got : first.pair[i];
      pair[2 + i] = is_second ? second.pair[i] : got;
    }
  }
};

// Consecutive columns to a row with room for `room` of them.
template <int kCount, class Chunk, class T>
__device__ __forceinline__ void store_chunk(T* dst, const Chunk& chunk, bool is_whole, int room) {
  if (is_whole || kCount <= room) {
    *reinterpret_cast<Chunk*>(dst) = chunk;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i < room) dst[i] = chunk.x[i];
  }
}

// Writes a fragment to global rows, its first element at gmem[0]; only rows below `rows` and columns below `cols`.
// Lanes exchange columns first, so that each writes up to 16 bytes at once and a quad of them whole sectors. kBytes: the alignment of every
// row. With kAdd the values are added.
template <class T, int kBytes, bool kAdd, int kM, int kN, class A>
__device__ __forceinline__ void store_global(T* gmem, int64 row_stride, int rows, int cols, const Fragment<kM, kN, A>& f) {
  constexpr bool kVector = !kAdd && kIsSame<A, float> && kBytes >= 4 * static_cast<int>(sizeof(T)) && kN % 2 == 0;
  constexpr bool kOcts = kVector && kIsHalf<T> && kBytes >= 16 && kN % 4 == 0;
  const int first = kOcts ? lane() % 4 * 8 : kVector ? lane() % 2 * 8 + lane() % 4 / 2 * 4 : fragment_col(0);  // of this lane's columns
  const int room = cols - first;
  const bool is_whole = cols == 8 * kN;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * m + fragment_row(2 * half);
      T* const dst = gmem + row * row_stride + first;
      if constexpr (kVector) {
        Quad<T> quads[kN / 2];
        to_quads(quads, f.x[m], half);
        if constexpr (kOcts) {
#pragma unroll
          for (int n = 0; n < kN; n += 4) {
            const Oct<T> oct(quads[n / 2], quads[n / 2 + 1]);
            if (row < rows) store_chunk<8>(dst + 8 * n, oct, is_whole, room - 8 * n);
          }
        } else if (row < rows) {
#pragma unroll
          for (int n = 0; n < kN; n += 2) store_chunk<4>(dst + 8 * n, quads[n / 2], is_whole, room - 8 * n);
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

// Writes one row of a fragment, each lane its own pairs of columns: for rows that lie apart, or are few.
template <int kBytes, class T, int kM, int kN, class A>
__device__ __forceinline__ void store_row(T* dst, int cols, const Fragment<kM, kN, A>& f, int m, int half) {
  constexpr bool kPairs = kBytes >= 2 * static_cast<int>(sizeof(T)) && (!kIsHalf<T> || kIsSame<A, float>);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const int col = 8 * n + fragment_col(0);
    const A lo = f.x[m][n][2 * half], hi = f.x[m][n][2 * half + 1];
    if (kPairs && col + 1 < cols) {
      if constexpr (kIsHalf<T>) {
        *reinterpret_cast<uint32*>(dst + col) = pack<T>(lo, hi);
      } else {
        *reinterpret_cast<tile::Pair<T>*>(dst + col) = {{T(lo), T(hi)}};
      }
    } else {
      if (col < cols) dst[col] = convert<T>(lo);
      if (col + 1 < cols) dst[col + 1] = convert<T>(hi);
    }
  }
}

}  // namespace cf::warp
