// The run-time arguments, one struct per job; cupyflash/_cuda/params.py mirrors them field by field.
// Strides are in elements; the last axis always has stride 1. B, N, H: batch, sequence and head axis.
#pragma once
#include "types.cuh"

namespace cf {

struct Tensor {  // [B, N, H, D], or [B, H, N] with stride_n = 1
  void* data;
  int64 stride_b;
  int64 stride_n;
  int64 stride_h;
};

// Lengths and positions: everything that says where a row is and what it may see. Null pointers: not given.
struct Problem {
  const void* cu_seqlens_q;     // [B + 1] int32 or int64; packed when not null
  const void* cu_seqlens_k;     // [B + 1], likewise
  const int* seqused_k;         // [B]
  const int* q_start;           // [B]; null: q_start_value
  const int* k_start;           // [B]; null: k_start_value
  int64 cu_seqlens_q_stride;
  int64 cu_seqlens_k_stride;
  int64 q_start_value;
  int64 k_start_value;
  int64 window_left;            // visible iff p - left <= r <= p + right; a large number when unbounded
  int64 window_right;
  int batch;                    // sequences
  int len_q;                    // rows; all of them when packed
  int len_k;
  int heads_q;
  int heads_kv;
  int head_dim;                 // real, at most kHeadDim
  int head_dim_v;
  int tiles_q;                  // query tiles of a head, over all sequences when packed (an upper bound)
  int tiles_k;
  int is_cu_seqlens_q_64;
  int is_cu_seqlens_k_64;
  int is_q_start_given;         // 0: q_start = live keys - queries of each sequence
};

// What turns q.k into a score, and what stands beside it. `Accum` is double for double inputs, else float.
struct Scores {
  const void* alibi_slopes;     // [B, Hq] Accum
  const void* sink;             // [Hq] Accum
  const void* bias;             // [B, Hq, Nq, Nk] BiasElement; broadcast axes have stride 0
  const int64* seed;            // one number on the device; null: seed_value
  const int64* offset;          // likewise
  int64 alibi_stride_b;
  int64 alibi_stride_h;
  int64 bias_stride_b;
  int64 bias_stride_h;
  int64 bias_stride_q;
  int64 bias_stride_k;
  uint64 seed_value;
  uint64 offset_value;
  double scale;
  double fold;                  // multiplies scores into base-2 exponents: log2(e), or |scale| log2(e) of raw scores
  double softcap;               // c; 0: none
  double softcap_scale;         // scale / c
  double keep_scale;            // 1 / (1 - dropout_p)
  uint32 keep_threshold;        // keep iff the Philox word is not below it
  int padding;
};

struct FwdParams {
  Problem problem;
  Scores scores;
  Tensor q;                     // [B, Nq, Hq, D]
  Tensor k;                     // [B, Nk, Hkv, D]; in pages [pages, page_size, Hkv, D]
  Tensor v;                     // likewise
  Tensor out;                   // [B, Nq, Hq, Dv]; where keys are split, of each split [B, rows, H, Dv], rows and heads as they are packed
  Tensor lse;                   // [B, Hq, Nq] Accum; likewise [B, H, rows]
  const int* block_table;       // [B, max_pages]; null: not in pages
  int64 table_stride;
  int64 out_stride_split;
  int64 lse_stride_split;
  int page_size;
  int pages;
  int num_splits;               // 1: all keys are one split
  int split_len;                // keys of each; 0: a sequence's live keys in equal parts of whole tiles
};

struct FwdCombineParams {
  Tensor partial_out;           // of each split [B, rows, H, Dv] Accum
  Tensor partial_lse;           // of each split [B, H, rows] Accum
  Tensor out;                   // [B, Nq, Hq, Dv]
  Tensor lse;                   // [B, Hq, Nq] Accum
  Tensor beside_out;            // like out, Accum: a state of other keys, merged as one split more; null: there is none
  Tensor beside_lse;            // like lse
  int64 out_stride_split;
  int64 lse_stride_split;
  int num_splits;
  int group;                    // heads that a row of partial results may be of
  int rows;                     // of a head of those
  int heads;
  int head_dim_v;
  int all_rows;                 // of all heads
};

// What the copy engine knows of a [B, N, H, D] array and of the boxes that it moves; made by cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
  void* address;
  uint64 words[15];
};

struct FwdSm90Params {
  TensorMap q;                  // boxes of 64 columns and kQueryTile rows
  TensorMap k;                  // ... kKeyTile rows
  TensorMap v;
  TensorMap out_boxes;          // ... 16 rows; unused where out is stored by threads
  Problem problem;
  Scores scores;
  Tensor out;                   // [B, Nq, Hq, Dv], or of each split in float
  Tensor lse;                   // [B, Hq, Nq], or of each split
  int64 out_stride_split;
  int64 lse_stride_split;
  int num_splits;
  int places;                   // query tiles of all heads, batches and splits
  int paired_heads;             // how many of the first heads have their tiles taken in pairs; even
  int heads_at_a_time;          // even
  int staying_blocks;           // that take tile after tile; those behind them take one each
  int padding;
};

