// What the Hopper kernels share: tiles in panels as the copy engine brings them, rings of such tiles, and a warpgroup's accumulators.
#pragma once
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"

namespace cf::warpgroup {

constexpr int kThreads = 128;
constexpr int kRows = 64;      // of its accumulators
constexpr int kWarpRows = 16;  // of one of its warps
constexpr int kPanel = 64;     // columns of a panel, whose rows of 128 bytes are swizzled over 1024

// A tile's panels side by side, each of all rows.
template <class T, int kPanels, int kTileRows>
using Panels = T[kPanels][kTileRows][kPanel];

template <int kN>
__device__ __forceinline__ float (&registers(warp::Fragment<1, kN>& f))[4 * kN] { return reinterpret_cast<float (&)[4 * kN]>(f.x); }

// Where a role stands in a ring of stages. A phase's parity is what its barriers are waited for by.
template <int kCount>
struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage < kCount) return;
    stage = 0;
    parity ^= 1;
  }
};

// By one thread, whose arrival at `full` goes with the copies.
template <class T, int kPanels, int kTileRows>
__device__ __forceinline__ void load(Panels<T, kPanels, kTileRows>& tile, const TensorMap& map, ptx::Barrier& full, int row, int head,
                                     int batch) {
  ptx::mbarrier_expect(full, sizeof(tile));
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) ptx::tma_load(tile[panel], map, full, panel * kPanel, row, head, batch);
}

// The same of rows that are (query, head of a group), from a map that has the heads of a group as an axis.
template <class T, int kPanels, int kTileRows>
__device__ __forceinline__ void load_heads(Panels<T, kPanels, kTileRows>& tile, const TensorMap& map, ptx::Barrier& full, int query, int group,
                                           int batch) {
  ptx::mbarrier_expect(full, sizeof(tile));
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) ptx::tma_load(tile[panel], map, full, panel * kPanel, 0, query, group, batch);
}

// 16 columns of an accumulator as pairs of 16 bits: an operand of the next product.
template <class T, int kN>
__device__ __forceinline__ void pack_pairs(uint32 (&pairs)[4], const warp::Fragment<1, kN>& f, int step) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = f.x[0][2 * step + i / 2] + i % 2 * 2;
    pairs[i] = pack<T>(pair[0], pair[1]);
  }
}

}  // namespace cf::warpgroup
