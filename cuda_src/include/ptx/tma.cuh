// Bulk copies between global and shared memory by the copy engine (sm_90): floats in a row, and boxes of a 4-D tensor (column, row, head, batch) or
// a 5-D one (column, head of a group, row, group, batch), whose rows arrive swizzled as the map says. What lies outside the tensor arrives as zeros, and is not written.
#pragma once
#include "params.cuh"
#include "ptx/mbarrier.cuh"

namespace cf::ptx {

// The box's bytes are counted on the barrier, those outside the tensor too.
__device__ __forceinline__ void tma_load(void* dst, const TensorMap& map, Barrier& barrier, int col, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
          shared_address(dst)), "l"(&map), "r"(col), "r"(row), "r"(head), "r"(batch), "r"(shared_address(&barrier)) : "memory");
}
__device__ __forceinline__ void tma_load(void* dst, const TensorMap& map, Barrier& barrier, int col, int head, int row, int group, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(
          shared_address(dst)), "l"(&map), "r"(col), "r"(head), "r"(row), "r"(group), "r"(batch), "r"(shared_address(&barrier)) : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* src, int col, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map), "r"(col), "r"(row),
               "r"(head), "r"(batch), "r"(shared_address(src)) : "memory");
}
__device__ __forceinline__ void bulk_store(float* dst, const float* src, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(shared_address(src)), "r"(bytes) : "memory");
}
// Adds `bytes` of floats; both addresses and the count are multiples of 16.
__device__ __forceinline__ void bulk_reduce_add(float* dst, const float* src, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst), "r"(shared_address(src)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until this thread's stores and reductions, but for the kPending youngest groups, have read their source.
template <int kPending = 0>
__device__ __forceinline__ void tma_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory"); }
// What was written by ordinary stores becomes visible to bulk copies and wgmma.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace cf::ptx
