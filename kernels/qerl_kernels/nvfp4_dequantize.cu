// Expand weights stored as fragment-ordered tiles (layout: tiles.py) to W0 = code * block scale, (N, K) bf16, for sm_90a. Compiled with
// HALF 1, the result is W0 * 2^-14 in fp16 (nvfp4.expanded_factor). Its rows lie `stride` numbers apart, a multiple of 8.
#include "hopper.cuh"

constexpr u32 FACTOR = HALF ? 0x20002000u : 0x43004300u;  // decode gives W0 * 2^-7; this is 2^-7 in fp16, 2^7 in bf16

// A thread block of 256 threads expands 64 rows and two tiles of columns.
extern "C" __global__ void __launch_bounds__(256)
nvfp4_dequantize(const u8* __restrict__ tiles, u16* __restrict__ w, int N, int K, int k_tiles, int first_row, int stride) {
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
    for (int i = 0; i < 4; ++i) {  // i = 0, 2 are row g, 1, 3 row g + 8; 2, 3 are eight columns further
      const int row = warp * 16 + g + i % 2 * 8, column = j * 16 + i / 2 * 8 + c * 2;
      *(u32*)(&turn[half][row][column * 2]) = multiply(a[i], FACTOR);
    }
  }
  synchronize_warpgroup(half);
  const int column = k_tile * 64 + thread % 8 * 8;
#pragma unroll
  for (int r = thread / 8; r < 64; r += 16) {
    const int row = blockIdx.y * 64 + r;
    if (row < N && column < K) *(uint4*)(w + (size_t)row * stride + column) = *(const uint4*)(&turn[half][r][thread % 8 * 16]);
  }
}
