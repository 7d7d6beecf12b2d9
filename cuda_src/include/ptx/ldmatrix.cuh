// Four 8x8 matrices of 16-bit elements from shared memory; lane l gives the shared address of row l % 8 of matrix l / 8.
#pragma once
#include "ptx/cp_async.cuh"

namespace cf::ptx {

template <bool kTranspose>
__device__ __forceinline__ void ldmatrix(uint32 (&r)[4], uint32 address) {
  if constexpr (kTranspose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

}  // namespace cf::ptx
