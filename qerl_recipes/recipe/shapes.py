"""Give the config.json of models that recipes/ name, to plan and time runs without their checkpoints."""

from typing import Any

Config = dict[str, Any]
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")  # in a mixture of experts, only these linears carry an adapter


def _config(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    tied: bool,
    *,
    head_dim: int = 128,
    model_type: str = "qwen2",
    positions: int = 32768,
) -> Config:
    config = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
        "use_sliding_window": False,
    }
    return config if head_dim * heads == hidden else {**config, "head_dim": head_dim}


def _experts(count: int, used: int, intermediate: int) -> Config:
    """Return what config.json has besides of a mixture, in which a token passes through ``used`` experts."""
    sizes = {"num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": intermediate}
    return {**sizes, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


# Qwen2.5-Instruct by size
QWEN2_5 = {
    "0.5B": _config(896, 4864, 24, 14, 2, 151936, True, head_dim=64),
    "1.5B": _config(1536, 8960, 28, 12, 2, 151936, True),
    "3B": _config(2048, 11008, 36, 16, 2, 151936, True),
    "7B": _config(3584, 18944, 28, 28, 4, 152064, False),
    "14B": _config(5120, 13824, 48, 40, 8, 152064, False),
    "32B": _config(5120, 27648, 64, 40, 8, 152064, False),
    "72B": _config(8192, 29568, 80, 64, 8, 152064, False),
}
TINY = (128, 256, 2, 2, 1, 512, True)  # 0.4 million parameters, for a CPU
MIXTURES = {
    "30B-A3B": {
        **_config(2048, 6144, 48, 32, 4, 151936, False, model_type="qwen3_moe", positions=40960),
        **_experts(128, 8, 768),
    },
    "tiny-moe": {**_config(*TINY, head_dim=64, model_type="qwen3_moe", positions=4096), **_experts(4, 2, 64)},
}
BY_SIZE = {**QWEN2_5, **MIXTURES, "tiny": _config(*TINY, head_dim=64, positions=4096)}
BY_MODEL_ID = {
    **{f"Qwen/Qwen2.5-{size}-Instruct": config for size, config in QWEN2_5.items()},
    "Qwen/Qwen3-4B": _config(2560, 9728, 36, 32, 8, 151936, True, model_type="qwen3", positions=40960),
    "Qwen/Qwen3-8B": _config(4096, 12288, 36, 32, 8, 151936, False, model_type="qwen3", positions=40960),
    "Qwen/Qwen3-30B-A3B": MIXTURES["30B-A3B"],
    "HuggingFaceTB/SmolLM2-135M-Instruct": _config(
        576, 1536, 30, 9, 3, 49152, True, head_dim=64, model_type="llama", positions=8192
    ),
}


def config_json(size: str) -> Config:
    """Return the config of a Qwen2.5 (7B), 30B-A3B, tiny or tiny-moe; raise ValueError for an unknown size."""
    if size not in BY_SIZE:
        raise ValueError(f"unknown shape {size!r}; known: {', '.join(BY_SIZE)}")
    return dict(BY_SIZE[size])


def full_name(size: str) -> str:
    """Return the name that tables give to a size: Qwen2.5-7B, Qwen3-30B-A3B."""
    return size if size.startswith("tiny") else f"Qwen3-{size}" if size in MIXTURES else f"Qwen2.5-{size}"
