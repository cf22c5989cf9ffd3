"""Test which block computes what and waits for whom, by compiling the CUDA scheduling source for this CPU.

The tests take out of ``schedule.cuh`` and ``copy_body.cuh`` only the instructions that C++ lacks. Instructions by which
blocks count each other's sums are replaced by their effects. So a test sees what each block copies, stores and waits
for, with the sizes that ``gemm.product`` gives the driver.
"""

import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from qerl_kernels import gemm, rule, tiles
from qerl_kernels.compiler import read_source

FOLDER = Path(gemm.__file__).parent
CXX = shutil.which("g++") or shutil.which("clang++")
KINDS = {
    "runs": gemm.deepest(64, 4, 2, 1, 4, 4, 0),
    "long runs": gemm.deepest(128, 2, 1, 1, 2, 4, 0),
    "cluster": gemm.deepest(64, 4, 2, 1, 4, 4, 0, cluster=4),
}
PRELUDE = """
#include <algorithm>
#include <cstddef>
#include <cstdio>
#define __device__
#define __forceinline__ inline
using std::max; using std::min;
struct uint4 { unsigned x, y, z, w; }; struct float4 { float x, y, z, w; };
struct { int x; } blockIdx, gridDim;
inline unsigned __byte_perm(unsigned, unsigned, unsigned) { return 0; }
inline size_t __cvta_generic_to_shared(const void*) { return 0; }
inline void __syncwarp() {}
struct Stopped {};
"""
# The program reads a problem, a grid and the counters' initial value. The first two warps copy, the third stores sums,
# the fourth waits.
MAIN = """
u32 counters[1024];
void copied_weights(u32, const void* from, u32 bytes, u32) {  // of tiles that begin at 0
  printf("weights %d %zu %u\\n", blockIdx.x, (size_t)from / TILE_BYTES, bytes / TILE_BYTES);
}
void copied_tokens(u32, const TensorMap*, int column, int row, u32) {
  printf("tokens %d %d %d\\n", blockIdx.x, row, column);
}
void copying(const Problem& p, int warp) {
  const int lane = 0, steps = (p.k_tiles + DEPTH - 1) / DEPTH;
  u32 base = 0, w_base = 0, full = 0, empty = 0, phase = 0;
  int stage = 0;
  const u8* tiles = nullptr;
  TensorMap x;
  Segments segment(p, steps);
BODY
}
int main() {
  Problem p; u32 before;
  while (fread(&p, sizeof p, 1, stdin) && fread(&gridDim.x, 4, 1, stdin) && fread(&before, 4, 1, stdin)) {
    std::fill(counters, counters + 1024, before);
    printf("problem\\n");
    for (int warp = 0; warp < 4; ++warp)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        if (warp < 2) {
          Segments segment(p, (p.k_tiles + DEPTH - 1) / DEPTH);
          while (warp == 0 && segment.next())
            printf("segment %d %d %d %d\\n", blockIdx.x, segment.tile, segment.first, segment.last);
        }
        try { copying(p, 4 * WARPGROUPS + warp); } catch (Stopped) { printf("stopped %d\\n", blockIdx.x); }
      }
    for (int i = 0; i < 1024; ++i) if (counters[i]) printf("left %d %u\\n", i, counters[i]);
  }
}
"""
EFFECTS = (  # instruction of the GPU -> what it does
    (
        r'asm volatile\("red\.relaxed[^"]*" ::"l"\((.*?)\) : "memory"\)',
        r'(printf("leaves %d %d\\n", blockIdx.x, (int)(\1 - counters)), *(\1) += 1)',
    ),
    (
        r'asm volatile\("ld\.acquire[^"]*" : "=r"\(there\) : "l"\((.*?)\) : "memory"\)',
        r'(looks || printf("waits %d\\n", blockIdx.x)), there = *(\1)',
    ),
    (r'asm volatile\("trap;"\)', "throw Stopped{}"),
    (r'asm volatile\("mov\.u64[^;]*;" : "=l"\(now\)\)', "static u64 clock; now = clock += 1ull << 37"),
    (r"copy_bulk\(w_base", "copied_weights(w_base"),
    (r"copy_tile\(base", "copied_tokens(base"),
    (r"\basm\b(?: volatile)?\s*\(.*?\);", ";"),
)


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """Return a configuration and a compiled program that walks its problems."""
    if CXX is None:
        pytest.skip("needs a C++ compiler")
    c, program = KINDS[request.param], tmp_path_factory.mktemp("walk") / "walk"
    schedule, body = read_source(FOLDER / "schedule.cuh"), (FOLDER / "copy_body.cuh").read_text()
    for instruction, effect in EFFECTS:
        if not instruction.startswith(r"\basm"):
            assert len(re.findall(instruction, schedule + body)) == 1, instruction
        schedule, body = (re.sub(instruction, effect, text, flags=re.DOTALL) for text in (schedule, body))
    macros = [f"-D{name}={value}" for name, value in gemm._job(c, torch.bfloat16)[1]]
    text = PRELUDE + schedule + MAIN.replace("BODY", body)
    command = [CXX, "-std=c++17", "-w", "-O1", *macros, "-x", "c++", "-", "-o", program]
    subprocess.run(command, input=text, text=True, check=True)
    return c, program


