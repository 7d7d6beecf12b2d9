// Asynchronous copies from global to shared memory (sm_80 and later).
#pragma once
#include "types.cuh"

namespace cf::ptx {

__device__ __forceinline__ uint32 shared_address(const void* p) { return static_cast<uint32>(__cvta_generic_to_shared(p)); }

// Copies `valid` of kBytes bytes and fills the rest with zeros; `valid` = 0 reads nothing. Both addresses are kBytes-aligned.
template <int kBytes>
__device__ __forceinline__ void cp_async(uint32 dst, const void* src, int valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src), "n"(kBytes), "r"(valid) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's youngest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

}  // namespace cf::ptx
