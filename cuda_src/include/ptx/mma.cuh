// d += a b for one 16x8 tile on the tensor cores, float accumulation. 16-bit types:
//   a: 16x16, rows g and g+8, columns 2t.. and 2t+8..      b: 16x8, rows 2t.. and 2t+8.., column g
//   d: rows g and g+8, columns 2t and 2t+1                 where g = lane / 4, t = lane % 4
#pragma once
#include "types.cuh"

namespace cf::ptx {

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  static_assert(kIsHalf<T>);
  if constexpr (kIsSame<T, bf16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// TF32, floats whose 13 lowest bits are ignored:
//   a: 16x8, rows g and g+8 of column t, then of column t+4      b: 8x8, rows t and t+4, column g      d: as above
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace cf::ptx
