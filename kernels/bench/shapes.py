"""The fused linear layers of Qwen2.5, (N, K)."""

SHAPES = {
    "7B qkv": (4608, 3584),
    "7B o": (3584, 3584),
    "7B gate_up": (37888, 3584),
    "7B down": (3584, 18944),
    "14B qkv": (7168, 5120),
    "14B o": (5120, 5120),
    "14B gate_up": (27648, 5120),
    "14B down": (5120, 13824),
    "32B qkv": (7168, 5120),
    "32B o": (5120, 5120),
    "32B gate_up": (55296, 5120),
    "32B down": (5120, 27648),
}


def widths(shape: str) -> list[int]:
    """The rows of a fused layer's parts: q, k, v or gate, up or the whole."""
    N, K = SHAPES[shape]
    if shape.endswith("qkv"):
        return [K, (N - K) // 2, (N - K) // 2]
    return [N // 2, N // 2] if shape.endswith("gate_up") else [N]
