// acc += A B for float, on the tensor cores: each number is the sum of two TF32 numbers, big and small, and a product that of three,
//
//   a b = a_small b_big + a_big b_small + a_big b_big          (the fourth is below float's last bit)
//
// Big and small leave out at most the last bit of a number. Tensor cores truncate as they accumulate, which over a long
// sum shows as a drift towards zero: so they sum kRun terms at most, and runs are added as floats are, rounded (Ootomo and Yokota,
// 2022). With kIsTf32, a constant of the kernel, a number is its big part alone.
#pragma once
#include "ptx/load_shared.cuh"
#include "ptx/mma.cuh"
#include "tile/cursor.cuh"
#include "tile/fragment.cuh"

namespace cf::warp {

// Four numbers of an operand along the contraction: [step][slot] of two mma steps. Which of the 16 indices a lane's slots stand for
// is free as long as A and B agree: 4 t + {0..3} where both have the contraction along their rows (kIsWide), else
// {2 t, 2 t + 1} and the same 8 further on (t = lane % 4), which meets no bank conflict in any order.
template <Major kMajor, bool kIsWide, int kExtent, class Tile>
struct FloatOperand {
  Cursor<Tile> cursor, odd;  // odd: of index 2 t + 1, in another row where the own axis runs along the rows
  int mn0;

  __device__ __forceinline__ FloatOperand(const Tile& tile, int mn0)
      : cursor(start(tile, mn0, 0)), odd(start(tile, mn0, 1)), mn0(kIsMoved<kMajor, kExtent> ? 0 : mn0) {}
  __device__ __forceinline__ static Cursor<Tile> start(const Tile& tile, int mn0, int slot) {
    const int t = lane() % 4, own = lane() / 4;
    if constexpr (kMajor == Major::K) return {tile, mn0 + own, (kIsWide ? 4 : 2) * t};
    else return {tile, 2 * t + slot, own + (kIsMoved<kMajor, kExtent> ? mn0 : 0)};
  }
  // Own index mn + lane / 4, contraction from k on.
  __device__ __forceinline__ void load(float (&x)[2][2], int mn, int k) const {
    if constexpr (kMajor == Major::MN) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        ptx::load_shared(x[step][0], cursor.at(k + 8 * step, mn0 + mn));
        ptx::load_shared(x[step][1], odd.at(k + 8 * step, mn0 + mn));
      }
    } else if constexpr (kIsWide) {
      ptx::load_shared(x[0][0], x[0][1], x[1][0], x[1][1], cursor.at(mn, k));
    } else {
#pragma unroll
      for (int step = 0; step < 2; ++step) ptx::load_shared(x[step][0], x[step][1], cursor.at(mn, k + 8 * step));
    }
  }
};

// A from a shared tile, as two operand rows of 8 a fragment.
template <class Operand>
struct SharedA {
  static constexpr int kUnroll = 1;  // of runs: a loop bounds the numbers under way
  Operand operand;
  __device__ __forceinline__ void load(float (&x)[2][2][2], int m, int k) const {
    operand.load(x[0], 16 * m, k);
    operand.load(x[1], 16 * m + 8, k);
  }
};
// A from an accumulator fragment: a lane's columns 2 t and 2 t + 1 of a 16x8 tile are the two slots of a step.
template <class F>
struct RegisterA {
  static constexpr int kUnroll = F::kN;  // registers have no index
  const F& fragment;
  __device__ __forceinline__ void load(float (&x)[2][2][2], int m, int k) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int slot = 0; slot < 2; ++slot) x[half][step][slot] = fragment.x[m][k / 8 + step][2 * half + slot];
  }
};

__device__ __forceinline__ void split(float x, uint32& big, uint32& small) {
  if constexpr (kIsTf32) {  // no small part brings a NaN back that the addition below carries into the sign
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(big) : "f"(x));
    return;
  }
  constexpr uint32 kHalf = 1 << 12, kKept = ~((1u << 13) - 1);  // of the 13 bits that TF32 lacks
  big = (__float_as_uint(x) + kHalf) & kKept;
  small = __float_as_uint(x - __uint_as_float(big));
}

