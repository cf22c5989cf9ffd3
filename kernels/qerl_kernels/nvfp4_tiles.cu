// Multiply by NVFP4 weights stored as fragment-ordered tiles (layout and decode: tiles.py), for sm_90a:
//
//   nvfp4_gemm   y = row_scale * (x W0^T) + bias + s B^T, x: (M, K), W0 = code * block scale: (N, K)
//
// compiler.py compiles it at first use; gemm.py puts `wgmma()` for this token tile in front and defines
//   TOKENS  columns of the accumulator: the tokens of one tile (a multiple of 8, at most 256)
//   WARPGROUPS  warpgroups that compute (2 or 4)
//   ROWS    64-row blocks of W that a warpgroup computes
//   KGROUPS warpgroups that compute the same rows and divide the columns among them
//   GROUP   fragments (64 rows, 16 columns) that a warpgroup decodes before it starts the matrix unit; it divides 4 * ROWS
//   AHEAD   1: codes are read from shared memory one step ahead, with less waiting and more instructions; 0: they are not
//   CLUSTER thread blocks that divide the columns of a tile and add up through each other's shared memory
//   DEPTH   64-column tiles of a stage
//   STAGES  stages in flight
//   HALF    1: x, y and the adapter are fp16, and the matrix unit multiplies fp16; 0: bf16. Sums are fp32 either way
//   SYNCHRONOUS  1: each warp uses `mma.sync` instead of `wgmma`, of which each call takes 28 clocks even for few tokens;
//           GROUP and AHEAD then have no effect
//
// The weights are the A operand: they are decoded in registers and never written back. The tokens are the B operand,
// brought by the tensor copy engine with a 128-byte swizzle. One warp copies weights, one copies tokens.
//
// The kernel may start before the one ahead of it in the stream has ended (programmatic dependent launch). Weights are fetched at
// once, because no kernel ahead writes them. Tokens are read and results written only after `wait_for_previous_kernel`. Behind
// adapter_shrink tokens are read at once too: it starts this kernel when x is complete, and only the end of a tile needs s.
//
// The policy adapter is s = x A^T: (M, R), which adapter_shrink.cu computes just before, and B: (N, R). The block that has the whole
// sum of a tile scales it and adds s B^T. B is read straight from memory, because R is small.
//
// Read decode.cuh first, then hopper.cuh (instructions), schedule.cuh (which block does what), copy_body.cuh, multiply_body.cuh,
// finish_body.cuh, and this file, which joins them. compiler.read_source puts the parts in their places. The three bodies are
// text within the kernel. As functions they would give the same arithmetic with instructions in another order, and need new timings.

#include "schedule.cuh"

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
  if (warp >= 4 * WARPGROUPS) {  // the copying warpgroup: a warp copies weights, one copies tokens, two signal other blocks
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPY_REGISTERS));
#include "copy_body.cuh"
    if constexpr (CLUSTER > 1) arrive_at_cluster(), wait_for_cluster(), arrive_at_cluster(), wait_for_cluster();
  } else {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));

  const int warpgroup = warp / 4 % ROW_GROUPS, k_group = warp / 4 / ROW_GROUPS;
  const int thread = threadIdx.x % 128, g = lane / 4;
  const u8* first_tile = memory + STAGES * X_STAGE + (warpgroup * ROWS * DEPTH + k_group) * TILE_BYTES;
  const u8 *w_thread = first_tile + thread * 16, *s_thread = first_tile + SCALE_OFFSET + warp % 4 * 64 + g * 8;
  const u32 x_first = base + k_group * X_TILE;
  float sums[ROWS][TOKENS / 2];
  uint4 codes[ROWS];  // codes of the next 64 columns
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

#include "finish_body.cuh"

  const bool runs_are_long = p.shared_tiles >= (int)gridDim.x;
  while (segment.next()) {
    int n_tile, m_tile;
    locate(p, segment.tile, n_tile, m_tile);
    const bool begun = CLUSTER == 1 && segment.first > 0 && segment.last == steps;  // blocks of lower index have begun this tile
    const bool goes_on = begun && runs_are_long && k_group == 0;
    if (goes_on) synchronize<READY, WORKERS + 32>();
    // Sums start with a select, not a branch: if they came from two places, the assembler would serialize every `wgmma`.
    const float4* theirs = (const float4*)(partials + (size_t)(segment.block - 1) * TILE_SUMS) + threadIdx.x;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int n = 0; n < TOKENS / 8; ++n) {
        const float4 start = goes_on ? __ldcg(theirs + (r * (TOKENS / 8) + n) * WORKERS) : make_float4(0.f, 0.f, 0.f, 0.f);
        sums[r][n * 4] = start.x, sums[r][n * 4 + 1] = start.y, sums[r][n * 4 + 2] = start.z, sums[r][n * 4 + 3] = start.w;
      }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {  // prefetch what the end of this tile needs
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

#include "multiply_body.cuh"

    if constexpr (KGROUPS > 1 && CLUSTER == 1) {  // the first group adds the others' sums, in their order
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
      synchronize<LEFT, 128 * WARPGROUPS>();  // no warp reads the stages any more
      const u32 mine = base + 16 * (warpgroup * 128 + thread);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n)
          *(float4*)(memory + 4 * k_group * TILE_SUMS + 16 * ((r * (TOKENS / 8) + n) * WORKERS + warpgroup * 128 + thread)) =
              make_float4(sums[r][n * 4], sums[r][n * 4 + 1], sums[r][n * 4 + 2], sums[r][n * 4 + 3]);
      const int first_eight = (blockIdx.x % CLUSTER * KGROUPS + k_group) * SHARE;
      wait_for_previous_kernel();  // it computes s, and may still read the memory that is written below
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
      wait_for_cluster();  // the other blocks may still read this block's memory
    } else {
      wait_for_previous_kernel();  // it computes s, and may still read the memory that is written below
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
      finish((float(*)[4 * SHARE])sums, n_tile, m_tile, 0);  // without a cluster sums have this shape
    }
  }
  }
}
