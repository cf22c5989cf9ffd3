// Kernels over NVFP4 weights stored as fragment-ordered tiles (layout and decode: tiles.py) for sm_90a.
//
//   nvfp4_gemm        y = row_scale * (x W0^T) + bias + s B^T, x: (M, K) bf16, W0 = code * block scale: (N, K)
//   nvfp4_dequantize  W0 as (N, K) bf16
//
// Compiled at first use by compiler.py, which puts `wgmma()` for this token tile in front and defines
//   TOKENS  columns of the accumulator: the tokens of one tile (a multiple of 8, at most 256)
//   WARPGROUPS  that compute (2 or 4), each ROWS 64-row blocks of W; KGROUPS of them share the rows and divide the columns
//   GROUP   fragments (64 rows, 16 columns) that a warpgroup decodes before it starts the matrix unit: divides 4 * ROWS
//   AHEAD   whether codes are read from shared memory one step ahead (1 or 0): less waiting, more instructions
//   CLUSTER thread blocks that divide the columns of a tile and add up through each other's shared memory
//   DEPTH   64-column tiles of a stage, STAGES stages in flight
//   SYNCHRONOUS  1: `mma.sync` of each warp in place of `wgmma`, whose every call takes 28 clocks however few the tokens;
//           GROUP and AHEAD then mean nothing
//
// The weights are the A operand: they are decoded in registers and never written back. The tokens are the B operand,
// brought by the tensor copy engine with a 128-byte swizzle. One warp copies weights, one copies tokens.
//
// The kernel may be launched before the one ahead of it in the stream has ended (programmatic dependent launch): weights are
// fetched at once, for nobody writes them; tokens are read and results written only after `wait_for_previous_kernel`. Behind
// adapter_shrink tokens are read at once too: it lets this kernel start when x is complete, and only the end of a tile needs s.
//
// The policy adapter is s = x A^T: (M, R), made by adapter_shrink.cu just before, and B: (N, R). Whoever has the whole sum of a
// tile scales it and adds s B^T, of which B is read straight from memory: R is small.
//
// Without a cluster the work is the list of (tile, stage) pairs, cut into equal consecutive runs, one a block, and a block
// goes through its run from the end: the tile there is finished by a block of higher index, for which it leaves its sum in
// `partials` early on; the tile at the start of the run comes last, and this block goes on from the sum that one of lower
// index has left long since. Where runs are shorter than tiles it adds, at its end, what several have left. With a cluster each cluster has one tile and each of its blocks an equal share of the columns;
// then each adds up, for some of the tokens, what all have. Either way in an order that does not depend on timing.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

constexpr int TILE_BYTES = 2304;  // 64 x 64 codes, then 64 x 4 block scales
constexpr int SCALE_OFFSET = 2048;

// ---- decode ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {  // two bf16 products; subnormal inputs are kept
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Step `j` of a row pair's scales -> {row g, row g + 8} as bf16, times 2^119.
__device__ __forceinline__ u32 decode_scales(u32 bytes, int j) {
  return __byte_perm(bytes, 0, j ? 0x4341 : 0x4240) * 16u + 0x76007600u;
}

// Eight codes -> the four registers of an m64k16 A fragment, times 2^-7: code * 2^-126 by moving bits, scale * 2^119.
__device__ __forceinline__ void decode(u32 word, u32 scales, u32 (&a)[4]) {
  u32 upper, lower;  // written this way, the assembler folds the copies into the products (HMUL2 .H0_H0 and .H1_H1)
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; mov.b32 %0, {l, l}; mov.b32 %1, {h, h};}" : "=r"(upper), "=r"(lower) : "r"(scales));
  a[0] = multiply(word & 0x81C081C0u, upper);
  a[1] = multiply((word << 3) & 0x81C081C0u, lower);
  a[2] = multiply((word << 6) & 0x81C081C0u, upper);
  a[3] = multiply(((word << 1) & 0x80008000u) | ((word >> 3) & 0x01800180u) | ((word >> 7) & 0x00400040u), lower);
}

// ---- copy engine and barriers ---------------------------------------------------------------------------------------