def launched(recorded, configuration, N, K, M):
    """Return the problem and the number of blocks that ``gemm.product`` gives the driver on 132 multiprocessors."""
    shape = -(-N // 64), 2 * -(-K // 128), 0
    weight = tiles.TiledWeight(torch.empty(shape), torch.empty(N), torch.empty(0), N, K)
    gemm.product(torch.empty(M, K, dtype=torch.bfloat16), weight, configuration)
    return recorded.launched[-1].problem, recorded.launched[-1].grid[0]


def walk(program, cases, before=0):
    """Run ``cases``, pairs of problem and blocks, and return each one's printed lines as {word: [numbers]}."""
    given = b"".join(bytes(p) + blocks.to_bytes(4, "little") + before.to_bytes(4, "little") for p, blocks in cases)
    printed = subprocess.run([program], input=given, capture_output=True, check=True).stdout.decode()
    found = []
    for text in printed.split("problem\n")[1:]:
        found.append(defaultdict(list))
        for line in text.splitlines():
            word, *numbers = line.split()
            found[-1][word].append(tuple(map(int, numbers)))
    return found


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
def test_a_block_is_given_the_shared_memory_that_the_source_lays_out(tmp_path):
    """Compare the shared memory sizes, since a smaller one would let the block write beyond its end.

    Compiling also checks the source's own static assertions for every variant.
    """
    lines = re.findall(r"^(?:constexpr int|static_assert).*;", read_source(FOLDER / "schedule.cuh"), re.MULTILINE)
    variants, text, program = [*rule.rule().variants, *KINDS.values()], "#include <cstdio>", tmp_path / "sizes"
    for i, c in enumerate(variants):
        macros = dict(gemm._job(c, torch.bfloat16)[1])
        barriers = "constexpr int END = BARRIER_OFFSET + 16 * STAGES;"  # two barriers of 8 bytes per stage
        define = [f"#define {name} {value}" for name, value in macros.items()]
        text = "\n".join([text, *define, f"namespace v{i} {{", *lines, barriers, "}", *(f"#undef {n}" for n in macros)])
    prints = "".join(f'printf("%d ", v{i}::END);' for i in range(len(variants)))
    command = [CXX, "-std=c++17", "-w", "-x", "c++", "-", "-o", program]
    subprocess.run(command, input=f"{text}\nint main() {{ {prints} }}", text=True, check=True)
    printed = subprocess.run([program], capture_output=True, check=True).stdout
    assert [c.shared_memory() for c in variants] == [int(size) for size in printed.split()]
    assert len({(c.cluster > 1, c.kgroups > 1) for c in variants}) == 4


def test_a_variant_has_as_many_stages_as_fit_and_fragments_that_take_turns():
    c = gemm.deepest(64, 4, 2, 1, 4, 4, 0)
    assert 2 < c.stages < 12 and c.shared_memory() <= 227 * 1024 < replace(c, stages=c.stages + 1).shared_memory()
    assert gemm.deepest(8, 4, 2, 1, 2, 4, 0, 1).stages == 12
    with pytest.raises(ValueError, match="more than 232448 bytes"):
        gemm.deepest(256, 4, 1, 2, 4, 4, 0)
    with pytest.raises(ValueError, match="must be even; halve group"):  # a stage would hold a single decoding
        gemm.deepest(64, 4, 4, 1, 4, 4, 0)
    assert gemm.deepest(64, 4, 4, 1, 4, 4, 0, 1).synchronous == 1


SHAPES = [(N, K, M) for N in (16, 208, 3584) for K in (64, 1024, 3584) for M in (1, 70, 300)] + [
    (13824, 512, 900),
    (3584, 18944, 64),
]


def test_every_stage_is_computed_once_and_every_sum_that_is_waited_for_is_left(kind, recorded):
    c, program = kind
    splits = (0,) if c.cluster > 1 else (0, 1, 3, gemm.WHOLE)
    shapes = [shape for shape in SHAPES if 2 * -(-shape[1] // 128) % c.depth == 0]
    cases = [launched(recorded, replace(c, splits=s), *shape) for s in splits for shape in shapes]
    waited = 0
    for (p, blocks), found in zip(cases, walk(program, cases), strict=True):
        steps, of_tile, left_by = p.k_tiles // c.depth, defaultdict(list), defaultdict(int)
        for block, tile, first, last in found["segment"]:
            # with fewer stages than blocks a block may get none
            assert 0 <= first < last <= steps or (c.cluster > 1 and 0 <= first == last)
            of_tile[tile].append((first, last, block))
        assert sorted(of_tile) == list(range(p.n_tiles * p.m_tiles))
        signals = defaultdict(list)
        for block, to in found["leaves"]:
            signals[to].append(block)
        for tile, parts in of_tile.items():
            parts.sort()
            assert parts[0][0] == 0 and parts[-1][1] == steps
            assert all(one[1] == following[0] for one, following in pairwise(parts)), "a gap, or twice"
            if c.cluster > 1:
                assert [part[2] for part in parts] == [tile * c.cluster + i for i in range(c.cluster)]
                continue
            *others, (_, _, finisher) = parts
            of_others = [block for *_, block in others]
            assert of_others == list(range(finisher - len(others), finisher)), "read in this order"
            assert not others or signals.pop(finisher) == of_others
            assert len(others) <= 1 or p.shared_tiles < blocks, "long runs go on from one sum"
            waited += len(others)
            for block in of_others:
                left_by[block] += 1
        assert not signals, "a signal that nobody waits for would be found by the next launch"
        assert set(left_by.values()) <= {1}, "a block has one place for a sum"
        assert not found["stopped"] and not found["left"], "counters are zero again"
        assert {block for (block,) in found["waits"]} == {to for _, to in found["leaves"]}
        stages = [(block, tile, step) for block, tile, *run in found["segment"] for step in range(*run)]
        weights, tokens = found["weights"][:: c.tile_blocks()], found["tokens"][:: c.depth]
        assert len(found["weights"]) == c.tile_blocks() * len(stages) and len(found["tokens"]) == c.depth * len(stages)
        columns = [64 * (step * c.depth + i) for *_, step in stages for i in range(c.depth)]
        assert [column for *_, column in found["tokens"]] == columns
        places = {}
        for (block, tile, step), of_rows, of_tokens in zip(stages, weights, tokens, strict=True):
            row, k_tile = divmod(of_rows[1], p.k_tiles)
            assert (of_rows[0], k_tile, of_rows[2]) == (block, step * c.depth, c.depth)
            assert of_tokens[0] == block
            places.setdefault(tile, set()).add((row / c.tile_blocks(), of_tokens[1] / c.tokens))
        assert all(len(place) == 1 for place in places.values())
        every = {(n, m) for n in range(p.n_tiles) for m in range(p.m_tiles)}
        assert set.union(*places.values()) == every and len(places) == len(every)
    assert (waited > 100) == (c.cluster == 1)


def test_counters_that_a_launch_did_not_leave_zero_stop_the_next_one_and_never_give_numbers(kind, recorded):
    """Check that stale counters stop a launch instead of hanging it or using wrong sums.

    This can only happen if two launches share counters.
    """
    c, program = kind
    case = launched(recorded, c, 3584, 3584, 70)
    (right,), (wrong,) = (walk(program, [case], before) for before in (0, 7))
    finishers = {to for _, to in right["leaves"]}
    assert {block for (block,) in wrong["stopped"]} == finishers and not right["stopped"]
    assert bool(finishers) == (c.cluster == 1)
