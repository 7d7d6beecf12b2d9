// Scalar types and conversions. Kernels see `Element` (the type of q, k, v, from the constants) and float accumulators.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cf {

using int64 = long long;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using bf16 = __nv_bfloat16;
using fp16 = __half;

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

template <class T>
constexpr bool kIsHalf = sizeof(T) == 2;  // runs on tensor cores; float runs on FMA

template <class A, class B>
struct IsSame { static constexpr bool value = false; };
template <class A>
struct IsSame<A, A> { static constexpr bool value = true; };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (IsSame<T, bf16>::value) return __float2bfloat16_rn(x);
  else if constexpr (IsSame<T, fp16>::value) return __float2half_rn(x);
  else return x;
}

// Two floats rounded into one register, `lo` at the lower address.
template <class T>
__device__ __forceinline__ uint32 pack(float lo, float hi) {
  static_assert(kIsHalf<T>);
  uint32 r;
  if constexpr (IsSame<T, bf16>::value) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <class T>
__host__ __device__ constexpr T min_of(T a, T b) { return a < b ? a : b; }
template <class T>
__host__ __device__ constexpr T max_of(T a, T b) { return a > b ? a : b; }
template <class T>
__device__ __forceinline__ T clamp(T x, T lo, T hi) { return min_of(max_of(x, lo), hi); }

}  // namespace cf
