"""Compute y = row_scale * (x W0^T) + bias, and an adapter, from NVFP4 tiles that are decoded in registers on Hopper.

``tiles.py`` defines the layout, ``nvfp4_tiles.cu`` is the kernel. The product of a code and its block scale enters the
matrix unit exactly, sums are fp32, and the result is rounded once. The order of summation depends on the configuration,
on N and K and on the number of token tiles, never on timing: the same call gives the same bits.
"""

import ctypes
import functools
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qerl_kernels.adapter import Adapter, Shrink, Small, half, is_small, quickest
from qerl_kernels.compiler import Defines, compile_ahead, compile_source, read_source
from qerl_kernels.counters import counters_for
from qerl_kernels.driver import Call, Kernel, TensorMap, addresses, current_stream, launch
from qerl_kernels.tiles import TILE, TILE_BYTES, TiledWeight

SHARED_MEMORY = 227 * 1024  # bytes that one thread block may have on Hopper
TURN_ROW = 144  # bytes of a padded row of 64 outputs: TURN_ROW of schedule.cuh
PLANS = 1024  # plans kept over all threads, such as 4 layers by 256 numbers of tokens; each takes some 5 kB
WHOLE = -1  # splits of a product in which one block computes each tile


@dataclass(frozen=True)
class Configuration:
    """Name one variant of the kernel; all fields but ``splits`` are macros of ``nvfp4_tiles.cu`` in lower case.

    ``splits`` is the number of runs that each tile is cut into. With 0 the product is cut into equal runs, one for each
    block that the GPU holds; with WHOLE no tile is cut. With a cluster, its blocks share each tile.
    """

    tokens: int
    warpgroups: int
    kgroups: int
    rows: int
    depth: int
    group: int
    ahead: int
    cluster: int
    stages: int
    splits: int = 0
    synchronous: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a variant whose two buffers of fragments could not take turns."""
        if not self.synchronous and self.depth // self.kgroups * (4 * self.rows // self.group) % 2:
            raise ValueError(f"{self}: depth / kgroups * 4 * rows / group must be even; halve group")

    def tile_blocks(self) -> int:
        """Return the number of 64-row blocks that one thread block computes."""
        return self.warpgroups // self.kgroups * self.rows

    def shared_memory(self) -> int:
        """Return the dynamic shared memory in bytes, as ``schedule.cuh`` lays it out."""
        shares = self.cluster * self.kgroups if self.cluster > 1 else 1
        share = 8 * -(-self.tokens // (8 * shares))  # tokens whose sums each part of the cluster adds up at the end
        slice_ = next((width for width in (64, 48) if share % width == 0), share)
        stage = self.depth * (self.tokens * 128 + self.tile_blocks() * TILE_BYTES)
        transpose = (self.warpgroups if self.cluster > 1 else self.warpgroups // self.kgroups) * slice_ * TURN_ROW
        reduce = 4 * 64 * self.tile_blocks() * self.tokens if self.kgroups > 1 and self.cluster == 1 else 0
        return self.stages * stage + transpose + reduce + 16 * self.stages


def deepest(
    tokens: int,
    warpgroups: int,
    kgroups: int,
    rows: int,
    depth: int,
    group: int,
    ahead: int,
    synchronous: int = 0,
    cluster: int = 1,
) -> Configuration:
    """Return the configuration with as many stages as fit into shared memory, at most 12.

    Raises ValueError where not even two fit, or as ``Configuration``.
    """
    for stages in range(12, 1, -1):
        fields = (tokens, warpgroups, kgroups, rows, depth, group, ahead, cluster, stages, 0, synchronous)
        if Configuration(*fields).shared_memory() <= SHARED_MEMORY:
            return Configuration(*fields)
    raise ValueError(
        f"tokens={tokens}, rows={rows}, depth={depth} need more than {SHARED_MEMORY} bytes of shared memory"
    )


class Divisor(ctypes.Structure):
    """Hold a divisor so that n // divisor is n * magic >> shift for every n below 2^31.

    Granlund and Montgomery, Division by invariant integers using multiplication, 1994.
    """

    _fields_ = (("magic", ctypes.c_uint32), ("shift", ctypes.c_uint32))

    @classmethod
    def of(cls, divisor: int) -> "Divisor":
        """Return the magic number and the shift of a divisor from 1 to 2^31."""
        shift = 31 + (divisor - 1).bit_length()
        return cls(-(-(1 << shift) // divisor), shift)


class _Problem(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in (
                "M",
                "N",
                "blocks",
                "k_tiles",
                "n_tiles",
                "m_tiles",
                "shared_tiles",
                "adapter_columns",
                "tokens_ready",
            )
        ),
        *((name, Divisor) for name in ("by_steps", "by_units", "by_blocks")),
    )


def wgmma_source(tokens: int, operand: torch.dtype = torch.bfloat16) -> str:
    """Return the CUDA C++ of the matrix instruction for 64 rows, ``tokens`` columns and 16 of K.

    A comes from registers and B from shared memory.
    """
    sums, kinds = tokens // 2, "f16.f16" if operand == torch.float16 else "bf16.bf16"
    outputs = ", ".join(f"%{i}" for i in range(sums))
    a = ", ".join(f"%{sums + i}" for i in range(4))
    constraints = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    return f"""
