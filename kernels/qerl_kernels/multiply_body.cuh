// This part of nvfp4_gemm's body is the inner loop. Over the stages of one segment it decodes weights into registers and multiplies them
// by the tokens. For few tokens each warp uses `mma.sync`, else `wgmma` multiplies one half of the fragments while the other is decoded.
// It uses segment, stage and phase, load() with codes, scales and x_stage; it adds to sums.
  if constexpr (SYNCHRONOUS) {
    bool is_full = false;  // true if the next stage was already seen to be full
    for (int step = segment.first; step < segment.last; ++step) {
      if (!is_full) barrier_wait(full + 8 * stage, phase);
      const int next = stage + 1 == STAGES ? 0 : stage + 1;
      const u32 next_phase = phase ^ (next == 0);
#pragma unroll
      for (int d = 0; d < DEPTH / KGROUPS; ++d) {
        load(stage, d);
        const u32 tokens = base + stage * X_STAGE + (d * KGROUPS + k_group) * X_TILE;
        u32 b[TOKENS / 8][8];  // 8 tokens by 64 columns; step j has registers 2 j and 2 j + 1
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
      __syncwarp();  // all lanes have read the stage
      if (lane == 0) barrier_arrive(empty + 8 * stage);
      stage = next, phase = next_phase;
    }
  } else {
  int previous = -1;
  bool is_full = false;  // true if the next stage was already seen to be full
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
          // The descriptor says: rows of 128 bytes, 128-byte swizzle, 1024 bytes a group of 8 rows.
          wgmma(sums[r], fragments[i], (u64)0x40000040u << 32 | (now_x + j * 2));
        }
        wgmma_commit();
        if (!AHEAD && d + 1 == DEPTH / KGROUPS && group + 1 == GROUPS) is_full = barrier_passed(full + 8 * next, next_phase);
        wgmma_wait<1>();  // the other half of `a` is free again, and so is the previous stage
        if (group == 0) {
          if (d == 0 && previous >= 0 && lane == 0) barrier_arrive(empty + 8 * previous);
          // Load what comes next while the matrix unit works.
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
