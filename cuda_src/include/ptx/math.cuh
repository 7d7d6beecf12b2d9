// Arithmetic for float and double under one name; float's special functions are the hardware's.
#pragma once
#include "types.cuh"

namespace cf::ptx {

// 2^x; 2^-inf is 0, a NaN stays a NaN.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double exp2(double x) { return ::exp2(x); }

__device__ __forceinline__ float log2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double log2(double x) { return ::log2(x); }

// 1 / x of a normal number, within an ulp.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double reciprocal(double x) { return 1 / x; }

// Absolute error at most 2^-11 (contract, Forward step 2 allows it for 16-bit inputs).
__device__ __forceinline__ float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float tanh(float x) { return ::tanhf(x); }
__device__ __forceinline__ double tanh(double x) { return ::tanh(x); }

__device__ __forceinline__ float fma(float x, float y, float z) { return __fmaf_rn(x, y, z); }
__device__ __forceinline__ double fma(double x, double y, double z) { return __fma_rn(x, y, z); }

// A product that stays rounded: never contracted into an FMA.
__device__ __forceinline__ float mul(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double mul(double x, double y) { return __dmul_rn(x, y); }

__device__ __forceinline__ float abs(float x) { return ::fabsf(x); }
__device__ __forceinline__ double abs(double x) { return ::fabs(x); }

// x, and not what it was computed from, which the compiler might compute again: a conversion from double stalls a loop.
__device__ __forceinline__ float settled(float x) {
  asm volatile("" : "+f"(x));
  return x;
}
__device__ __forceinline__ double settled(double x) { return x; }
__device__ __forceinline__ int settled(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ int64 settled(int64 x) {
  asm volatile("" : "+l"(x));
  return x;
}

// The larger one; a NaN loses.
__device__ __forceinline__ float max(float x, float y) { return ::fmaxf(x, y); }
__device__ __forceinline__ double max(double x, double y) { return ::fmax(x, y); }

}  // namespace cf::ptx