__device__ __forceinline__ void wgmma(float (&d)[{sums}], const unsigned (&a)[4], unsigned long long b) {{
  asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add, 1, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.{kinds} {{{outputs}}}, {{{a}}}, %{sums + 4}, add, 1, 1, 0;\\n}}"
    : {constraints} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}
"""


@functools.cache
def source(kernel: str) -> str:
    """Return the CUDA C++ of the kernel file ``nvfp4_tiles`` or ``nvfp4_dequantize`` with its parts."""
    return read_source(Path(__file__).with_name(f"{kernel}.cu"))


def _job(configuration: Configuration, operand: torch.dtype) -> tuple[str, Defines]:
    defines = tuple((name.upper(), value) for name, value in asdict(configuration).items() if name != "splits")
    return wgmma_source(configuration.tokens, operand) + source("nvfp4_tiles"), (*defines, half(operand))


def _dequantize_job(operand: torch.dtype) -> tuple[str, Defines]:
    return source("nvfp4_dequantize"), (half(operand),)


@functools.cache
def machine_code(configuration: Configuration, operand: torch.dtype = torch.bfloat16) -> bytes:
    """Return the machine code of the product for one configuration.

    It is compiled once a process even without a cache on disk. Raises CompileError.
    """
    return compile_source(*_job(configuration, operand))


@functools.cache
def dequantize_code(operand: torch.dtype) -> bytes:
    """Return the machine code of the kernel that expands W0, as ``machine_code`` does for the product."""
    return compile_source(*_dequantize_job(operand))


def compile_all(configurations: Iterable[Configuration], operand: torch.dtype = torch.bfloat16) -> None:
    """Fill the cache with the product for many configurations, and with the kernel that expands W0, at once."""
    compile_ahead([_dequantize_job(operand), *(_job(configuration, operand) for configuration in configurations)])


@functools.cache
def _kernel(configuration: Configuration, device: int, operand: torch.dtype = torch.bfloat16) -> tuple[Kernel, int]:
    """Load a variant; return it and the number of clusters that the GPU holds at one time."""
    with torch.cuda.device(device):
        threads = 128 * (configuration.warpgroups + 1)
        code, shared_memory = machine_code(configuration, operand), configuration.shared_memory()
        kernel = Kernel(code, "nvfp4_gemm", threads, shared_memory, configuration.cluster)
        return kernel, kernel.clusters_at_once()


def load(configuration: Configuration, device: torch.device, operand: torch.dtype = torch.bfloat16) -> None:
    """Load one variant and the kernel that expands W0 on a device, compiling what the cache does not hold.

    Raises CompileError where one does not compile or load.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    _kernel(replace(configuration, splits=0), index, operand)
    _dequantize_kernel(index, operand)


@functools.cache
def _dequantize_kernel(device: int, operand: torch.dtype) -> Kernel:
    with torch.cuda.device(device):
        return Kernel(dequantize_code(operand), "nvfp4_dequantize", 256)


class Division(NamedTuple):
    """Say how a product is divided among thread blocks.

    It has ``n_tiles`` of rows times ``m_tiles`` of tokens, each of ``steps`` stages. The first ``shared`` tiles are cut
    into equal runs, one a block, and ``grid`` is the number of blocks.
    """

    n_tiles: int
    m_tiles: int
    steps: int
    shared: int
    grid: int

    @property
    def tiles(self) -> int:
        """Return the number of tiles."""
        return self.n_tiles * self.m_tiles


