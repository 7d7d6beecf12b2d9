// Barriers in shared memory that count arrivals and bytes of bulk copies (sm_90), and named barriers of part of a block.
//
// A wait names the parity of the phase that must have ended: of the fresh barrier's first phase 0; a wait for parity 1 passes at once.
#pragma once
#include "ptx/cp_async.cuh"

namespace cf::ptx {

using Barrier = uint64;

__device__ __forceinline__ void mbarrier_init(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
// After all inits and before the block's own barrier: the asynchronous proxy sees them too.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
// Arrives once this thread's asynchronous copies so far are done.
__device__ __forceinline__ void mbarrier_arrive_behind_copies(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
// Arrives, and lets the phase end only after so many bytes of copies.
__device__ __forceinline__ void mbarrier_expect(Barrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(Barrier& barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(&barrier)), "r"(parity) : "memory");
}

// Of `threads` threads, those that sync and those that only arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace cf::ptx
