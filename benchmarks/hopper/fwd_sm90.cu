// The forward for Hopper, under construction: dense 16-bit problems of head dim 64, 128, 192 or 256, every score change of attn/scores.cuh.
//
//   producer, one warp:     q, then k(j + 1), v(j) tile by tile through a ring of kStages, by the copy engine
//   consumers, 64 rows each, for each key tile from the last to the first:
//     issue s(j) = q k(j)^T;   out *= r(j - 1);   issue out += p(j - 1) v(j - 1)
//     wait for s(j);   p(j), r(j) = online softmax of s(j), while the product with v(j - 1) runs;   wait for out
//   at the end: out / l through the consumer's own rows of q, lse = m + log(l)
//
// Threads   kConsumers warpgroups behind the producer's, whose registers they take over.
// Shared    q [kQueryTile, kHeadDim], k and v [kStages][kKeyTile, .], in panels of 64 columns as the copy engine swizzles them.
// Barriers  full: one arrival, of the thread that asks for the copies, and their bytes. empty: one arrival a consumer warpgroup, after the
//           wait that proves its products done. A ring's n-th tile is in stage n % kStages and phase n / kStages. q's empty: the
//           block's result has been read from q's place.
#include "attn/scores.cuh"
#include "attn/softmax.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace cf {

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kRows = 64;    // of a consumer
constexpr int kConsumers = kQueryTile / kRows;
constexpr int kThreads = kGroup * (1 + kConsumers);
constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32, kConsumerRegisters = kConsumers == 2 ? 240 : 160;
constexpr int kPanel = 64;  // columns
constexpr int kPanels = kHeadDim / kPanel;
static_assert(kConsumers == 2 || kConsumers == 3);
static_assert(kHeadDim % kPanel == 0 && kKeyTile % 16 == 0);

struct alignas(1024) Smem {  // a swizzle repeats every 1024 bytes
  Element q[kPanels][kQueryTile][kPanel];
  Element k[kStages][kPanels][kKeyTile][kPanel];
  Element v[kStages][kPanels][kKeyTile][kPanel];
  ptx::Barrier q_full, q_empty, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};
static_assert(sizeof(Smem) == kSmemBytes, "host arithmetic has drifted");
constexpr int kTileBytes = sizeof(Smem::k) / kStages;
constexpr int kQueryPanelBytes = kQueryTile * kPanel * 2, kKeyPanelBytes = kKeyTile * kPanel * 2;

struct HopperParams {
  ptx::TensorMap q, k, v, out;  // boxes of one panel: kQueryTile, kKeyTile, kKeyTile and kRows rows
  FwdParams fwd;
  int blocks;  // query tiles of all heads and batches
};

using Switches = attn::Switches<float, BiasElement, kIsMasked, kHasSoftcap, kHasAlibi, kHasBias, kIsScaleNegative, true>;
using SFragment = warp::Fragment<1, kKeyTile / 8>;
using OutFragment = warp::Fragment<1, kHeadDim / 8>;
using Softmax = attn::Softmax<1, float, false>;

template <int kN>
__device__ __forceinline__ float (&registers(warp::Fragment<1, kN>& f))[4 * kN] { return reinterpret_cast<float (&)[4 * kN]>(f.x); }

// A query tile as both roles find it.
struct Tile {
  attn::Work work;
  int query_begin;
  attn::Range keys;
  int end;    // key tiles [end - count, end)
  int count;

  __device__ __forceinline__ Tile(const Problem& problem, int number)
      : work(attn::find_work<true, kQueryTile>(problem, number)), query_begin(work.tile * kQueryTile), keys{0, 0}, end(0), count(0) {
    const attn::Band<kIsMasked> band(problem, work.sequence);
    keys = band.keys_of(query_begin, min_of(query_begin + kQueryTile, work.sequence.len_q));
    if (keys.begin >= keys.end) return;
    end = ceil_div(keys.end, kKeyTile);
    count = end - keys.begin / kKeyTile;
  }
};
// The longest rows of a masked problem first, all heads in turn: were a head's tiles neighbours, a block of the grid would come upon the
// same tile of every head wherever their number divides the grid's.
__device__ __forceinline__ int number_of(const Problem& problem, int block, int blocks) {
  if (!kIsMasked) return block;
  const int lines = blocks / problem.tiles_q;  // heads of all batches
  return block % lines * problem.tiles_q + problem.tiles_q - 1 - block / lines;
}

