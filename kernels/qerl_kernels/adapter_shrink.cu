// Compute the adapter's first product, s = x A^T, for sm_90a; nvfp4_tiles.cu computes the second, s B^T, at its end.
//
//   adapter_shrink   x: (M, K) with a row stride, A: (R, K), s: (M, R); R a multiple of 16, K of 16
//
// K is long and the result small, so the columns are divided among the warps of a cluster of eight blocks. The blocks add up through
// their shared memory in a fixed order, which gives the same bits each time.
//
// The compiler gets these macros. HALF is 1 where x, A and s are fp16, 0 where they are bf16. TOKENS and GROUPS are the tokens and the
// groups of 16 rows of A of a block; WARPS are its warps. Where the grid has fewer blocks than the tokens need, each block computes
// TOKENS of them several times.
//
// Within 32 columns a thread reads eight neighbours of each row, 16 bytes, for both operands; the sum does not depend on the order of
// columns. The product that starts meanwhile takes whole multiprocessors and waits for those on which this kernel runs. So this kernel
// must be short, or fit on multiprocessors that the product leaves free.

typedef unsigned int u32;
typedef unsigned short u16;

#if HALF
#define OPERAND "f16"
#else
#define OPERAND "bf16"
#endif

constexpr int SPLITS = 8;
// AHEAD is how many chunks of 32 columns a warp reads at a time: as many as its registers hold, at most five.
constexpr int REGISTERS = (WARPS > 8 ? 2048 / WARPS : 255) - 40 - GROUPS * TOKENS / 2, OF_CHUNK = 4 * (2 * GROUPS + TOKENS / 8);
constexpr int AHEAD = REGISTERS < OF_CHUNK ? 1 : REGISTERS < 5 * OF_CHUNK ? REGISTERS / OF_CHUNK : 5;
constexpr int ROWS = 16 * GROUPS, SUMS = ROWS * TOKENS;  // rows of A and sums of a block

__device__ __forceinline__ void synchronize_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Load eight columns of a row, zeros past the end. The asm is volatile so that all loads of a round start before its first product.
// Otherwise the compiler moves each load next to its use to save registers, and each waits for the one before.
__device__ __forceinline__ uint4 load(const u16* row, int column, int K) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred inside;\nsetp.ne.s32 inside, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@inside ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(row + column), "r"((int)(column < K)));
  return v;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
adapter_shrink(const u16* __restrict__ x, const u16* __restrict__ a, u16* __restrict__ s, int M, int K, int R, int x_stride) {
  extern __shared__ float of_warps[];  // (WARPS, SUMS), and behind it the block's own SUMS
  float* of_block = of_warps + WARPS * SUMS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int rank = blockIdx.x % SPLITS, row = blockIdx.y * ROWS + g;
  const int first = (rank * WARPS + warp) * 32, stride = SPLITS * WARPS * 32, mine = c * 8;
  const u16* a_row = a + (size_t)row * K;

  uint4 rows[AHEAD][2 * GROUPS], t[AHEAD][TOKENS / 8];
  auto ask_for_a = [&](int start) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
#pragma unroll
      for (int half = 0; half < 2 * GROUPS; ++half) rows[i][half] = load(a_row + (size_t)(8 * half) * K, start + i * stride + mine, K);
  };
  ask_for_a(first);  // no kernel ahead in the stream writes A
  for (int column = first + AHEAD * stride + mine; column < K; column += stride)
#pragma unroll
    for (int half = 0; half < 2 * GROUPS; ++half)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(a_row + (size_t)(8 * half) * K + column));
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // Start the product only when x is complete: it reads x at once, and waits for s only at its end.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  for (int first_token = blockIdx.z * TOKENS; first_token < M; first_token += gridDim.z * TOKENS) {
    float sums[GROUPS][TOKENS / 8][4] = {};
    for (int start = first; start < K; start += AHEAD * stride) {
      if (start > first || first_token > blockIdx.z * TOKENS) ask_for_a(start);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n)  // past the end: the last token again, whose extra sums are not stored
          t[i][n] = load(x + (size_t)min(first_token + g + n * 8, M - 1) * x_stride, start + i * stride + mine, K);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
#pragma unroll
          for (int n = 0; n < TOKENS / 8; ++n) {
            float(&d)[4] = sums[group][n];
            const uint4 upper = rows[i][2 * group], lower = rows[i][2 * group + 1];
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(upper.x), "r"(lower.x), "r"(upper.y), "r"(lower.y), "r"(t[i][n].x), "r"(t[i][n].y));
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(upper.z), "r"(lower.z), "r"(upper.w), "r"(lower.w), "r"(t[i][n].z), "r"(t[i][n].w));
          }
    }
    // Store sums as (token, row), so that neighbours in memory are neighbours in the result.
#pragma unroll
    for (int group = 0; group < GROUPS; ++group)
#pragma unroll
      for (int n = 0; n < TOKENS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          of_warps[warp * SUMS + (n * 8 + c * 2 + i % 2) * ROWS + group * 16 + g + i / 2 * 8] = sums[group][n][i];
    __syncthreads();
    for (int at = threadIdx.x; at < SUMS; at += 32 * WARPS) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += of_warps[w * SUMS + at];
      of_block[at] = sum;
    }
    synchronize_cluster();
    constexpr int SHARE = SUMS / SPLITS;
    for (int of_share = threadIdx.x; of_share < SHARE; of_share += 32 * WARPS) {
      const int at = rank * SHARE + of_share;
      const u32 here = (u32)__cvta_generic_to_shared(&of_block[at]);
      float sum = 0.f;
#pragma unroll
      for (int other = 0; other < SPLITS; ++other) {
        u32 there;
        float part;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(other));
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part) : "r"(there) : "memory");
        sum += part;
      }
      const int to = first_token + at / ROWS;
      u16 rounded;
      asm("cvt.rn." OPERAND ".f32 %0, %1;" : "=h"(rounded) : "f"(sum));
      if (to < M) s[(size_t)to * R + blockIdx.y * ROWS + at % ROWS] = rounded;
    }
    synchronize_cluster();  // the others may still read this block's memory
  }
}