struct BwdPreprocessParams {
  Problem problem;
  Tensor out;                   // [B, Nq, Hq, Dv]; null data: delta is given
  Tensor dout;                  // [B, Nq, Hq, Dv]
  Tensor lse;                   // [B, Hq, Nq]; null data: delta only
  Tensor dlse;                  // [B, Hq, Nq]; null data: zero
  Tensor delta_in;              // [B, Hq, Nq]; null data: computed
  Tensor delta_out;             // [B, Hq, Nq]; null data: not wanted
  Tensor dq;                    // [B, Nq, Hq, D]: zeroed here where a row sees no key; null data: not wanted
  void* stats;                  // [Hq, padded rows] (lse log2(e), delta); null: not wanted
  void* dq_accum;               // [Hq, padded rows, accum_cols] Accum, zeroed here; null: not wanted
  void* turns;                  // [Hq, padded rows / kTurnRows] int, zeroed here; null: not wanted
  void* dout_rounded;           // [B, Nq, Hq, rounded_cols] in q's type; null: dout has it already
  const void* sink;             // [Hq] Accum
  void* dsink_parts;            // [Hq, blocks of a head] Accum; null: no sink
  int accum_cols;               // the main kernel's kHeadDim
  int rounded_cols;             // Dv up to whole 16 bytes
  int dq_item_bytes;            // 2 or 4
  int padding;
};

struct BwdParams {              // of bwd_generic and bwd_dq_generic
  Problem problem;
  Scores scores;
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor dout;
  Tensor dq;                    // [B, Nq, Hq, D], of bwd_dq_generic
  Tensor dk;                    // [B, Nk, Hkv, D], of bwd_generic
  Tensor dv;                    // [B, Nk, Hkv, Dv]
  const void* stats;            // as above
  void* dq_accum;               // in fragment order, see bwd_finish
};

struct BwdSm90Params {          // of bwd_sm90, bwd_dkv_sm90 and bwd_dq_sm90
  TensorMap q;                  // boxes of 64 columns and kQueryTile rows
  TensorMap k;                  // ... kKeyTile rows
  TensorMap v;
  TensorMap dout;               // ... kQueryTile rows
  Problem problem;
  Scores scores;
  Tensor dq;                    // [B, Nq, Hq, D], of bwd_dq_sm90, and of bwd_sm90 where it is summed in order
  Tensor dk;                    // [B, Nk, Hkv, D]
  Tensor dv;                    // [B, Nk, Hkv, Dv]
  const void* stats;            // as above
  void* dq_accum;               // of bwd_sm90, where it is summed
  void* turns;                  // as above, where it is summed in order
};

struct BwdBiasParams {
  Problem problem;
  Scores scores;
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor dout;
  const void* stats;
  void* dbias;                  // [B or 1, Hq or 1, Nq or 1, Nk or 1]
  int64 dbias_stride_b;
  int64 dbias_stride_h;
  int64 dbias_stride_q;
  int64 dbias_stride_k;
  int dbias_batch;              // extents: 1 where the gradient sums over the axis
  int dbias_heads;
  int dbias_len_q;
  int dbias_len_k;
};

struct BwdFinishParams {
  Problem problem;
  Tensor dq;                    // [B, Nq, Hq, D]; null data: it is home already
  const void* dq_accum;         // [Hq, padded rows, accum_cols] Accum, 16 x 8 fragments
  const void* dsink_parts;      // [Hq, parts] Accum
  void* dsink;                  // [Hq] Accum; null: no sink
  double scale;
  int accum_cols;
  int parts;
};

constexpr int kMergeStates = 24;  // of one launch

struct State {
  void* out;                    // [B, N, H, Dv]
  void* lse;                    // [B, H, N]
  int64 out_stride_b;
  int64 out_stride_n;
  int64 out_stride_h;
  int64 lse_stride_b;
  int64 lse_stride_n;
  int64 lse_stride_h;
  int out_type;                 // 0 float16, 1 bfloat16, 2 float32, 3 float64
  int lse_type;                 // 2 or 3
};

struct MergeParams {
  State states[kMergeStates];
  State merged;
  int num_states;
  int batch;
  int len;
  int heads;
  int head_dim;
  int padding;
};

struct MergeBwdParams {
  State states[kMergeStates];
  State grads[kMergeStates];    // of the states, written
  State merged;
  State dmerged;                // lse null: zero
  int num_states;
  int batch;
  int len;
  int heads;
  int head_dim;
  int padding;
};

struct AppendParams {           // strides of rows and head dims in units of kCopyBytes
  Tensor k;                     // [B, Nk, Hkv, D], the new rows; packed [1, Tk, Hkv, D]
  Tensor v;                     // [B, Nk, Hkv, Dv], likewise
  Tensor k_pages;               // [pages, page_size, Hkv, D], written
  Tensor v_pages;               // [pages, page_size, Hkv, Dv], written
  const int* block_table;       // [B, max_pages]
  const int* seqused_k;         // [B], the new rows among them
  const void* cu_seqlens_k;     // [B + 1] int32 or int64; packed when not null
  int64 block_table_stride;     // from one sequence to the next
  int batch;                    // sequences
  int len_k;                    // new rows of each; all of them when packed
  int heads;
  int head_dim;
  int head_dim_v;
  int pages;
  int page_size;
  int max_pages;
  int is_cu_seqlens_k_64;
  int padding;
};

}  // namespace cf
