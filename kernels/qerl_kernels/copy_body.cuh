// This part of nvfp4_gemm's body is the copying warpgroup. One thread copies the weights and one the tokens, each stage as it becomes
// free. Two warps exchange signals with other blocks, whose sums this one needs or which need this one's.
// It uses warp, lane, segment (whose run it walks), stage and phase, the addresses base, w_base, full and empty, and the arguments.
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
            const int row = min(n_tile * CTA_BLOCKS + block, p.blocks - 1);  // rows past the end are copied, but their results are not stored
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
    if (leaves && end > end_tile * steps) {  // another block finishes the last tile: tell it when this sum is written
      synchronize<LEFT, WORKERS + 32>();
      if (lane == 0) {
        asm volatile("fence.acq_rel.gpu;" ::: "memory");  // release all that this block has written
        asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counters + segment.owner(end_tile * steps + steps - 1)) : "memory");
      }
      __syncwarp();
    }
    if (!leaves && begin > first_tile * steps && end >= (first_tile + 1) * steps) {  // this block finishes what others have begun
      if (lane == 0) {
        wait_for_previous_kernel();  // it may not have reset its counters yet
        const u32 others = blockIdx.x - segment.owner(first_tile * steps);
        u32 there, looks = 0;
        const u64 began = nanoseconds();
        do {
          asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(counters + blockIdx.x) : "memory");
          // This happens only if another launch uses the same counters: end the program with an error instead of hanging.
          if ((++looks & 0xFFFF) == 0 && nanoseconds() - began > PATIENCE) asm volatile("trap;");
        } while (there != others);
        counters[blockIdx.x] = 0;  // zero again for the next launch
      }
      __syncwarp();
      arrive<READY, WORKERS + 32>();
    }
  }
  __syncwarp();
