// Where a lane finds its part of a shared tile's blocks.
#pragma once
#include "ptx/cp_async.cuh"
#include "tile/shared.cuh"

namespace cf::warp {

// Which axis of an operand runs along a row of its shared tile: the contraction (K) or the result's own (MN).
enum class Major { K, MN };

// Blocks are at multiples of 8 rows and of whole chunks. Moving by blocks keeps the row's phase, and below the swizzle's bits the
// address is otherwise zero: a block's address is the first one's with one XOR and an immediate offset.
template <class Tile>
struct Cursor {
  static constexpr int kBytes = sizeof(typename Tile::Type);
  uint32 address;  // of the lane's element in the first block

  __device__ __forceinline__ Cursor(const Tile& tile, int row, int col)
      : address(ptx::shared_address(tile.data + row * Tile::kCols) + (col / Tile::kChunk ^ Tile::phase(row)) * 16 +
                col % Tile::kChunk * kBytes) {}
  __device__ __forceinline__ uint32 at(int rows, int cols) const {
    const int chunk = cols / Tile::kChunk, swizzled = chunk & Tile::kPhaseMask;
    return (address ^ swizzled * 16) + (chunk - swizzled) * 16 + rows * Tile::kCols * kBytes;
  }
};

// Indices within a share of a power of two have no bit in common with where the share begins: a cursor can begin there.
template <Major kMajor, int kExtent>
constexpr bool kIsMoved = kMajor == Major::MN && (kExtent & (kExtent - 1)) == 0;

}  // namespace cf::warp
