// One head's bias as a kernel reads it: element by element, or two columns at once, as a lane of an accumulator has them.
#pragma once
#include "attn/mask.cuh"

namespace cf::attn {

// Two columns. 16-bit types are taken apart only where they are used: whoever takes a word apart waits for it.
template <class T>
union alignas(2 * sizeof(T)) BiasPair {
  T x[2];
  uint32 word;

  template <class A>
  __device__ __forceinline__ A column(int i) const {
    if constexpr (kIsHalf<T>) return convert<A>(unpack<T>(word, i));
    else return convert<A>(x[i]);
  }
};

template <class T>
struct Bias {
  using Pair = BiasPair<T>;
  const T* data;
  int64 stride_q, stride_k;
  bool has_pairs;   // an even column and the next lie side by side, and so that one instruction may read them
  bool has_chunks;  // the same of 16 bytes

  __device__ __forceinline__ Bias(const Scores& p, const Sequence& s, int head)
      : data(static_cast<const T*>(p.bias) + s.index * p.bias_stride_b + head * p.bias_stride_h), stride_q(p.bias_stride_q),
        stride_k(p.bias_stride_k) {
    const uint64 alignment = reinterpret_cast<uint64>(data) | uint64(stride_q) * sizeof(T);
    has_pairs = stride_k == 1 && alignment % sizeof(Pair) == 0;
    has_chunks = stride_k == 1 && alignment % 16 == 0;
  }
  __device__ __forceinline__ const T* at(int query, int key) const { return data + query * stride_q + key * stride_k; }

  __device__ __forceinline__ static Pair pair_at(const T* p) {
    if constexpr (!kIsHalf<T>) return *reinterpret_cast<const Pair*>(p);
    Pair pair;
    pair.word = *reinterpret_cast<const uint32*>(p);
    return pair;
  }
};

// Blocks count heads batch row by batch row. Those of a bias that all batch rows share come side by side instead, so that L2 has it for all of
// them: the number of a block as find_work counts it.
template <bool kHasBias>
__device__ __forceinline__ int in_order_of_bias(const Problem& p, const Scores& scores, int number, int tiles, int heads) {
  if (!kHasBias || scores.bias_stride_b != 0) return number;
  const int place = number / tiles, head = place % p.batch * heads + place / p.batch;
  return head * tiles + number % tiles;
}

// A tile's, in registers.
template <class T, int kM, int kN>
struct BiasFragment {
  BiasPair<T> pairs[kM][2][kN];
};

}  // namespace cf::attn
