"""Judgements of single answers, kept as text in a few characters: what intervals over problems are made from."""

from collections.abc import Sequence

import numpy as np


def packed(judged: Sequence[Sequence[bool]]) -> str:
    """Return a bit for each answer as hexadecimal digits: problem by problem, and each of its answers in their order.

    The last byte is filled up with zeros.
    """
    return np.packbits(np.asarray(judged, dtype=bool)).tobytes().hex()


def unpacked(digits: str, problems: int, num_samples: int) -> np.ndarray:
    """Return what ``packed`` was given, (problems, num_samples). Raises ValueError for digits of another number."""
    data, count = np.frombuffer(bytes.fromhex(digits), dtype=np.uint8), problems * num_samples
    bits = np.unpackbits(data).astype(bool)
    if len(data) != -(-count // 8) or bits[count:].any():
        raise ValueError(
            f"{len(digits)} hexadecimal digits are not {num_samples} answers to each of {problems} problems"
        )
    return bits[:count].reshape(problems, num_samples)