def divide(c: Configuration, N: int, K: int, M: int, at_once: int) -> Division:
    """Divide a product for a GPU that can give it ``at_once`` blocks at one time.

    Full rounds compute whole tiles; the tiles left over and those of one more round are cut into equal runs. Raises
    ValueError where ``depth`` does not divide the tiles of K.
    """
    k_tiles = 2 * -(-K // (2 * TILE))
    if k_tiles % c.depth:
        raise ValueError(f"depth={c.depth} does not divide the {k_tiles} tiles of K={K}; use depth 1 or 2")
    blocks = -(-N // TILE)
    n_tiles, m_tiles, steps = -(-blocks // c.tile_blocks()), -(-M // c.tokens), k_tiles // c.depth
    tiles = n_tiles * m_tiles
    if c.cluster > 1:
        return Division(n_tiles, m_tiles, steps, 0, tiles * c.cluster)
    if c.splits == WHOLE:
        return Division(n_tiles, m_tiles, steps, 0, min(at_once, tiles))
    grid = min(at_once, tiles * (min(c.splits, steps) or steps))
    shared = 0 if tiles % grid == 0 else tiles if tiles < 2 * grid else tiles % grid + grid
    return Division(n_tiles, m_tiles, steps, shared, grid)


def product(
    x: torch.Tensor,
    weight: TiledWeight,
    configuration: Configuration,
    bias: torch.Tensor | None = None,
    adapter: Adapter | None = None,
    how: Shrink | None = None,
    overlap: bool = True,
) -> torch.Tensor:
    """Compute ``x: (M, K)``, ``bias: (N,)`` fp32 -> ``(M, N)`` by one variant of the kernel.

    x has the weight's ``operand`` as its dtype, and so has the result. An adapter's product is added to the sum before
    that is rounded; ``how`` says how the adapter's small kernel is launched.

    With ``overlap`` the weights are fetched while the kernel ahead in the stream still runs. That kernel must not write
    them, so ``tile_weight`` waits until it has ended. Raises ValueError where x or the configuration does not fit,
    CompileError where a kernel does not load.
    """
    check(x, weight.K, weight.operand)
    columns = 0 if adapter is None else adapter.b.shape[1]
    if not len(x):
        return x.new_empty((0, weight.N))
    shape = weight.N, weight.K, len(x), columns, x.device.index, weight.operand
    run = plan(threading.get_ident(), configuration, how, *shape, overlap)
    a, b, spans = (None, None, None) if adapter is None else (adapter.a, adapter.b, adapter.spans)
    return run(x, weight.tiles, weight.row_scale, weight.counters, bias, a, b, spans)


def check(x: torch.Tensor, K: int, operand: torch.dtype) -> None:
    """Raise ValueError where the product cannot read ``x: (M, K)``."""
    if x.dtype != operand or x.shape[1] != K:
        raise ValueError(f"x of shape {tuple(x.shape)} and type {x.dtype}: this weight needs (M, {K}) {operand}")


class Plan:
    """Prepare a product of M tokens with a weight of one shape, so that a launch needs only its tensors.

    Only one thread may use it, as a Call. It keeps no tensor alive, and depends on no stream and no counters.
    """

    def __init__(
        self,
        configuration: Configuration,
        how: Shrink | None,
        N: int,
        K: int,
        M: int,
        columns: int,
        device: int,
        operand: torch.dtype,
        overlap: bool,
    ):
        """Take an adapter's number of ``columns``, 0 for none; the other arguments are those of ``product``.

        Raises ValueError where ``depth`` does not divide the tiles of K, CompileError where the kernel does not load.
        """
        kernel, at_once = _kernel(replace(configuration, splits=0), device, operand)
        free = how.left_free(M, columns, at_once) if columns and how is not None else 0
        d = divide(configuration, N, K, M, at_once - free)
        self.small = None
        if columns and is_small(M, how):  # after cuBLAS the product cannot start early
            self.small = Small(how or quickest(M), M, K, columns, device, operand)
        blocks, k_tiles = -(-N // TILE), 2 * -(-K // (2 * TILE))
        sizes = M, N, blocks, k_tiles, d.n_tiles, d.m_tiles, d.shared, columns, self.small is not None
        self._problem = _Problem(*sizes, *map(Divisor.of, (d.steps, d.shared * d.steps or 1, d.grid)))
        self._map = TensorMap(operand, M, K, configuration.tokens, 64)
        self._pointers = (ctypes.c_void_p * 9)()
        arguments = [self._map.address, *addresses(self._pointers), ctypes.addressof(self._problem)]
        self._call = Call(kernel, (d.grid, 1, 1), arguments, overlap)
        self._calls = (self._call,) if self.small is None else (self.small.call, self._call)
        self.N, self.device = N, device
        # Both are bytes. The fp32 sums that blocks leave for others come first; their size is a multiple of 128, so s
        # behind them is aligned.
        self.partials = 4 * TILE * configuration.tile_blocks() * configuration.tokens * d.grid if d.shared else 0
        self.room = self.partials + (2 * M * columns if self.small else 0)

    def __call__(
        self,
        x: torch.Tensor,
        tiles: torch.Tensor,
        row_scale: torch.Tensor,
        counters: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        spans: torch.Tensor | None,
    ) -> torch.Tensor:
        """Multiply ``x: (M, K)``, which ``check`` has passed, by the parts of a weight and an adapter -> ``(M, N)``."""
        row_stride, column_stride = x.stride()
        x_at = x.data_ptr()
        # The copy engine needs rows that start at multiples of 16 bytes.
        if column_stride != 1 or row_stride % 8 or x_at % 16:
            x = x.clone(memory_format=torch.contiguous_format)
            row_stride, x_at = x.shape[1], x.data_ptr()
        y = x.new_empty((x.shape[0], self.N))
        # The kernel does not read this address where no block leaves sums for another.
        scratch = x.new_empty((self.room,), dtype=torch.uint8) if self.room else y
        partials = scratch.data_ptr()
        stream = current_stream(self.device)
        stream_counters = counters_for(counters, stream)
        s = b_at = spans_at = None
        if a is not None and b is not None and spans is not None:
            b_at, spans_at = b.data_ptr(), spans.data_ptr()
            if self.small is None:
                s_of_cublas = torch.nn.functional.linear(x, a)
                s = s_of_cublas.data_ptr()
            else:
                s = partials + self.partials
                self.small.write(x_at, row_stride, a.data_ptr(), s)
        bias_at = None if bias is None else bias.data_ptr()
        scale_at, y_at = row_scale.data_ptr(), y.data_ptr()
        weight_at, counters_at = tiles.data_ptr(), stream_counters.data_ptr()
        self._pointers[:] = [weight_at, scale_at, bias_at, y_at, partials, counters_at, s, b_at, spans_at]
        self._map.describe(x_at, row_stride)
        # Nothing may be launched between the two: with tokens_ready the product reads x as soon as the small kernel has
        # seen that x is complete.
        launch(stream, *self._calls)
        return y


@functools.lru_cache(maxsize=PLANS)
def plan(thread: int, *arguments: Any) -> Plan:
    """Return the plan of a ``thread`` (``threading.get_ident()``), which alone may use it.

    ``given`` are the arguments of Plan. A thread that ends leaves its plans to the next one of the same number.
    """
    return Plan(*arguments)


def dequantize(weight: TiledWeight, first_row: int = 0, rows: int | None = None, room: int = 0) -> torch.Tensor:
    """Expand ``code * block scale * expanded_factor`` -> (rows, K + room) in the weight's ``operand``, exactly.

    The tensor scale is not applied. The last ``room`` numbers of each row are not written. ``first_row`` must be a
    multiple of 64, ``room`` one of 8.
    """
    rows = weight.N - first_row if rows is None else rows
    w = torch.empty(rows, weight.K + room, dtype=weight.operand, device=weight.tiles.device)
    k_tiles = weight.tiles.shape[1]
    pointers = [ctypes.c_void_p(weight.tiles.data_ptr()), ctypes.c_void_p(w.data_ptr())]
    numbers = [ctypes.c_int(number) for number in (rows, weight.K, k_tiles, first_row, weight.K + room)]
    _dequantize_kernel(w.device.index, weight.operand)((k_tiles // 2, -(-rows // 64), 1), *pointers, *numbers)
    return w
