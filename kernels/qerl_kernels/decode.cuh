// NVFP4 codes and block scales to bf16 fragments of the matrix unit, in registers: the layout is that of tiles.py.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

constexpr int TILE_BYTES = 2304;  // 64 x 64 codes, then 64 x 4 block scales
constexpr int SCALE_OFFSET = 2048;

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
