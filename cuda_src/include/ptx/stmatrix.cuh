// Four 8x8 matrices of 16-bit elements into shared memory (sm_90); lane l gives the shared address of row l % 8 of matrix l / 8.
#pragma once
#include "types.cuh"

namespace cf::ptx {

__device__ __forceinline__ void stmatrix(uint32 address, const uint32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Each matrix transposed: the addresses are of its columns.
__device__ __forceinline__ void stmatrix_transposed(uint32 address, const uint32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3]) : "memory");
}

}  // namespace cf::ptx
