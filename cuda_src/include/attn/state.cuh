// One row of a partial result (out, lse), its types known at run time.
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

__device__ __forceinline__ int64 out_at(const State& s, const Row& r) {
  return r.batch * s.out_stride_b + r.row * s.out_stride_n + r.head * s.out_stride_h;
}
__device__ __forceinline__ int64 lse_at(const State& s, const Row& r) {
  return r.batch * s.lse_stride_b + r.head * s.lse_stride_h + r.row * s.lse_stride_n;
}

template <class A>
__device__ __forceinline__ A read(const void* data, int type, int64 i) {
  if (type == 0) return convert<A>(static_cast<const fp16*>(data)[i]);
  if (type == 1) return convert<A>(static_cast<const bf16*>(data)[i]);
  if (type == 2) return convert<A>(static_cast<const float*>(data)[i]);
  return convert<A>(static_cast<const double*>(data)[i]);
}

template <class A>
__device__ __forceinline__ void write(void* data, int type, int64 i, A x) {
  if (type == 0) static_cast<fp16*>(data)[i] = convert<fp16>(x);
  else if (type == 1) static_cast<bf16*>(data)[i] = convert<bf16>(x);
  else if (type == 2) static_cast<float*>(data)[i] = convert<float>(x);
  else static_cast<double*>(data)[i] = convert<double>(x);
}

template <class A>
__device__ __forceinline__ A read_lse(const State& s, const Row& r) { return read<A>(s.lse, s.lse_type, lse_at(s, r)); }

}  // namespace cf::attn
