"""List the linear layers of common dense models, whole and divided by tensor parallelism, and draw from them."""

import random
from typing import NamedTuple

# hidden, heads, key-value heads, head size, intermediate
MODELS = {
    "Qwen2.5-0.5B": (896, 14, 2, 64, 4864),
    "Qwen2.5-1.5B": (1536, 12, 2, 128, 8960),
    "Qwen2.5-3B": (2048, 16, 2, 128, 11008),
    "Qwen2.5-7B": (3584, 28, 4, 128, 18944),
    "Qwen2.5-14B": (5120, 40, 8, 128, 13824),
    "Qwen2.5-32B": (5120, 40, 8, 128, 27648),
    "Qwen2.5-72B": (8192, 64, 8, 128, 29568),
    "Qwen3-0.6B": (1024, 16, 8, 128, 3072),
    "Qwen3-1.7B": (2048, 16, 8, 128, 6144),
    "Qwen3-4B": (2560, 32, 8, 128, 9728),
    "Qwen3-8B": (4096, 32, 8, 128, 12288),
    "Qwen3-14B": (5120, 40, 8, 128, 17408),
    "Qwen3-32B": (5120, 64, 8, 128, 25600),
    "Qwen3.5-like 9B": (4096, 16, 4, 256, 12288),
    "Qwen3.5-like 27B": (5120, 24, 4, 256, 17408),
    "Llama-3.1-8B": (4096, 32, 8, 128, 14336),
    "Llama-3.1-70B": (8192, 64, 8, 128, 28672),
    "Llama-3.2-1B": (2048, 32, 8, 64, 8192),
    "Llama-3.2-3B": (3072, 24, 8, 128, 8192),
    "Mistral-7B": (4096, 32, 8, 128, 14336),
    "Mistral-Small-24B": (5120, 32, 8, 128, 32768),
    "SmolLM2-135M": (576, 9, 3, 64, 1536),
    "SmolLM2-1.7B": (2048, 32, 32, 64, 8192),
}
PARALLEL = (1, 2, 4, 8)


class Layer(NamedTuple):
    """Describe a fused layer with a weight of (N, K); ``widths`` are the rows of its parts (q, k, v; gate, up; all)."""

    name: str
    widths: tuple[int, ...]
    K: int

    @property
    def N(self) -> int:
        return sum(self.widths)


def layers_of(model: str, parallel: int) -> list[Layer]:
    """Return qkv, o, gate_up and down of one rank; none where heads or columns cannot be divided so."""
    hidden, heads, kv_heads, head, intermediate = MODELS[model]
    if heads % parallel or intermediate % (16 * parallel) or (kv_heads % parallel and parallel % kv_heads):
        return []
    q, kv, part = heads // parallel * head, max(kv_heads // parallel, 1) * head, intermediate // parallel
    gated = 2 if model.startswith("Qwen3.5") else 1  # q and its gate
    first = Layer("qkv", (gated * q, kv, kv), hidden)
    fused = [first, Layer("o", (hidden,), q), Layer("gate_up", (part, part), hidden), Layer("down", (hidden,), part)]
    name = model if parallel == 1 else f"{model} TP {parallel}"
    return [layer._replace(name=f"{name} {layer.name}") for layer in fused if layer.N % 16 == 0 and layer.K % 16 == 0]


def all_layers() -> list[Layer]:
    """Return every size once, under the name of the first model that has it."""
    by_shape = {}
    for model in MODELS:
        for parallel in PARALLEL:
            for layer in layers_of(model, parallel):
                by_shape.setdefault((layer.N, layer.K), layer)
    return list(by_shape.values())


def random_points(
    count: int, seed: int, fewest: int, most: int, layers: list[Layer] | None = None
) -> list[tuple[Layer, int]]:
    """Draw ``count`` pairs of a layer and a number of tokens, evenly over the logarithm of ``fewest`` to ``most``."""
    draw = random.Random(f"{seed} {fewest} {most}")
    layers = all_layers() if layers is None else layers
    return [
        (draw.choice(layers), min(most, int(fewest * ((most + 1) / fewest) ** draw.random()))) for _ in range(count)
    ]
