// Registers that warpgroups hand over to each other (sm_90a). All warps of a warpgroup ask together; taking waits until they are free.
#pragma once
#include "types.cuh"

namespace cf::ptx {

template <int kLeft>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLeft)); }
template <int kThen>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kThen)); }

}  // namespace cf::ptx
