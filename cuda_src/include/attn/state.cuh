// One row of a partial result (out, lse), its type known at run time.
#pragma once
#include "params.cuh"

namespace cf::attn {

struct Row {
  int batch;
  int row;
  int head;
};

// One warp per (row, head) of [B, N, H]; `batch` reaches the problem's own past the end.
__device__ __forceinline__ Row row_of_warp(int64 item, int len, int heads) {
  return {static_cast<int>(item / heads / len), static_cast<int>(item / heads % len), static_cast<int>(item % heads)};
}

__device__ __forceinline__ float* lse_of(const State& s, const Row& r) {
  return static_cast<float*>(s.lse) + r.batch * s.lse_stride_b + r.head * s.lse_stride_h + r.row * s.lse_stride_n;
}

__device__ __forceinline__ int64 offset_of(const State& s, const Row& r) {
  return r.batch * s.out_stride_b + r.row * s.out_stride_n + r.head * s.out_stride_h;
}

__device__ __forceinline__ float read(const State& s, int64 i) {
  if (s.out_type == 0) return to_float(static_cast<const fp16*>(s.out)[i]);
  if (s.out_type == 1) return to_float(static_cast<const bf16*>(s.out)[i]);
  return static_cast<const float*>(s.out)[i];
}

__device__ __forceinline__ void write(const State& s, int64 i, float x) {
  if (s.out_type == 0) static_cast<fp16*>(s.out)[i] = from_float<fp16>(x);
  else if (s.out_type == 1) static_cast<bf16*>(s.out)[i] = from_float<bf16>(x);
  else static_cast<float*>(s.out)[i] = x;
}

}  // namespace cf::attn
