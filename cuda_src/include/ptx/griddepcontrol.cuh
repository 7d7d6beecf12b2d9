// Kernels that overlap at their edges: programmatic dependent launch, sm_90 and later. The host launches all but a call's first kernel, and
// first ones of merges and of split keys, so that they may start early (launch.py); each waits here before it touches what is in front.
#pragma once
#include "types.cuh"

namespace cf::ptx {

// The next kernel's blocks may take what this kernel's leave, once each of them has said so.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until the kernel before is done and all that it wrote can be seen; of a kernel that did not start early there is none.
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace cf::ptx
