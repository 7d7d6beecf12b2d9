// Kernels that overlap at their edges: programmatic dependent launch, sm_90 and later. The host launches all but a call's first kernel, and every
// merge, so that they may start early (launch.py), and each of those waits here before it touches what the one in front may.
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
