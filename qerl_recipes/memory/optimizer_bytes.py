"""Computes the bytes that an optimizer's library allocates as state for trained tensors."""

from collections.abc import Iterable
from math import prod

FP32 = 4
# bitsandbytes keeps the states of smaller tensors in fp32, and one fp32 scale for each block of 8-bit states
SMALLEST_8BIT, BLOCK_8BIT = 4096, 256
BLOCK_4BIT = 128  # the block size of torchao's 4-bit states
MOMENTS = {"ademamix": 3, "lion": 1, "rmsprop": 1, "adagrad": 1, "schedule_free_sgd": 1, "sgd": 0}  # all others have 2


def state(name: str, shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the bytes of the state of transformers' optimizer ``name`` (the key ``optim``).

    Adafactor keeps one row and one column for each matrix. Paged optimizers count as if nothing were moved to the CPU.
    """
    return sum(_of_tensor(name, shape) for shape in shapes)


def _of_tensor(name: str, shape: tuple[int, ...]) -> int:
    count = prod(shape)
    if "adafactor" in name:
        return FP32 * (count // shape[-1] + count // shape[-2] if len(shape) > 1 else count)
    moments = next((moments for kind, moments in MOMENTS.items() if kind in name), 2)
    if "8bit" in name and count >= SMALLEST_8BIT:
        return moments * (count + -(-count // BLOCK_8BIT) * FP32)
    if "4bit" in name and count >= SMALLEST_8BIT:
        return moments * (count // 2 + -(-count // BLOCK_4BIT) * FP32)
    return moments * count * FP32