struct alignas(64) TensorMap { u64 words[16]; };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nretry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra retry;\n}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {  // without waiting
  u32 passed;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}" : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
  return passed;
}
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ float4 load_from(u32 address, int block) {  // of the cluster
  float4 value;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w) : "r"(address), "r"(block) : "memory");
  return value;
}
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void launch_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
template <int ID, int THREADS>
__device__ __forceinline__ void synchronize() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}
template <int ID, int THREADS>
__device__ __forceinline__ void arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}
__device__ __forceinline__ void synchronize_warpgroup(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

#ifdef TOKENS
// ---- which block does what ------------------------------------------------------------------------------------------

struct Divisor { u32 magic, shift; };  // of numbers below 2^31: gemm.py
__device__ __forceinline__ int divide(int n, Divisor by) { return (int)((u64)n * by.magic >> by.shift); }

struct Problem {
  int M, N, blocks, k_tiles;  // blocks: 64-row blocks of W; k_tiles: 64-column tiles, a multiple of 2
  int n_tiles, m_tiles;       // tiles of 64 * CTA_BLOCKS rows and of TOKENS tokens
  int shared_tiles;           // the first tiles are cut into equal runs; the others are whole, one a block and round
  int adapter_columns;        // of s and B, a multiple of 32; 0: no adapter
  int tokens_ready;           // 1: the kernel ahead is adapter_shrink, which starts this one once x is complete
  Divisor by_steps, by_units, by_blocks;
};

constexpr int ROW_GROUPS = WARPGROUPS / KGROUPS, CTA_BLOCKS = ROW_GROUPS * ROWS;
constexpr int WORKERS = 128 * ROW_GROUPS;  // threads that hold the sums of a tile in the end
constexpr int THREADS = 128 * WARPGROUPS + 128;  // half of the copying warpgroup only lends its registers
// what the threads are launched with is shared out anew: more than that would wait for ever
constexpr int REGISTERS = WARPGROUPS == 4 ? 112 : WARPGROUPS == 3 ? 160 : 232;
constexpr int COPY_REGISTERS = 32;
constexpr int LEFT = 5, READY = 10;  // barriers of the block: sums are left for others; others have left theirs
constexpr int RUN_ROWS = 8;  // token tiles that are neighbours in time, so that a weight tile is still in L2

__device__ __forceinline__ void locate(const Problem& p, int tile, int& n_tile, int& m_tile) {
  if (p.m_tiles == 1) {
    n_tile = tile, m_tile = 0;
    return;
  }
  const int group = tile / (RUN_ROWS * p.n_tiles), within = tile - group * RUN_ROWS * p.n_tiles;
  const int rows = min(RUN_ROWS, p.m_tiles - group * RUN_ROWS);
  m_tile = group * RUN_ROWS + within % rows;
  n_tile = within / rows;
}

// A walk over this block's segments: (tile, first stage, end stage).
struct Segments {
  const Problem& p;
  int block, blocks, begin, position, round, steps, tile, first, last;
  __device__ __forceinline__ Segments(const Problem& p_, int steps_) : p(p_), round(0), steps(steps_) {
    block = blockIdx.x, blocks = gridDim.x;
    begin = divide(block * p.shared_tiles * steps, p.by_blocks);
    position = divide((block + 1) * p.shared_tiles * steps, p.by_blocks);
  }
  __device__ __forceinline__ bool next() {
    if constexpr (CLUSTER > 1) {
      tile = blockIdx.x / CLUSTER;
      const int rank = blockIdx.x % CLUSTER;
      first = rank * steps / CLUSTER, last = (rank + 1) * steps / CLUSTER;
      return round++ == 0;
    }
    if (position > begin) {
      tile = divide(position - 1, p.by_steps);
      last = position - tile * steps;
      first = max(begin - tile * steps, 0);
      position = tile * steps + first;
      return true;
    }
    tile = p.shared_tiles + block + blocks * round++;
    first = 0, last = steps;
    return tile < p.n_tiles * p.m_tiles;
  }
  __device__ __forceinline__ int owner(int unit) const {  // the block whose run holds this unit
    return divide((unit + 1) * blocks - 1, p.by_units);
  }
};

// d += a b^T for 16 rows, 8 tokens and 16 columns, within one warp; `d` lies as wgmma's sums do.
__device__ __forceinline__ void multiply_add(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void synchronize_row_group(int row_group) {
  asm volatile("bar.sync %0, %1;" ::"r"(row_group + 6), "n"(128 * KGROUPS) : "memory");
}

// ---- the product ----------------------------------------------------------------------------------------------------

constexpr int X_TILE = TOKENS * 128;  // bytes of 64 columns of all tokens
constexpr int X_STAGE = DEPTH * X_TILE, W_STAGE = CTA_BLOCKS * DEPTH * TILE_BYTES;
constexpr int SHARES = CLUSTER > 1 ? CLUSTER * KGROUPS : 1;          // into which the tokens of a tile are divided in the end
constexpr int SHARE = (TOKENS / 8 + SHARES - 1) / SHARES;              // eights of tokens of one of them
constexpr int SLICE = SHARE % 8 == 0 ? 64 : SHARE % 6 == 0 ? 48 : 8 * SHARE;  // tokens turned round at a time in the end
constexpr int TURN_ROW = 144;                                         // bytes: 64 outputs of a token, padded
static_assert(DEPTH % KGROUPS == 0 && WARPGROUPS % KGROUPS == 0, "columns and warpgroups are divided evenly");
// with an odd number the same registers would be decoded into while the matrix unit still reads them
static_assert(SYNCHRONOUS || DEPTH / KGROUPS * (4 * ROWS / GROUP) % 2 == 0, "the two buffers of fragments take turns");

constexpr int TURN_OFFSET = STAGES * (X_STAGE + W_STAGE);
constexpr int REDUCE_OFFSET = TURN_OFFSET + (CLUSTER > 1 ? WARPGROUPS : ROW_GROUPS) * SLICE * TURN_ROW;
constexpr int TILE_SUMS = ROWS * (TOKENS / 2) * WORKERS;
constexpr int BARRIER_OFFSET = REDUCE_OFFSET + (KGROUPS > 1 && CLUSTER == 1 ? 4 * TILE_SUMS : 0);
static_assert(CLUSTER == 1 || 4 * KGROUPS * TILE_SUMS <= TURN_OFFSET, "the sums of a cluster's blocks lie where the stages were");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
nvfp4_gemm(const __grid_constant__ TensorMap x, const u8* __restrict__ tiles, const float* __restrict__ row_scale,
           const float* __restrict__ bias, u16* __restrict__ y, float* __restrict__ partials, u32* __restrict__ counters,
           const u16* __restrict__ shrunk, const u16* __restrict__ expand, const int2* __restrict__ spans,
           const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 base = shared_address(memory), w_base = base + STAGES * X_STAGE;
  const u32 full = base + BARRIER_OFFSET, empty = full + 8 * STAGES;
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int steps = (p.k_tiles + DEPTH - 1) / DEPTH;

  if (threadIdx.x < STAGES) {
    barrier_init(full + 8 * threadIdx.x, 2), barrier_init(empty + 8 * threadIdx.x, 4 * WARPGROUPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  Segments segment(p, steps);
  int stage = 0;
  u32 phase = 0;

  launch_next_kernel();
  if (warp >= 4 * WARPGROUPS) {  // the copying warpgroup: a thread for the weights, one for the tokens, two for other blocks
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPY_REGISTERS));
    const bool weights = warp == 4 * WARPGROUPS;
    if (lane == 0 && warp <= 4 * WARPGROUPS + 1) {
      if (!weights) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&x) : "memory");
        if (!p.tokens_ready) wait_for_previous_kernel();
      }
      while (segment.next()) {
        int n_tile, m_tile;
        locate(p, segment.tile, n_tile, m_tile);
        for (int step = segment.first; step < segment.last; ++step) {
          barrier_wait(empty + 8 * stage, phase ^ 1);
          const u32 barrier = full + 8 * stage;
          if (weights) {
            barrier_expect(barrier, W_STAGE);
#pragma unroll 1
            for (int block = 0; block < CTA_BLOCKS; ++block) {
              const int row = min(n_tile * CTA_BLOCKS + block, p.blocks - 1);  // past the end: copied, never stored
              copy_bulk(w_base + stage * W_STAGE + block * DEPTH * TILE_BYTES,
                        tiles + ((size_t)row * p.k_tiles + step * DEPTH) * TILE_BYTES, DEPTH * TILE_BYTES, barrier);
            }
          } else {
            barrier_expect(barrier, X_STAGE);
#pragma unroll
            for (int d = 0; d < DEPTH; ++d)
              copy_tile(base + stage * X_STAGE + d * X_TILE, &x, (step * DEPTH + d) * 64, m_tile * TOKENS, barrier);
          }
          if (++stage == STAGES) stage = 0, phase ^= 1;
        }
      }
    } else if (CLUSTER == 1 && warp >= 4 * WARPGROUPS + 2 && segment.position > segment.begin) {
      const int begin = segment.begin, end = segment.position;
      const int first_tile = divide(begin, p.by_steps), end_tile = divide(end, p.by_steps);
      const bool leaves = warp == 4 * WARPGROUPS + 2;
      if (leaves && end > end_tile * steps) {  // another block finishes the tile at the end: tell it when the sum is there
        synchronize<LEFT, WORKERS + 32>();
        if (lane == 0) {
          asm volatile("fence.acq_rel.gpu;" ::: "memory");  // for all that this block has written
          asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counters + segment.owner(end_tile * steps + steps - 1)) : "memory");
        }
        __syncwarp();
      }
      if (!leaves && begin > first_tile * steps && end >= (first_tile + 1) * steps) {  // this block finishes a tile that others have begun
        if (lane == 0) {
          wait_for_previous_kernel();  // which may have left its counts
          const u32 others = blockIdx.x - segment.owner(first_tile * steps);
          u32 there;
          do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(counters + blockIdx.x) : "memory");
          while (there != others);
          counters[blockIdx.x] = 0;  // as it was
        }
        __syncwarp();
        arrive<READY, WORKERS + 32>();
      }
    }
    __syncwarp();
    if constexpr (CLUSTER > 1) arrive_at_cluster(), wait_for_cluster(), arrive_at_cluster(), wait_for_cluster();
  } else {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));

  const int warpgroup = warp / 4 % ROW_GROUPS, k_group = warp / 4 / ROW_GROUPS;
  const int thread = threadIdx.x % 128, g = lane / 4;
  const u8* first_tile = memory + STAGES * X_STAGE + (warpgroup * ROWS * DEPTH + k_group) * TILE_BYTES;
  const u8 *w_thread = first_tile + thread * 16, *s_thread = first_tile + SCALE_OFFSET + warp % 4 * 64 + g * 8;
  const u32 x_first = base + k_group * X_TILE;
  float sums[ROWS][TOKENS / 2];
  uint4 codes[ROWS];  // of the next 64 columns
  uint2 scales[ROWS];
  u32 x_stage;
  auto load = [&](int stage, int i) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      codes[r] = *(const uint4*)(w_thread + stage * W_STAGE + (r * DEPTH + i * KGROUPS) * TILE_BYTES);
      scales[r] = *(const uint2*)(s_thread + stage * W_STAGE + (r * DEPTH + i * KGROUPS) * TILE_BYTES);
    }
    if (!SYNCHRONOUS && i == 0) x_stage = __shfl_sync(0xFFFFFFFFu, (x_first + stage * X_STAGE) >> 4 | 1u << 16, 0);
  };

  // What the end of a tile needs beside its sums is asked for at one time, and before the sums of other blocks are. Of s a thread
  // asks for what it multiplies, or for its part of what the warpgroup does, where that is too much for registers.
  constexpr bool DIRECT = SHARE <= 8;
  constexpr int PIECES = DIRECT ? SHARE : SHARE / 4, AT_ONCE = SLICE / 16;  // of 16 bytes; pieces that the turning memory holds
  float scale_upper[ROWS], scale_lower[ROWS];
  uint4 b_upper[ROWS], b_lower[ROWS], s_pieces[PIECES];
  int2 span;  // outside of these columns of B the rows of this tile are zero
  auto first_row = [&](int n_tile, int r) { return (n_tile * CTA_BLOCKS + warpgroup * ROWS + r) * 64 + (warp % 4) * 16 + g; };
  auto ask_for_columns = [&](int n_tile, int m_tile, int first_eight, int column) {
    // both operands take eight neighbouring columns a thread: the sum over columns does not mind which comes when
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = first_row(n_tile, r);
      const u16* from = expand + (size_t)row * p.adapter_columns + column + lane % 4 * 8;
      b_upper[r] = row < p.N ? __ldcg((const uint4*)from) : zero;
      b_lower[r] = row + 8 < p.N ? __ldcg((const uint4*)(from + (size_t)8 * p.adapter_columns)) : zero;
    }
    const int end = min(p.M, (m_tile + 1) * TOKENS);
    const u16* from = shrunk + column + thread % 4 * 8;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int token = m_tile * TOKENS + first_eight * 8 + (DIRECT ? i * 8 + g : i * 32 + thread / 4);
      s_pieces[i] = token < end ? __ldcg((const uint4*)(from + (size_t)token * p.adapter_columns)) : zero;
    }
  };
  auto ask_for_end = [&](int n_tile, int m_tile, int first_eight) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = first_row(n_tile, r);
      scale_upper[r] = row < p.N ? row_scale[row] : 0.f, scale_lower[r] = row + 8 < p.N ? row_scale[row + 8] : 0.f;
    }
    if (span.x < span.y) ask_for_columns(n_tile, m_tile, first_eight, span.x);
  };

  // The end of a tile: `sums` are whole; of the tokens of the tile they have SHARE times eight.
  auto finish = [&](float (*sums)[4 * SHARE], int n_tile, int m_tile, int first_eight) {
    const int end = min(p.M, (m_tile + 1) * TOKENS);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int i = 0; i < 4 * SHARE; ++i) sums[r][i] *= 128.f * (i % 4 < 2 ? scale_upper[r] : scale_lower[r]);
    u8* turn = memory + TURN_OFFSET + warp / 4 * SLICE * TURN_ROW;
    auto add_adapter = [&](int n, const uint4& s) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const u32 first[4] = {b_upper[r].x, b_lower[r].x, b_upper[r].y, b_lower[r].y};
        const u32 second[4] = {b_upper[r].z, b_lower[r].z, b_upper[r].w, b_lower[r].w};
        multiply_add(&sums[r][n * 4], first, s.x, s.y);
        multiply_add(&sums[r][n * 4], second, s.z, s.w);
      }
    };
