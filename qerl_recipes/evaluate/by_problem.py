"""Packs the judgement of each answer into a short text, from which intervals over problems can be computed later."""

from collections.abc import Sequence

import numpy as np


def packed(judged: Sequence[Sequence[bool]]) -> str:
    """Return one bit for each answer, as hexadecimal digits.

    The bits follow the problems, and within a problem its answers. The last byte is padded with zero bits.
    """
    return np.packbits(np.asarray(judged, dtype=bool)).tobytes().hex()


def unpacked(digits: str, problems: int, num_samples: int) -> np.ndarray:
    """Return the judgements that ``packed`` encoded, as a boolean array of shape (problems, num_samples).

    Raises ValueError if the digits encode another number of answers.
    """
    data, count = np.frombuffer(bytes.fromhex(digits), dtype=np.uint8), problems * num_samples
    bits = np.unpackbits(data).astype(bool)
    if len(data) != -(-count // 8) or bits[count:].any():
        raise ValueError(
            f"{len(digits)} hexadecimal digits are not {num_samples} answers to each of {problems} problems"
        )
    return bits[:count].reshape(problems, num_samples)
