// One row of [B, N, H, D], by a group of lanes of one warp.
#pragma once
#include "types.cuh"

namespace cf::attn {

constexpr int kGroup = 8;  // lanes of a row

struct Row {
  int batch;
  int row;
  int head;
  int lane;  // of the row's group
};

// The row of this thread of [B, N, H]; `batch` reaches the problem's own past the end.
template <int kThreads>
__device__ __forceinline__ Row row_of_thread(int len, int heads) {
  Row r;
  r.lane = threadIdx.x % kGroup;
  const int64 item = static_cast<int64>(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup;
  const int64 position = item >> 32 ? item / heads : static_cast<uint32>(item) / static_cast<uint32>(heads);  // 64 bits are slow
  r.head = static_cast<int>(item - position * heads);
  const int64 batch = position >> 32 ? position / len : static_cast<uint32>(position) / static_cast<uint32>(len);
  r.batch = static_cast<int>(batch);
  r.row = static_cast<int>(position - batch * len);
  return r;
}

}  // namespace cf::attn
