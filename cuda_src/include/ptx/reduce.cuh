// Float additions into global memory without a result.
#pragma once
#include "types.cuh"

namespace cf::ptx {

// Lane values x[0..3] of one fragment, added to fragment[...] in the order that the instruction likes best:
// one 16-byte reduction a lane from sm_90 on, four coalesced 4-byte reductions before.
__device__ __forceinline__ void reduce_add_fragment(float* fragment, int lane, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};"
               ::"l"(fragment + 4 * lane), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(fragment + 32 * i + lane, x[i]);
#endif
}

// Reads back what reduce_add_fragment summed.
__device__ __forceinline__ void load_fragment(float (&x)[4], const float* fragment, int lane) {
#if __CUDA_ARCH__ >= 900
  const float4 v = *reinterpret_cast<const float4*>(fragment + 4 * lane);
  x[0] = v.x; x[1] = v.y; x[2] = v.z; x[3] = v.w;
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = fragment[32 * i + lane];
#endif
}

}  // namespace cf::ptx
