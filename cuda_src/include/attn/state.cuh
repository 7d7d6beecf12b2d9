// One row of a partial result (out, lse), by a group of lanes of one warp, kColumns neighbouring columns a lane.
#pragma once
#include "attn/row.cuh"
#include "params.cuh"
#include "ptx/math.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/store_global.cuh"

namespace cf::attn {

static_assert(kMergeStates % kGroup == 0, "a lane keeps the lse of every kGroup-th state");

__device__ __forceinline__ int64 out_at(const State& s, const Row& r) {
  return r.batch * s.out_stride_b + r.row * s.out_stride_n + r.head * s.out_stride_h;
}
__device__ __forceinline__ int64 lse_at(const State& s, const Row& r) {
  return r.batch * s.lse_stride_b + r.head * s.lse_stride_h + r.row * s.lse_stride_n;
}

// An element of a type that is known at run time.
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

// A float accumulator means that every lse is of floats.
template <class A>
__device__ __forceinline__ A read_lse(const State& s, const Row& r) {
  return read<A>(s.lse, kIsSame<A, float> ? 2 : s.lse_type, lse_at(s, r));
}
template <class A>
__device__ __forceinline__ void write_lse(const State& s, const Row& r, A lse) {
  write(s.lse, kIsSame<A, float> ? 2 : s.lse_type, lse_at(s, r), lse);
}

// A lane's columns from `col` on. With kIsUniform the elements are known to be T, and lie at multiples of their own size up to 16 bytes;
// else there is one, of the state's type, and read as an A.
template <class T, int kColumns>
struct alignas(min_of<int>(16, kColumns * sizeof(T))) Columns { T x[kColumns]; };

template <bool kIsUniform, class T, int kColumns, class A>
struct ColumnsOf { using Type = Columns<T, kColumns>; };
template <class T, int kColumns, class A>
struct ColumnsOf<false, T, kColumns, A> { using Type = Columns<A, kColumns>; };

template <bool kIsUniform, class T, int kColumns, class A>
__device__ __forceinline__ void read_columns(typename ColumnsOf<kIsUniform, T, kColumns, A>::Type& columns, const State& s, const Row& r, int col) {
  const int64 at = out_at(s, r) + col;
  if constexpr (kIsUniform) {
    columns = *reinterpret_cast<const Columns<T, kColumns>*>(static_cast<const T*>(s.out) + at);
  } else {
    static_assert(kColumns == 1);
    columns.x[0] = read<A>(s.out, s.out_type, at);
  }
}

// All columns of this lane on their way to L2, whether or not they turn out to be used.
template <bool kIsUniform, class T, int kColumns>
__device__ __forceinline__ void prefetch_columns(const State& s, const Row& r, int head_dim) {
  if constexpr (kIsUniform)
    for (int col = r.lane * kColumns; col < head_dim; col += kGroup * kColumns) ptx::prefetch(static_cast<const T*>(s.out) + out_at(s, r) + col);
}

template <bool kIsUniform, class T, int kColumns, class A>
__device__ __forceinline__ void write_columns(const State& s, const Row& r, int col, const A (&x)[kColumns]) {
  const int64 at = out_at(s, r) + col;
  if constexpr (kIsUniform) {
    T* const out = static_cast<T*>(s.out) + at;
    if constexpr (kIsHalf<T> && kColumns % 8 == 0) {
#pragma unroll
      for (int i = 0; i < kColumns; i += 8) {
        uint32 word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) word[j] = pack<T>(static_cast<float>(x[i + 2 * j]), static_cast<float>(x[i + 2 * j + 1]));
        ptx::store_global(out + i, word);
      }
    } else {
      Columns<T, kColumns> columns;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) columns.x[i] = convert<T>(x[i]);
      *reinterpret_cast<Columns<T, kColumns>*>(out) = columns;
    }
  } else {
    write(s.out, s.out_type, at, x[0]);
  }
}

// Over the lanes of a row's group.
template <class T>
__device__ __forceinline__ T group_max(T x) {
#pragma unroll
  for (int d = kGroup / 2; d > 0; d /= 2) x = ptx::max(x, __shfl_xor_sync(kFullWarp, x, d));
  return x;
}
template <class T>
__device__ __forceinline__ T group_sum(T x) {
#pragma unroll
  for (int d = kGroup / 2; d > 0; d /= 2) x += __shfl_xor_sync(kFullWarp, x, d);
  return x;
}

}  // namespace cf::attn
