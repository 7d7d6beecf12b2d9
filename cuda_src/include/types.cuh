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
constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;
constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

template <class T>
constexpr bool kIsHalf = sizeof(T) == 2;

template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;

// What sums and statistics are kept in: double for double, else float.
template <class T>
struct AccumOf { using Type = float; };
template <>
struct AccumOf<double> { using Type = double; };

template <class To, class From>
__device__ __forceinline__ To convert(From x) {
  if constexpr (kIsSame<To, From>) return x;
  else if constexpr (kIsSame<From, bf16>) return convert<To>(__bfloat162float(x));
  else if constexpr (kIsSame<From, fp16>) return convert<To>(__half2float(x));
  else if constexpr (kIsSame<To, bf16>) return __float2bfloat16_rn(static_cast<float>(x));
  else if constexpr (kIsSame<To, fp16>) return __float2half_rn(static_cast<float>(x));
  else return static_cast<To>(x);
}

// Two floats rounded into one register, `lo` at the lower address.
template <class T>
__device__ __forceinline__ uint32 pack(float lo, float hi) {
  static_assert(kIsHalf<T>);
  uint32 r;
  if constexpr (kIsSame<T, bf16>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// The lower (0) or the upper (1) of two, as a float.
template <class T>
__device__ __forceinline__ float unpack(uint32 pair, int i) {
  static_assert(kIsHalf<T>);
  if constexpr (kIsSame<T, bf16>) return __uint_as_float(i ? pair & 0xffff0000u : pair << 16);
  else return __half2float(__ushort_as_half(static_cast<unsigned short>(i ? pair >> 16 : pair)));
}

template <bool kIsFirst, class A, class B>
struct ChooseOf { using Type = A; };
template <class A, class B>
struct ChooseOf<false, A, B> { using Type = B; };

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

__host__ __device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

template <class T>
__host__ __device__ constexpr T min_of(T a, T b) { return a < b ? a : b; }
template <class T>
__host__ __device__ constexpr T max_of(T a, T b) { return a > b ? a : b; }
template <class T>
__device__ __forceinline__ T clamp(T x, T lo, T hi) { return min_of(max_of(x, lo), hi); }

}  // namespace cf
