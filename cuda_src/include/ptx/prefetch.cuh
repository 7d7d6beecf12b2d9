// Global memory into L2.
#pragma once
#include "types.cuh"

namespace cf::ptx {

// The line of an address.
__device__ __forceinline__ void prefetch(const void* src) { asm volatile("prefetch.global.L2 [%0];" ::"l"(src) : "memory"); }

}  // namespace cf::ptx
