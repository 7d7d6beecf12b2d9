// A block's threads in groups that work apart: kThreads along x, a group for each y.
#pragma once
#include "ptx/mbarrier.cuh"
#include "types.cuh"

namespace cf::cta {

// Of the caller's group. Barrier 0 is the whole block's.
template <int kThreads, int kGroups>
__device__ __forceinline__ void sync_group() {
  if constexpr (kThreads == kWarpSize) {
    __syncwarp();
  } else if constexpr (kGroups == 1) {
    __syncthreads();
  } else {
    ptx::named_barrier_sync(1 + threadIdx.y, kThreads);
  }
}

}  // namespace cf::cta
