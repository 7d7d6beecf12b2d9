// Sixteen bytes to global memory in one instruction, where the compiler would take a store apart.
#pragma once
#include "types.cuh"

namespace cf::ptx {

__device__ __forceinline__ void store_global(void* dst, const uint32 (&word)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(dst), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]) : "memory");
}

}  // namespace cf::ptx
