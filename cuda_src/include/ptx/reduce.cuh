// Additions into global memory without a result.
#pragma once
#include "types.cuh"

namespace cf::ptx {

#if __CUDA_ARCH__ >= 900
template <class T>
constexpr bool kReducesVectors = kIsSame<T, float>;
#else
template <class T>
constexpr bool kReducesVectors = false;
#endif

// Lane values x[0..3] of one fragment, added to fragment[...] in the order that the instruction likes best:
// one 16-byte reduction a lane for float from sm_90 on, else four coalesced ones.
template <class T>
__device__ __forceinline__ void reduce_add_fragment(T* fragment, int lane, const T (&x)[4]) {
  if constexpr (kReducesVectors<T>) {
    asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};"
                 ::"l"(fragment + 4 * lane), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) atomicAdd(fragment + 32 * i + lane, x[i]);
  }
}

// Reads back what reduce_add_fragment summed.
template <class T>
__device__ __forceinline__ void load_fragment(T (&x)[4], const T* fragment, int lane) {
  if constexpr (kReducesVectors<T>) {
    const float4 v = *reinterpret_cast<const float4*>(fragment + 4 * lane);
    x[0] = v.x; x[1] = v.y; x[2] = v.z; x[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = fragment[32 * i + lane];
  }
}

}  // namespace cf::ptx
