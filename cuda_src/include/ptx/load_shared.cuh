// Floats from shared memory by their 32-bit shared address.
#pragma once
#include "types.cuh"

namespace cf::ptx {

__device__ __forceinline__ void load_shared(float& x, uint32 address) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(float& x, float& y, uint32 address) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(float& x, float& y, float& z, float& w, uint32 address) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x), "=f"(y), "=f"(z), "=f"(w) : "r"(address) : "memory");
}

}  // namespace cf::ptx
