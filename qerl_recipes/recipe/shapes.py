"""List the sizes of the models that recipes/ name, so that runs can be planned and timed without their checkpoints."""

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Hold what decides a model's memory; in a mixture a token passes through ``used`` of the ``experts``."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    head_dim: int = 128
    model_type: str = "qwen2"
    positions: int = 32768
    experts: int = 0
    used: int = 0
    expert_intermediate: int = 0


# Qwen2.5-Instruct by size
SHAPES = {
    "0.5B": Shape(896, 4864, 24, 14, 2, 151936, True, head_dim=64),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "3B": Shape(2048, 11008, 36, 16, 2, 151936, True),
    "7B": Shape(3584, 18944, 28, 28, 4, 152064, False),
    "14B": Shape(5120, 13824, 48, 40, 8, 152064, False),
    "32B": Shape(5120, 27648, 64, 40, 8, 152064, False),
    "72B": Shape(8192, 29568, 80, 64, 8, 152064, False),
}
TINY = Shape(128, 256, 2, 2, 1, 512, True, head_dim=64, positions=4096)  # 0.4 million parameters, for a CPU
QWEN3_30B_A3B = Shape(
    *(2048, 6144, 48, 32, 4, 151936, False),
    model_type="qwen3_moe",
    positions=40960,
    experts=128,
    used=8,
    expert_intermediate=768,
)
MIXTURES = {
    "30B-A3B": QWEN3_30B_A3B,
    "tiny-moe": TINY._replace(model_type="qwen3_moe", experts=4, used=2, expert_intermediate=64),
}
BY_MODEL_ID = {
    **{f"Qwen/Qwen2.5-{size}-Instruct": shape for size, shape in SHAPES.items()},
    "Qwen/Qwen3-4B": Shape(2560, 9728, 36, 32, 8, 151936, True, model_type="qwen3", positions=40960),
    "Qwen/Qwen3-8B": Shape(4096, 12288, 36, 32, 8, 151936, False, model_type="qwen3", positions=40960),
    "Qwen/Qwen3-30B-A3B": QWEN3_30B_A3B,
    "HuggingFaceTB/SmolLM2-135M-Instruct": Shape(
        576, 1536, 30, 9, 3, 49152, True, head_dim=64, model_type="llama", positions=8192
    ),
}
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")  # in a mixture of experts, only these linears carry an adapter


def config_json(size: str) -> dict[str, Any]:
    """Return the config of a Qwen2.5 (7B), 30B-A3B, tiny or tiny-moe; raise ValueError for an unknown size."""
    known = {**SHAPES, **MIXTURES, "tiny": TINY}
    if size not in known:
        raise ValueError(f"unknown shape {size!r}; known: {', '.join(known)}")
    return as_config(known[size])


def as_config(shape: Shape) -> dict[str, Any]:
    """Return the content of config.json for a model of that shape."""
    config = {
        "architectures": [ARCHITECTURES[shape.model_type]],
        "model_type": shape.model_type,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
        "use_sliding_window": False,
    }
    if shape.head_dim * shape.heads != shape.hidden:
        config["head_dim"] = shape.head_dim
    if shape.experts:
        config |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.used,
            "moe_intermediate_size": shape.expert_intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def full_name(size: str) -> str:
    """Return the name that tables give to a size: Qwen2.5-7B, Qwen3-30B-A3B."""
    return size if size.startswith("tiny") else f"Qwen3-{size}" if size in MIXTURES else f"Qwen2.5-{size}"
