// d += a b for one warpgroup on the tensor cores (sm_90a): d is 64 x N floats, a 64 x 16 and b 16 x N elements of 16 bits.
//
// Warp w of the group holds rows 16 w to 16 w + 15 of d, in the layout of warp::Fragment<1, N / 8>. Operands in shared memory are named
// by descriptors; a may lie in registers, four pairs of the same layout. All four warps issue together, converged. From its issue to its
// wait a product owns its registers, and wgmma_fence comes before the first product after others touched them.
#pragma once
#include "ptx/cp_async.cuh"

namespace cf::ptx {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending of the youngest groups still run.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// Keeps the compiler from moving copies of an accumulator into the time in which a product owns it.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// An operand in panels of 64 columns, whose rows of 128 bytes are swizzled over 1024. `panel_bytes`: from panel to panel, where the
// operand's own axis runs along the rows; else it is not looked at.
__device__ __forceinline__ uint64 descriptor(uint32 address, int panel_bytes) {
  constexpr uint64 kSwizzle128 = uint64{1} << 62, kEightRows = uint64{1024 / 16} << 32;
  return kSwizzle128 | kEightRows | static_cast<uint64>(panel_bytes / 16) << 16 | (address & 0x3FFFF) / 16;
}
// The operand `bytes` further on: addresses stay below 2^18, so nothing is carried out of their field.
__device__ __forceinline__ uint64 advance(uint64 descriptor, uint32 bytes) { return descriptor + bytes / 16; }

#define CF_8(d, i) \
  "+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3]), "+f"((d)[(i) + 4]), "+f"((d)[(i) + 5]), "+f"((d)[(i) + 6]), \
  "+f"((d)[(i) + 7])
#define CF_16(d, i) CF_8(d, i), CF_8(d, (i) + 8)
#define CF_32(d, i) CF_16(d, i), CF_16(d, (i) + 16)
#define CF_64(d, i) CF_32(d, i), CF_32(d, (i) + 32)
#define CF_LIST_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define CF_LIST_48 CF_LIST_32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define CF_LIST_64 CF_LIST_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define CF_LIST_80 CF_LIST_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define CF_LIST_96 CF_LIST_80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define CF_LIST_112 CF_LIST_96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define CF_LIST_128 CF_LIST_112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define CF_LIST_160 CF_LIST_128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define CF_LIST_176 CF_LIST_160 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define CF_LIST_192 CF_LIST_176 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define CF_LIST_256 \
  CF_LIST_192 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define CF_REGISTERS_32(d) CF_16(d, 0)
#define CF_REGISTERS_48(d) CF_16(d, 0), CF_8(d, 16)
#define CF_REGISTERS_64(d) CF_32(d, 0)
#define CF_REGISTERS_80(d) CF_32(d, 0), CF_8(d, 32)
#define CF_REGISTERS_96(d) CF_32(d, 0), CF_16(d, 32)
#define CF_REGISTERS_112(d) CF_32(d, 0), CF_16(d, 32), CF_8(d, 48)
#define CF_REGISTERS_128(d) CF_64(d, 0)
#define CF_REGISTERS_160(d) CF_64(d, 0), CF_16(d, 64)
#define CF_REGISTERS_176(d) CF_64(d, 0), CF_16(d, 64), CF_8(d, 80)
#define CF_REGISTERS_192(d) CF_64(d, 0), CF_32(d, 64)
#define CF_REGISTERS_256(d) CF_64(d, 0), CF_64(d, 64)

template <class T, int N>
struct Wgmma;

// n0 and on: the numbers of the operands behind d's registers. kIsMajorN: b's own axis runs along its rows. Without `adds`, d is written.
#define CF_WGMMA(N, T, type, n0, n1, n2, n3, n4, n5, n6)                                                                           \
  template <>                                                                                                                      \
  struct Wgmma<T, N> {                                                                                                             \
    template <bool kIsMajorN>                                                                                                      \
    __device__ __forceinline__ static void shared(float (&d)[N / 2], uint64 a, uint64 b, bool adds) {                              \
      asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %" #n2 ", 0;\n"                                                               \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" CF_LIST_##N "}, %" #n0 ", %" #n1           \
                   ", p, 1, 1, 0, %" #n3 ";\n}"                                                                                    \
                   : CF_REGISTERS_##N(d) : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(static_cast<int>(kIsMajorN)));         \
    }                                                                                                                              \
    template <bool kIsMajorN>                                                                                                      \
    __device__ __forceinline__ static void registers(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool adds) {               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %" #n5 ", 0;\n"                                                               \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" CF_LIST_##N "}, {%" #n0 ",%" #n1 ",%" #n2  \
                   ",%" #n3 "}, %" #n4 ", p, 1, 1, %" #n6 ";\n}"                                                                   \
                   : CF_REGISTERS_##N(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)),        \
                     "n"(static_cast<int>(kIsMajorN)));                                                                            \
    }                                                                                                                              \
  }
CF_WGMMA(32, bf16, "bf16", 16, 17, 18, 19, 20, 21, 22);
CF_WGMMA(32, fp16, "f16", 16, 17, 18, 19, 20, 21, 22);
CF_WGMMA(48, bf16, "bf16", 24, 25, 26, 27, 28, 29, 30);
CF_WGMMA(48, fp16, "f16", 24, 25, 26, 27, 28, 29, 30);
CF_WGMMA(64, bf16, "bf16", 32, 33, 34, 35, 36, 37, 38);
CF_WGMMA(64, fp16, "f16", 32, 33, 34, 35, 36, 37, 38);
CF_WGMMA(80, bf16, "bf16", 40, 41, 42, 43, 44, 45, 46);
CF_WGMMA(80, fp16, "f16", 40, 41, 42, 43, 44, 45, 46);
CF_WGMMA(96, bf16, "bf16", 48, 49, 50, 51, 52, 53, 54);
CF_WGMMA(96, fp16, "f16", 48, 49, 50, 51, 52, 53, 54);
CF_WGMMA(112, bf16, "bf16", 56, 57, 58, 59, 60, 61, 62);
CF_WGMMA(112, fp16, "f16", 56, 57, 58, 59, 60, 61, 62);
CF_WGMMA(128, bf16, "bf16", 64, 65, 66, 67, 68, 69, 70);
CF_WGMMA(128, fp16, "f16", 64, 65, 66, 67, 68, 69, 70);
CF_WGMMA(160, bf16, "bf16", 80, 81, 82, 83, 84, 85, 86);
CF_WGMMA(160, fp16, "f16", 80, 81, 82, 83, 84, 85, 86);
CF_WGMMA(176, bf16, "bf16", 88, 89, 90, 91, 92, 93, 94);
CF_WGMMA(176, fp16, "f16", 88, 89, 90, 91, 92, 93, 94);
CF_WGMMA(192, bf16, "bf16", 96, 97, 98, 99, 100, 101, 102);
CF_WGMMA(192, fp16, "f16", 96, 97, 98, 99, 100, 101, 102);
CF_WGMMA(256, bf16, "bf16", 128, 129, 130, 131, 132, 133, 134);
CF_WGMMA(256, fp16, "f16", 128, 129, 130, 131, 132, 133, 134);

}  // namespace cf::ptx
