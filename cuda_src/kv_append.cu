// New keys and values into the pages that a block table names (contract, Appending).
//
// A group of lanes per (new row, head): it finds the row's key, and the key's slot in a page, once for k and v. Nobody has looked
// at offsets, lengths and pages by then, so a row without a slot is left out.
#include "attn/row.cuh"
#include "attn/sequence.cuh"

namespace cf {

constexpr int kThreads = kWarps * kWarpSize;

template <int kBytes>
struct UnitOf;
template <>
struct UnitOf<2> { using Type = unsigned short; };
template <>
struct UnitOf<4> { using Type = uint32; };
template <>
struct UnitOf<8> { using Type = uint2; };
template <>
struct UnitOf<16> { using Type = uint4; };
using Unit = UnitOf<kCopyBytes>::Type;

// The sequence of a packed row: -1 before the first offset, the number of sequences behind the last. The row lies between the two
// offsets of the sequence that is found even where offsets fall.
__device__ __forceinline__ int sequence_of(const AppendParams& params, int row) {
  int low = 0, high = params.batch + 1;  // the offset before low is at or below the row, the one at high above it
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (attn::read_offset(params.cu_seqlens_k, params.is_cu_seqlens_k_64, middle, params.len_k) <= row) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads) kv_append(const __grid_constant__ cf::AppendParams params) {
  using namespace cf;
  const attn::Row row = attn::row_of_thread<kThreads>(params.len_k, params.heads);
  int sequence = row.batch, end = params.len_k;
  if (params.cu_seqlens_k) {
    sequence = row.batch == 0 ? sequence_of(params, row.row) : params.batch;
    if (sequence >= 0 && sequence < params.batch)
      end = attn::read_offset(params.cu_seqlens_k, params.is_cu_seqlens_k_64, sequence + 1, params.len_k);
  }
  if (sequence < 0 || sequence >= params.batch) return;

  const int64 key = static_cast<int64>(params.seqused_k[sequence]) - (end - row.row);  // the last new row is the last live key
  if (key < 0) return;
  const int entry = static_cast<int>(key) / params.page_size, slot = static_cast<int>(key) % params.page_size;
  if (entry >= params.max_pages) return;
  const int page = params.block_table[sequence * params.block_table_stride + entry];
  if (page < 0 || page >= params.pages) return;

  const auto at = [&](const Tensor& t, int b, int n) {
    return static_cast<Unit*>(t.data) + b * t.stride_b + n * t.stride_n + row.head * t.stride_h;
  };
  const Unit *k = at(params.k, row.batch, row.row), *v = at(params.v, row.batch, row.row);
  Unit *k_page = at(params.k_pages, page, slot), *v_page = at(params.v_pages, page, slot);
  for (int i = row.lane; i < max_of(params.head_dim, params.head_dim_v); i += attn::kGroup) {
    const bool is_k = i < params.head_dim, is_v = i < params.head_dim_v;
    const Unit new_k = is_k ? __ldg(k + i) : Unit{}, new_v = is_v ? __ldg(v + i) : Unit{};  // both before either is stored
    if (is_k) k_page[i] = new_k;
    if (is_v) v_page[i] = new_v;
  }
}