#pragma unroll 1
    for (int column = span.x; column < span.y; column += 32) {
      if (column > span.x) ask_for_columns(n_tile, m_tile, first_eight, column);
      if constexpr (DIRECT) {
#pragma unroll
        for (int n = 0; n < SHARE; ++n) add_adapter(n, s_pieces[n]);
      } else {
#pragma unroll
        for (int start = 0; start < PIECES; start += AT_ONCE) {
          synchronize_warpgroup(warp / 4);
#pragma unroll
          for (int i = start; i < start + AT_ONCE && i < PIECES; ++i) *(uint4*)(turn + ((i - start) * 128 + thread) * 16) = s_pieces[i];
          synchronize_warpgroup(warp / 4);
#pragma unroll
          for (int n = start * 4; n < (start + AT_ONCE) * 4 && n < SHARE; ++n)
            add_adapter(n, *(const uint4*)(turn + (n - start * 4) * 512 + lane * 16));
        }
      }
    }

    // Turn (rows, tokens) into (tokens, rows) through shared memory, then write 16 bytes a thread.
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int block = n_tile * CTA_BLOCKS + warpgroup * ROWS + r, row = first_row(n_tile, r);
      const float bias_upper = bias && row < p.N ? bias[row] : 0.f, bias_lower = bias && row + 8 < p.N ? bias[row + 8] : 0.f;
