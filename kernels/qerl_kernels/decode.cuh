// Decode NVFP4 codes and block scales to fragments of the matrix unit, in registers; tiles.py defines the layout. With HALF 1 operands
// are fp16, with 0 bf16. Each type has its own order of codes in a word.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

constexpr int TILE_BYTES = 2304;  // 64 x 64 codes, then 64 x 4 block scales
constexpr int SCALE_OFFSET = 2048;

#if HALF
#define OPERAND "f16"
constexpr u32 SCALE_STEP = 128, SCALE_BASE = 0x30003000u;
#else
#define OPERAND "bf16"
constexpr u32 SCALE_STEP = 16, SCALE_BASE = 0x76007600u;
#endif

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {  // two products; subnormal inputs and results are kept
  u32 product;
  asm("mul.rn." OPERAND "x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Decode a row pair's scales of step `j` -> {row g, row g + 8}: scale * 2^119 in bf16, scale * 2^7 in fp16.
__device__ __forceinline__ u32 decode_scales(u32 bytes, int j) {
  return __byte_perm(bytes, 0, j ? 0x4341 : 0x4240) * SCALE_STEP + SCALE_BASE;
}

// Decode eight codes -> the four registers of an m64k16 A fragment, W0 * 2^-7. Moving bits gives code * 2^-126 (fp16: code * 2^-14),
// which is multiplied by what decode_scales gives.
__device__ __forceinline__ void decode(u32 word, u32 scales, u32 (&a)[4]) {
  u32 upper, lower;  // written this way, the assembler folds the copies into the products (HMUL2 .H0_H0 and .H1_H1)
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; mov.b32 %0, {l, l}; mov.b32 %1, {h, h};}" : "=r"(upper), "=r"(lower) : "r"(scales));
#if HALF
  a[0] = multiply(word & 0x8E008E00u, upper);
  a[1] = multiply((word << 3) & 0x8E008E00u, lower);
  a[2] = multiply(((word << 1) & 0x80008000u) | ((word << 6) & 0x0E000E00u), upper);
  a[3] = multiply(((word << 2) & 0x80008000u) | ((word << 9) & 0x0E000E00u), lower);
#else
  a[0] = multiply(word & 0x81C081C0u, upper);
  a[1] = multiply((word << 3) & 0x81C081C0u, lower);
  a[2] = multiply((word << 6) & 0x81C081C0u, upper);
  a[3] = multiply(((word << 1) & 0x80008000u) | ((word >> 3) & 0x01800180u) | ((word >> 7) & 0x00400040u), lower);
#endif
}
