// Turns that blocks take through a counter in global memory: whoever has done its part, by bulk copies too, adds to it.
#pragma once
#include "types.cuh"

namespace cf::ptx {

// Returns once `turn` others have passed theirs on, or more where sequences overlap, which only garbage offsets do. What they did before is
// then to be seen, by bulk copies behind a fence.
__device__ __forceinline__ void await_turn(const int* counter, int turn) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (now < turn);
}
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Once this thread's bulk copies are done.
__device__ __forceinline__ void pass_turn(int* counter) {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace cf::ptx