#pragma unroll
      for (int slice = 0; slice < 8 * SHARE / SLICE; ++slice) {
        synchronize_warpgroup(warp / 4);
#pragma unroll
        for (int j = 0; j < SLICE / 8; ++j) {
          const float* s = &sums[r][(slice * (SLICE / 8) + j) * 4];
          const u32 upper = pack_bf16(s[0] + bias_upper, s[1] + bias_upper);
          const u32 lower = pack_bf16(s[2] + bias_lower, s[3] + bias_lower);
          const u32 to = shared_address(turn) + (j * 8 + lane % 8) * TURN_ROW + (warp % 4) * 32 + (lane / 8 % 2) * 16;
          asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(upper), "r"(lower) : "memory");
        }
        synchronize_warpgroup(warp / 4);
        const int column = block * 64 + thread % 8 * 8;
#pragma unroll
        for (int t = thread / 8; t < SLICE; t += 16) {
          const int token = m_tile * TOKENS + first_eight * 8 + slice * SLICE + t;
          if (token < end && column < p.N) *(uint4*)(y + (size_t)token * p.N + column) = *(const uint4*)(turn + t * TURN_ROW + thread % 8 * 16);
        }
      }
    }
  };

  const bool runs_are_long = p.shared_tiles >= (int)gridDim.x;
  while (segment.next()) {
    int n_tile, m_tile;
    locate(p, segment.tile, n_tile, m_tile);
    const bool begun = CLUSTER == 1 && segment.first > 0 && segment.last == steps;  // by blocks of lower index
    const bool goes_on = begun && runs_are_long && k_group == 0;
    if (goes_on) synchronize<READY, WORKERS + 32>();
    // a choice and no branch: the assembler puts every `wgmma` after the one before, if sums come from two places
    const float4* theirs = (const float4*)(partials + (size_t)(segment.block - 1) * TILE_SUMS) + threadIdx.x;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int n = 0; n < TOKENS / 8; ++n) {
        const float4 start = goes_on ? __ldcg(theirs + (r * (TOKENS / 8) + n) * WORKERS) : make_float4(0.f, 0.f, 0.f, 0.f);
        sums[r][n * 4] = start.x, sums[r][n * 4 + 1] = start.y, sums[r][n * 4 + 2] = start.z, sums[r][n * 4 + 3] = start.w;
      }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {  // what the end of this tile needs
      const int row = min((n_tile * CTA_BLOCKS + warpgroup * ROWS + r) * 64 + thread / 2, p.N - 1);
      if (thread % 64 == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(row_scale + row));
      if (bias && thread % 64 == 1) asm volatile("prefetch.global.L2 [%0];" ::"l"(bias + row));
      if (p.adapter_columns == 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(expand + (size_t)row * 32 + thread % 2 * 16));
    }
    span = make_int2(0, 0);
    if (p.adapter_columns) {
      const int block = n_tile * CTA_BLOCKS + warpgroup * ROWS;
      span = make_int2(spans[min(block, p.blocks - 1)].x, spans[min(block + ROWS, p.blocks) - 1].y);
    }

    if constexpr (SYNCHRONOUS) {
      bool is_full = false;  // the stage that comes next, as known from before
      for (int step = segment.first; step < segment.last; ++step) {
        if (!is_full) barrier_wait(full + 8 * stage, phase);
        const int next = stage + 1 == STAGES ? 0 : stage + 1;
        const u32 next_phase = phase ^ (next == 0);
#pragma unroll
        for (int d = 0; d < DEPTH / KGROUPS; ++d) {
          load(stage, d);
          const u32 tokens = base + stage * X_STAGE + (d * KGROUPS + k_group) * X_TILE;
          u32 b[TOKENS / 8][8];  // of 8 tokens all 64 columns: the two registers of step j are 2 j and 2 j + 1
#pragma unroll
          for (int n = 0; n < TOKENS / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const u32 from = tokens + (n * 8 + lane % 8) * 128 + ((half * 4 + lane / 8) ^ lane % 8) * 16;
              asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                  : "=r"(b[n][half * 4]), "=r"(b[n][half * 4 + 1]), "=r"(b[n][half * 4 + 2]), "=r"(b[n][half * 4 + 3]) : "r"(from) : "memory");
            }
#pragma unroll
          for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
              u32 a[4];
              decode(j == 0 ? codes[r].x : j == 1 ? codes[r].y : j == 2 ? codes[r].z : codes[r].w,
                     decode_scales(j < 2 ? scales[r].x : scales[r].y, j & 1), a);
#pragma unroll
              for (int n = 0; n < TOKENS / 8; ++n) multiply_add(&sums[r][n * 4], a, b[n][2 * j], b[n][2 * j + 1]);
            }
        }
        is_full = barrier_passed(full + 8 * next, next_phase);
        __syncwarp();  // all lanes have read
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        stage = next, phase = next_phase;
      }
    } else {
    int previous = -1;
    bool is_full = false;  // the stage that comes next, as known from before
    if (AHEAD && segment.first < segment.last) {
      barrier_wait(full + 8 * stage, phase);
      load(stage, 0);
    }
    for (int step = segment.first; step < segment.last; ++step) {
      const int next = stage + 1 == STAGES ? 0 : stage + 1;
      const u32 next_phase = phase ^ (next == 0);
      u32 a[2][GROUP][4];
#pragma unroll
      for (int d = 0; d < DEPTH / KGROUPS; ++d) {
        constexpr int GROUPS = 4 * ROWS / GROUP;
        if constexpr (!AHEAD) {
          if (d == 0 && !is_full) barrier_wait(full + 8 * stage, phase);
          load(stage, d);
        }
        uint4 now_codes[ROWS];
        uint2 now_scales[ROWS];
        const u32 now_x = x_stage + d * (KGROUPS * X_TILE / 16);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) now_codes[r] = codes[r], now_scales[r] = scales[r];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
          u32(&fragments)[GROUP][4] = a[(d * GROUPS + group) & 1];
#pragma unroll
          for (int i = 0; i < GROUP; ++i) {
            const int j = (group * GROUP + i) / ROWS, r = (group * GROUP + i) % ROWS;
            const uint4 c = now_codes[r];
            const u32 word = j == 0 ? c.x : j == 1 ? c.y : j == 2 ? c.z : c.w;
            decode(word, decode_scales(j < 2 ? now_scales[r].x : now_scales[r].y, j & 1), fragments[i]);
          }
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < GROUP; ++i) {
            const int j = (group * GROUP + i) / ROWS, r = (group * GROUP + i) % ROWS;
            // rows of 128 bytes, 128-byte swizzle, 1024 bytes a group of 8 rows
            wgmma(sums[r], fragments[i], (u64)0x40000040u << 32 | (now_x + j * 2));
          }
          wgmma_commit();
          if (!AHEAD && d + 1 == DEPTH / KGROUPS && group + 1 == GROUPS) is_full = barrier_passed(full + 8 * next, next_phase);
          wgmma_wait<1>();  // the other half of `a` is free again, and so is the previous stage
          if (group == 0) {
            if (d == 0 && previous >= 0 && lane == 0) barrier_arrive(empty + 8 * previous);
            // while the matrix unit works: what comes next
            if constexpr (!AHEAD) {
            } else if (d + 1 < DEPTH / KGROUPS) {
              load(stage, d + 1);
            } else if (step + 1 < segment.last) {
              barrier_wait(full + 8 * next, next_phase);
              load(next, 0);
            }
          }
        }
      }
      previous = stage, stage = next, phase = next_phase;
    }
    wgmma_wait<0>();
    if (previous >= 0 && lane == 0) barrier_arrive(empty + 8 * previous);
    }

    if constexpr (KGROUPS > 1 && CLUSTER == 1) {  // the first group adds what the others have, in their order
      float* exchange = (float*)(memory + REDUCE_OFFSET) + warpgroup * 128 + thread;
#pragma unroll 1
      for (int other = 1; other < KGROUPS; ++other) {
        if (k_group == other) {
#pragma unroll
          for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) exchange[(r * (TOKENS / 2) + i) * WORKERS] = sums[r][i];
        }
        synchronize_row_group(warpgroup);
        if (k_group == 0) {
#pragma unroll
          for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) sums[r][i] += exchange[(r * (TOKENS / 2) + i) * WORKERS];
        }
        synchronize_row_group(warpgroup);
      }
      if (k_group > 0) continue;
    }
    if constexpr (CLUSTER > 1) {
      synchronize<LEFT, 128 * WARPGROUPS>();  // nobody reads the stages any more
      const u32 mine = base + 16 * (warpgroup * 128 + thread);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n)
          *(float4*)(memory + 4 * k_group * TILE_SUMS + 16 * ((r * (TOKENS / 8) + n) * WORKERS + warpgroup * 128 + thread)) =
              make_float4(sums[r][n * 4], sums[r][n * 4 + 1], sums[r][n * 4 + 2], sums[r][n * 4 + 3]);
      const int first_eight = (blockIdx.x % CLUSTER * KGROUPS + k_group) * SHARE;
      wait_for_previous_kernel();  // which makes s, and may still read the memory that is written below
      ask_for_end(n_tile, m_tile, first_eight);
      arrive_at_cluster(), wait_for_cluster();
      float share[ROWS][4 * SHARE];
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int j = 0; j < SHARE; ++j) {
          const u32 from = mine + 16 * WORKERS * (r * (TOKENS / 8) + min(first_eight + j, TOKENS / 8 - 1));
          float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
          for (int part = 0; part < SHARES; ++part) {  // in the order of blocks
            const float4 other = load_from(from + 4 * TILE_SUMS * (part % KGROUPS), part / KGROUPS);
            sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
          }
          share[r][j * 4] = sum.x, share[r][j * 4 + 1] = sum.y, share[r][j * 4 + 2] = sum.z, share[r][j * 4 + 3] = sum.w;
        }
      arrive_at_cluster();
      if (first_eight < TOKENS / 8) finish(share, n_tile, m_tile, first_eight);
      wait_for_cluster();  // the others may still read this block's memory
    } else {
      wait_for_previous_kernel();  // which makes s, and may still read the memory that is written below
      if (segment.last < steps) {
        float4* mine = (float4*)(partials + (size_t)segment.block * TILE_SUMS) + threadIdx.x;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
          for (int n = 0; n < TOKENS / 8; ++n)
            __stcg(mine + (r * (TOKENS / 8) + n) * WORKERS, make_float4(sums[r][n * 4], sums[r][n * 4 + 1], sums[r][n * 4 + 2], sums[r][n * 4 + 3]));
        arrive<LEFT, WORKERS + 32>();
        continue;
      }
      ask_for_end(n_tile, m_tile, 0);
      if (begun && !runs_are_long) {
        synchronize<READY, WORKERS + 32>();
#pragma unroll 1
        for (int other = segment.owner(segment.tile * steps); other < segment.block; ++other) {  // in the order of K
          const float4* theirs = (const float4*)(partials + (size_t)other * TILE_SUMS) + threadIdx.x;
#pragma unroll
          for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int n = 0; n < TOKENS / 8; ++n) {
              const float4 their = __ldcg(theirs + (r * (TOKENS / 8) + n) * WORKERS);
              sums[r][n * 4] += their.x, sums[r][n * 4 + 1] += their.y, sums[r][n * 4 + 2] += their.z, sums[r][n * 4 + 3] += their.w;
            }
        }
      }
      finish((float(*)[4 * SHARE])sums, n_tile, m_tile, 0);  // which is what they are without a cluster
    }
  }
  }
}
#else
// ---- W0 itself ------------------------------------------------------------------------------------------------------

