// Say which thread block of the product does what, and how its shared memory is divided.
//
// Without a cluster the first tiles are a list of (tile, stage) pairs, cut into equal consecutive runs, one a block. A block goes
// through its run from the end. A block of higher index finishes the tile there, so this block leaves its sum in `partials` early. The
// tile at the start of the run comes last; this block continues from the sum that a block of lower index has left long before. Where
// runs are shorter than tiles, it adds at its end the sums of several blocks. The other tiles are whole and follow in rounds.
//
// With a cluster each cluster has one tile, and each of its blocks an equal share of the columns. Then each block adds up the sums of
// all for some of the tokens. Either way the order of summation does not depend on timing.
#pragma once
#include "hopper.cuh"

struct Divisor { u32 magic, shift; };  // divides numbers below 2^31: gemm.Divisor
__device__ __forceinline__ int divide(int n, Divisor by) { return (int)((u64)n * by.magic >> by.shift); }

struct Problem {
  int M, N, blocks, k_tiles;  // blocks: 64-row blocks of W; k_tiles: 64-column tiles, a multiple of 2
  int n_tiles, m_tiles;       // tiles of 64 * CTA_BLOCKS rows and of TOKENS tokens
  int shared_tiles;           // the first tiles are cut into equal runs; the others are whole, one a block and round
  int adapter_columns;        // columns of s and B, a multiple of 32; 0: no adapter
  int tokens_ready;           // 1: the kernel ahead is adapter_shrink, which starts this one once x is complete
  Divisor by_steps, by_units, by_blocks;
};

constexpr int ROW_GROUPS = WARPGROUPS / KGROUPS, CTA_BLOCKS = ROW_GROUPS * ROWS;
constexpr int WORKERS = 128 * ROW_GROUPS;  // threads that hold the sums of a tile in the end
constexpr int THREADS = 128 * WARPGROUPS + 128;  // half of the copying warpgroup only lends its registers
// The registers of the launch are divided anew; asking for more than those in all would wait for ever.
constexpr int REGISTERS = WARPGROUPS == 4 ? 112 : WARPGROUPS == 3 ? 160 : 232;
constexpr int COPY_REGISTERS = 32;
constexpr int LEFT = 5, READY = 10;  // named barriers: this block has left its sums; others have left theirs
constexpr u64 PATIENCE = 60000000000ull;  // nanoseconds that a block waits for the sums of others, which take microseconds
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

// Walk over this block's segments: (tile, first stage, end stage).
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

__device__ __forceinline__ void synchronize_row_group(int row_group) {
  asm volatile("bar.sync %0, %1;" ::"r"(row_group + 6), "n"(128 * KGROUPS) : "memory");
}

constexpr int X_TILE = TOKENS * 128;  // bytes of 64 columns of all tokens
constexpr int X_STAGE = DEPTH * X_TILE, W_STAGE = CTA_BLOCKS * DEPTH * TILE_BYTES;
constexpr int SHARES = CLUSTER > 1 ? CLUSTER * KGROUPS : 1;          // shares of a tile's tokens at its end
constexpr int SHARE = (TOKENS / 8 + SHARES - 1) / SHARES;              // groups of 8 tokens of one share
constexpr int SLICE = SHARE % 8 == 0 ? 64 : SHARE % 6 == 0 ? 48 : 8 * SHARE;  // tokens transposed at a time
constexpr int TURN_ROW = 144;                                         // bytes: 64 outputs of a token, padded
static_assert(DEPTH % KGROUPS == 0 && WARPGROUPS % KGROUPS == 0, "columns and warpgroups are divided evenly");
// With an odd number registers would be overwritten while the matrix unit still reads them.
static_assert(SYNCHRONOUS || DEPTH / KGROUPS * (4 * ROWS / GROUP) % 2 == 0, "the two buffers of fragments take turns");

constexpr int TURN_OFFSET = STAGES * (X_STAGE + W_STAGE);
constexpr int REDUCE_OFFSET = TURN_OFFSET + (CLUSTER > 1 ? WARPGROUPS : ROW_GROUPS) * SLICE * TURN_ROW;
constexpr int TILE_SUMS = ROWS * (TOKENS / 2) * WORKERS;
constexpr int BARRIER_OFFSET = REDUCE_OFFSET + (KGROUPS > 1 && CLUSTER == 1 ? 4 * TILE_SUMS : 0);
static_assert(CLUSTER == 1 || 4 * KGROUPS * TILE_SUMS <= TURN_OFFSET, "the sums of a cluster's blocks lie where the stages were");
