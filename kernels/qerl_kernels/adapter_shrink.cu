// The adapter's first product, s = x A^T, for sm_90a; the second, s B^T, is the end of nvfp4_tiles.cu.
//
//   adapter_shrink   x: (M, K) bf16 with a row stride, A: (R, K) bf16, s: (M, R) bf16; R a multiple of 16, K of 16
//
// K is long and the result small, so the columns are divided among the warps of eight blocks, a cluster, which add up through
// their shared memory in a fixed order: the same bits each time. Compiled with TOKENS (8, 16 or 32), the tokens of a block; a
// block has 16 rows of A. Within 32 columns a thread takes eight neighbours of each row, 16 bytes, for both operands: the sum
// over columns does not mind which comes when.

typedef unsigned int u32;
typedef unsigned short u16;

constexpr int WARPS = 8, SPLITS = 8, AHEAD = TOKENS < 32 ? 4 : 2;  // chunks of 32 columns that a warp reads at a time
constexpr int SUMS = 16 * TOKENS;                                  // of a block

__device__ __forceinline__ void synchronize_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
adapter_shrink(const u16* __restrict__ x, const u16* __restrict__ a, u16* __restrict__ s, int M, int K, int R, int x_stride) {
  __shared__ float of_warps[WARPS][SUMS], of_block[SUMS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int rank = blockIdx.x % SPLITS, row = blockIdx.y * 16 + g, token = blockIdx.z * TOKENS + g;
  const int first = (rank * WARPS + warp) * 32, stride = SPLITS * WARPS * 32;
  const u16* a_upper = a + (size_t)row * K + c * 8;
  const u16* a_lower = a_upper + (size_t)8 * K;

  for (int column = first; column + c * 8 < K; column += stride) {  // nobody writes A while kernels run ahead: fetch it
    asm volatile("prefetch.global.L2 [%0];\nprefetch.global.L2 [%1];" ::"l"(a_upper + column), "l"(a_lower + column));
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // not before x is there: the product that starts now reads it at once, and waits for s only at its end
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  float sums[TOKENS / 8][4] = {};
  const uint4 zero = make_uint4(0, 0, 0, 0);
  for (int start = first; start < K; start += AHEAD * stride) {
    uint4 upper[AHEAD], lower[AHEAD], t[AHEAD][TOKENS / 8];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int column = start + i * stride;
      const bool inside = column + c * 8 < K;
      upper[i] = inside ? *(const uint4*)(a_upper + column) : zero;
      lower[i] = inside ? *(const uint4*)(a_lower + column) : zero;
#pragma unroll
      for (int n = 0; n < TOKENS / 8; ++n)
        t[i][n] = inside && token + n * 8 < M ? *(const uint4*)(x + (size_t)(token + n * 8) * x_stride + column + c * 8) : zero;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
#pragma unroll
      for (int n = 0; n < TOKENS / 8; ++n) {
        float(&d)[4] = sums[n];
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(upper[i].x), "r"(lower[i].x), "r"(upper[i].y), "r"(lower[i].y), "r"(t[i][n].x), "r"(t[i][n].y));
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(upper[i].z), "r"(lower[i].z), "r"(upper[i].w), "r"(lower[i].w), "r"(t[i][n].z), "r"(t[i][n].w));
      }
  }
  // (token, row): neighbours in memory are neighbours in the result
#pragma unroll
  for (int n = 0; n < TOKENS / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) of_warps[warp][(n * 8 + c * 2 + i % 2) * 16 + g + i / 2 * 8] = sums[n][i];
  __syncthreads();
  for (int at = threadIdx.x; at < SUMS; at += 32 * WARPS) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += of_warps[w][at];
    of_block[at] = sum;
  }
  synchronize_cluster();
  constexpr int SHARE = SUMS / SPLITS;
  if (threadIdx.x < SHARE) {
    const int at = rank * SHARE + threadIdx.x;
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
    const int to = blockIdx.z * TOKENS + at / 16;
    u16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(sum));
    if (to < M) s[(size_t)to * R + blockIdx.y * 16 + at % 16] = rounded;
  }
  synchronize_cluster();  // the others may still read this block's memory
}