template <class T, int kRowsOfBox>
__device__ __forceinline__ void load(T (&panels)[kPanels][kRowsOfBox][kPanel], const ptx::TensorMap& map, ptx::Barrier& full, int row,
                                     int head, int batch) {
  ptx::mbarrier_expect(full, sizeof(panels));
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) ptx::tma_load(panels[panel], map, full, panel * kPanel, row, head, batch);
}

__device__ __forceinline__ void produce(Smem& smem, const HopperParams& params) {
  const Problem& problem = params.fwd.problem;
  int n = 0, blocks = 0;  // tiles of the ring, and blocks with keys, so far
  for (int block = blockIdx.x; block < params.blocks; block += gridDim.x) {
    const Tile tile(problem, number_of(problem, block, params.blocks));
    if (tile.count == 0) continue;
    const int head = tile.work.head, kv_head = head / (problem.heads_q / problem.heads_kv), batch = tile.work.sequence.batch;
    const auto load_k = [&](int i) {
      const int stage = (n + i) % kStages;
      ptx::mbarrier_wait(smem.k_empty[stage], (n + i) / kStages % 2 ^ 1);
      load(smem.k[stage], params.k, smem.k_full[stage], (tile.end - 1 - i) * kKeyTile, kv_head, batch);
    };
    const auto load_v = [&](int i) {
      const int stage = (n + i) % kStages;
      ptx::mbarrier_wait(smem.v_empty[stage], (n + i) / kStages % 2 ^ 1);
      load(smem.v[stage], params.v, smem.v_full[stage], (tile.end - 1 - i) * kKeyTile, kv_head, batch);
    };
    load_k(0);
    ptx::mbarrier_wait(smem.q_empty, blocks % 2 ^ 1);
    load(smem.q, params.q, smem.q_full, tile.query_begin, head, batch);
    for (int i = 0; i < tile.count; ++i) {
      if (i + 1 < tile.count) load_k(i + 1);
      load_v(i);
    }
    n += tile.count;
    ++blocks;
  }
}

// s = q k^T of this consumer's rows.
__device__ __forceinline__ void multiply_keys(SFragment& s, uint64 q, uint64 k) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int panel = step / 4, inside = step % 4 * 32;
    ptx::Wgmma<Element, kKeyTile>::template shared<false>(registers(s), ptx::advance(q, panel * kQueryPanelBytes + inside),
                                                          ptx::advance(k, panel * kKeyPanelBytes + inside), step > 0);
  }
}
// out += p v.
__device__ __forceinline__ void multiply_values(OutFragment& out, const uint32 (&p)[kKeyTile / 16][4], uint64 v) {
#pragma unroll
  for (int step = 0; step < kKeyTile / 16; ++step)
    ptx::Wgmma<Element, kHeadDim>::template registers<true>(registers(out), p[step], ptx::advance(v, step * 16 * kPanel * 2), true);
}

__device__ __forceinline__ void pack_probabilities(uint32 (&p)[kKeyTile / 16][4], const SFragment& s) {
#pragma unroll
  for (int step = 0; step < kKeyTile / 16; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = s.x[0][2 * step + i / 2] + i % 2 * 2;
      p[step][i] = pack<Element>(pair[0], pair[1]);
    }
}

// s becomes p = exp(s - max). What `out` is then to be multiplied with is left in `rescale`; returns whether it is not all 1.
__device__ __forceinline__ bool advance(Softmax& softmax, SFragment& s, float fold, float (&rescale)[2]) {
  float before[2], folded[2];
  bool is_large = false, has_risen = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& max = softmax.max[0][half];
    before[half] = max;
#pragma unroll
    for (int n = 0; n < kKeyTile / 8; ++n) max = ptx::max(max, ptx::max(s.x[0][n][2 * half], s.x[0][n][2 * half + 1]));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    softmax.max[0][half] = warp::row_max(softmax.max[0][half]);
    folded[half] = ptx::mul(softmax.reference(0, half), fold);
    is_large |= ptx::abs(folded[half]) > attn::kLargeExponent;
    has_risen |= softmax.max[0][half] != before[half];
  }
  const bool is_subtracted = __any_sync(kFullWarp, is_large);
  has_risen = __any_sync(kFullWarp, has_risen);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float reference = softmax.reference(0, half);
    rescale[half] = ptx::exp2(is_subtracted ? (before[half] - reference) * fold : ptx::mul(before[half], fold) - folded[half]);
    if (is_subtracted) {
      folded[half] = 0;
#pragma unroll
      for (int n = 0; n < kKeyTile / 8; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) s.x[0][n][i] -= reference;
    }
  }
  float total[2] = {0, 0};
