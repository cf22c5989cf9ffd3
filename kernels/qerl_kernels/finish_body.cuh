// This part of nvfp4_gemm's body ends a tile: it scales, adds the adapter's s B^T and the bias, rounds once and writes to memory.
// It uses warp, lane, warpgroup, thread and g, memory and the arguments; it defines span, ask_for_end() and finish().
  // What the end of a tile needs beside its sums is loaded at one time, before the sums of other blocks are. With DIRECT a thread loads
  // the part of s that it multiplies. Where that is too much for registers, it loads its share of the warpgroup's part.
  constexpr bool DIRECT = SHARE <= 8;
  constexpr int PIECES = DIRECT ? SHARE : (SHARE + 3) / 4, AT_ONCE = SLICE / 16;  // pieces of 16 bytes; those that `turn` holds at once
  float scale_upper[ROWS], scale_lower[ROWS];
  uint4 b_upper[ROWS], b_lower[ROWS], s_pieces[PIECES];
  int2 span;  // outside of these columns of B the rows of this tile are zero
  auto first_row = [&](int n_tile, int r) { return (n_tile * CTA_BLOCKS + warpgroup * ROWS + r) * 64 + (warp % 4) * 16 + g; };
  auto ask_for_columns = [&](int n_tile, int m_tile, int first_eight, int column) {
    // A thread loads eight neighbouring columns of both operands; the sum does not depend on the order of columns.
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

  // End a tile: `sums` are complete, for SHARE * 8 of the tile's tokens from eight `first_eight` on.
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

    // Transpose (rows, tokens) to (tokens, rows) through shared memory, then write 16 bytes a thread.
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
          const u32 upper = pack(s[0] + bias_upper, s[1] + bias_upper);
          const u32 lower = pack(s[2] + bias_lower, s[3] + bias_lower);
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