// One block a 64-row block and two tiles of columns; 256 threads.
extern "C" __global__ void __launch_bounds__(256)
nvfp4_dequantize(const u8* __restrict__ tiles, u16* __restrict__ w, int N, int K, int k_tiles, int first_row) {
  __shared__ __align__(16) u8 turn[2][64][144];
  const int half = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
  const int g = lane / 4, c = lane % 4, k_tile = blockIdx.x * 2 + half;
  const u8* tile = tiles + ((size_t)(blockIdx.y + first_row / 64) * k_tiles + k_tile) * TILE_BYTES;
  const uint4 codes = *(const uint4*)(tile + thread * 16);
  const uint2 scales = *(const uint2*)(tile + SCALE_OFFSET + warp * 64 + g * 8);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 a[4];
    decode(j == 0 ? codes.x : j == 1 ? codes.y : j == 2 ? codes.z : codes.w, decode_scales(j < 2 ? scales.x : scales.y, j & 1), a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // fragment: i = 0, 2 are row g, 1, 3 row g + 8; 2, 3 are eight columns on
      const int row = warp * 16 + g + i % 2 * 8, column = j * 16 + i / 2 * 8 + c * 2;
      *(u32*)(&turn[half][row][column * 2]) = multiply(a[i], 0x43004300u);  // times 2^7
    }
  }
  synchronize_warpgroup(half);
  const int column = k_tile * 64 + thread % 8 * 8;
#pragma unroll
  for (int r = thread / 8; r < 64; r += 16) {
    const int row = blockIdx.y * 64 + r;
    if (row < N && column < K) *(uint4*)(w + (size_t)row * K + column) = *(const uint4*)(&turn[half][r][thread % 8 * 16]);
  }
}
#endif