#pragma unroll
  for (int n = 0; n < kKeyTile / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s.x[0][n][i] = ptx::exp2(ptx::fma(s.x[0][n][i], fold, -folded[i / 2]));
      total[i / 2] += s.x[0][n][i];
    }
#pragma unroll
  for (int half = 0; half < 2; ++half) softmax.sum[0][half] = softmax.sum[0][half] * rescale[half] + total[half];
  return has_risen;
}

__device__ __forceinline__ void multiply_rows(OutFragment& out, const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) out.x[0][n][i] *= factor[i / 2];
}

// The same, but a factor of 0 makes zeros of NaNs too.
__device__ __forceinline__ void select_rows(OutFragment& out, const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) out.x[0][n][i] = factor[i / 2] == 0 ? 0.0f : out.x[0][n][i] * factor[i / 2];
}

// out, through this consumer's own rows of q, of which all its products are done.
template <int kConsumer>
__device__ __forceinline__ void store(Smem& smem, const HopperParams& params, const Tile& tile, const OutFragment& out) {
  const int lane = threadIdx.x % kWarpSize, row = kConsumer * kRows + threadIdx.x % kGroup / kWarpSize * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    uint32 r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = out.x[0][2 * step + i / 2] + i % 2 * 2;
      r[i] = pack<Element>(pair[0], pair[1]);
    }
    const int chunk = 2 * (step % 4) + lane / 16;
    ptx::stmatrix(ptx::shared_address(&smem.q[step / 4][row][(chunk ^ row % 8) * 8]), r);
  }
  ptx::fence_async_proxy();
  ptx::named_barrier_sync<1 + kConsumer, kGroup>();
  if (threadIdx.x % kGroup == 0) {
    const int first = tile.query_begin + kConsumer * kRows;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      ptx::tma_store(params.out, smem.q[panel][kConsumer * kRows], panel * kPanel, first, tile.work.head, tile.work.sequence.batch);
    ptx::tma_commit();
    ptx::tma_wait_read();
    ptx::mbarrier_arrive(smem.q_empty);
  }
}

// Zeros and -inf (or the sink) for rows that see no key: no barrier is touched, as the producer touches none.
__device__ __forceinline__ void store_empty(const HopperParams& params, const Tile& tile, int row, float lse) {
  const attn::Sequence& seq = tile.work.sequence;
  const int query = tile.query_begin + row;
  Element* out = attn::rows<Element>(params.fwd.out, seq, seq.q_begin, tile.work.head, query);
  if (query >= seq.len_q) return;
  for (int col = threadIdx.x % 2; col < params.fwd.problem.head_dim_v; col += 2) out[col] = convert<Element>(0.0f);
  if (threadIdx.x % 2 == 0) attn::rows<float>(params.fwd.lse, seq, seq.q_begin, tile.work.head, query)[0] = lse;
}