// sum += A B over one step of 16 along the contraction; B's tiles from `group` on.
template <int kM, int kGroup, class SourceA, class OperandB>
__device__ __forceinline__ void multiply_step(Fragment<kM, kGroup>& sum, const SourceA& a_source, const OperandB& b_source, int group, int k) {
  uint32 a_big[2][kM][4], a_small[2][kM][4];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    float x[2][2][2];
    a_source.load(x, m, k);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int step = i / 4, slot = i / 2 % 2, half = i % 2;
      split(x[half][step][slot], a_big[step][m][2 * slot + half], a_small[step][m][2 * slot + half]);
    }
  }
#pragma unroll
  for (int n = 0; n < kGroup; ++n) {
    float x[2][2];
    b_source.load(x, 8 * (group + n), k);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32 big[2], small[2];
      split(x[step][0], big[0], small[0]);
      split(x[step][1], big[1], small[1]);
      if constexpr (!kIsTf32) {
#pragma unroll
        for (int m = 0; m < kM; ++m) ptx::mma_m16n8k8(sum.x[m][n], a_small[step][m], big[0], big[1]);
#pragma unroll
        for (int m = 0; m < kM; ++m) ptx::mma_m16n8k8(sum.x[m][n], a_big[step][m], small[0], small[1]);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) ptx::mma_m16n8k8(sum.x[m][n], a_big[step][m], big[0], big[1]);
    }
  }
}

constexpr int kRun = 32;  // terms that tensor cores add up by themselves

template <int kK, int kM, int kN, class SourceA, class OperandB>
__device__ __forceinline__ void multiply(Fragment<kM, kN>& acc, const SourceA& a_source, const OperandB& b_source) {
  constexpr int kGroup = kN % 4 == 0 ? 4 : kN % 3 == 0 ? 3 : kN % 2 == 0 ? 2 : 1;  // tiles of B at a time
  static_assert(kK % 16 == 0);
#pragma unroll
  for (int group = 0; group < kN; group += kGroup)
#pragma unroll SourceA::kUnroll
    for (int run = 0; run < kK; run += kRun) {
      Fragment<kM, kGroup> sum;
      sum.zero();
#pragma unroll
      for (int k = run; k < min_of(run + kRun, kK); k += 16) multiply_step(sum, a_source, b_source, group, k);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kGroup; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc.x[m][group + n][i] += sum.x[m][n][i];
    }
}

// A's rows from m0 on, B's columns from n0 on, the contraction over [0, kK).
template <Major kMajorA, Major kMajorB, int kK, int kM, int kN, class TileA, class TileB>
__device__ __forceinline__ void matmul_float(Fragment<kM, kN>& acc, const TileA& a_smem, int m0, const TileB& b_smem, int n0) {
  constexpr bool kIsWide = kMajorA == Major::K && kMajorB == Major::K;
  using OperandA = FloatOperand<kMajorA, kIsWide, 16 * kM, TileA>;
  multiply<kK>(acc, SharedA<OperandA>{{a_smem, m0}}, FloatOperand<kMajorB, kIsWide, 8 * kN, TileB>(b_smem, n0));
}

// The same with A in registers and B's own axis along its rows.
template <int kM, int kKTiles, int kN, class TileB>
__device__ __forceinline__ void matmul_float(Fragment<kM, kN>& acc, const Fragment<kM, kKTiles>& a, const TileB& b_smem) {
  using OperandB = FloatOperand<Major::MN, false, 8 * kN, TileB>;
  multiply<8 * kKTiles>(acc, RegisterA<Fragment<kM, kKTiles>>{a}, OperandB(b_smem, 0));
}

}  // namespace cf::warp