template <int kConsumer>
__device__ __forceinline__ void consume(Smem& smem, const HopperParams& params) {
  const Problem& problem = params.fwd.problem;
  const bool is_lead = threadIdx.x % kGroup == 0;
  const int warp_row = kConsumer * kRows + threadIdx.x % kGroup / kWarpSize * 16;
  const uint64 q = ptx::descriptor(ptx::shared_address(smem.q[0][kConsumer * kRows]), 16);
  const uint64 k = ptx::descriptor(ptx::shared_address(smem.k), 16), v = ptx::descriptor(ptx::shared_address(smem.v), kKeyPanelBytes);
  const float fold = params.fwd.scores.fold, unit = params.fwd.scores.fold * kLn2;
  int n = 0, blocks = 0;  // as the producer counts
  for (int block = blockIdx.x; block < params.blocks; block += gridDim.x) {
    const Tile tile(problem, number_of(problem, block, params.blocks));
    const attn::Sequence& seq = tile.work.sequence;
    const int head = tile.work.head, query = tile.query_begin + warp_row;
    const bool has_sink = params.fwd.scores.sink;
    const float sink = has_sink ? static_cast<const float*>(params.fwd.scores.sink)[head] : 0;
    if (tile.count == 0) {
      store_empty(params, tile, kConsumer * kRows + threadIdx.x % kGroup / 2, has_sink ? sink : -kInfinity);
      continue;
    }
    const attn::ScoreMap<Switches> scores(problem, params.fwd.scores, seq, head);
    Softmax softmax;
    SFragment s;
    OutFragment out;
    uint32 p[kKeyTile / 16][4];
    float rescale[2];
    const auto score = [&](int i) {
      scores.apply(s, query, (tile.end - 1 - i) * kKeyTile, static_cast<SFragment*>(nullptr));
      return advance(softmax, s, fold, rescale);
    };

    ptx::mbarrier_wait(smem.q_full, blocks % 2);
    ptx::mbarrier_wait(smem.k_full[n % kStages], n / kStages % 2);
    ptx::pin(registers(s));
    ptx::wgmma_fence();
    multiply_keys(s, q, ptx::advance(k, n % kStages * kTileBytes));
    ptx::wgmma_commit();
    out.zero();
    ptx::wgmma_wait<0>();
    ptx::pin(registers(s));
    if (is_lead) ptx::mbarrier_arrive(smem.k_empty[n % kStages]);
    score(0);
    bool has_risen = false;  // the first product finds zeros
    pack_probabilities(p, s);

    for (int i = 1; i < tile.count; ++i) {
      const int k_stage = (n + i) % kStages, v_stage = (n + i - 1) % kStages;
      ptx::mbarrier_wait(smem.k_full[k_stage], (n + i) / kStages % 2);
      ptx::pin(registers(s));
      ptx::wgmma_fence();
      multiply_keys(s, q, ptx::advance(k, k_stage * kTileBytes));
      ptx::wgmma_commit();
      if (has_risen) multiply_rows(out, rescale);
      ptx::mbarrier_wait(smem.v_full[v_stage], (n + i - 1) / kStages % 2);
      ptx::pin(registers(out));
      ptx::wgmma_fence();
      multiply_values(out, p, ptx::advance(v, v_stage * kTileBytes));
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::pin(registers(s));
      if (is_lead) ptx::mbarrier_arrive(smem.k_empty[k_stage]);
      has_risen = score(i);
      ptx::wgmma_wait<0>();
      ptx::pin(registers(out));
      if (is_lead) ptx::mbarrier_arrive(smem.v_empty[v_stage]);
      pack_probabilities(p, s);
    }

    const int last = n + tile.count - 1;
    if (has_risen) multiply_rows(out, rescale);
    ptx::mbarrier_wait(smem.v_full[last % kStages], last / kStages % 2);
    ptx::pin(registers(out));
    ptx::wgmma_fence();
    multiply_values(out, p, ptx::advance(v, last % kStages * kTileBytes));
    ptx::wgmma_commit();
    float factor[2], lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      lse[half] = softmax.finish(0, half, unit, has_sink, sink, factor[half]);
    ptx::wgmma_wait<0>();
    ptx::pin(registers(out));
    if (is_lead) ptx::mbarrier_arrive(smem.v_empty[last % kStages]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = query + warp::fragment_row(2 * half);
      if (row < seq.len_q && warp::lane() % 4 == 0) attn::rows<float>(params.fwd.lse, seq, seq.q_begin, head, row)[0] = lse[half];
    }
    select_rows(out, factor);
    store<kConsumer>(smem, params, tile, out);
    n += tile.count;
    ++blocks;
  }
}

}  // namespace cf

extern "C" __global__ void __launch_bounds__(cf::kThreads, 1) fwd_sm90(const __grid_constant__ cf::HopperParams params) {
  using namespace cf;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(smem.q_full, 1);
    ptx::mbarrier_init(smem.q_empty, kConsumers);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(smem.k_full[stage], 1);
      ptx::mbarrier_init(smem.v_full[stage], 1);
      ptx::mbarrier_init(smem.k_empty[stage], kConsumers);
      ptx::mbarrier_init(smem.v_empty[stage], kConsumers);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  const int group = __shfl_sync(kFullWarp, threadIdx.x / kGroup, 0);  // uniform, so that roles are no divergence
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (threadIdx.x == 0) produce(smem, params);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    if (group == 1) consume<0>(smem, params);
    else if (group == 2) consume<1>(smem, params);
    else if constexpr (kConsumers == 3) consume<2>(smem, params);
  }
}
