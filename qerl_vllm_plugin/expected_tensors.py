"""The tensors that a config.json promises, for the architectures that the plugin serves: names, shapes, linear or not.

Written from the model definitions of transformers 5 and kept free of imports, so that a server can check a 32B
checkpoint in milliseconds before it builds anything. The key is the config's ``model_type``, never a folder's name.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

MODEL_TYPES = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe")
# siblings that vLLM stacks into one matrix; the last two are those of qwen3_5's linear attention
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
# the largest that a config.json may say of each: far above any model, far below what would fill this machine's memory
SIZES = {
    "hidden_size": 1 << 20,
    "vocab_size": 1 << 24,
    "num_hidden_layers": 1000,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 16,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "decoder_sparse_step": 1000,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
}
MOST_EXPERTS = 1 << 16  # of all layers together
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Expected:
    """A tensor of the BF16 model: its shape, whether it is the weight of a linear layer that may be packed."""

    shape: tuple[int, ...]
    linear: bool = False
    optional: bool = False


def fused_with(module: str, modules: Container[str]) -> list[str]:
    """The linears that vLLM stacks into one matrix, with one tensor scale, with the one named ``module``: in its order,
    itself among them, and only those that the model has (``modules``)."""
    parent, dot, leaf = module.rpartition(".")
    leaves = next((leaves for leaves in FUSED if leaf in leaves), (leaf,))
    return [name for name in (f"{parent}{dot}{leaf}" for leaf in leaves) if name == module or name in modules]


def experts(config: Mapping[str, Any]) -> str:
    """``KEY=COUNT`` of a config.json that describes a mixture of experts, "" for a dense model."""
    counts = ((key, config.get(key)) for key in EXPERT_COUNTS)
    return next((f"{key}={count}" for key, count in counts if isinstance(count, int) and count > 1), "")


def expected_tensors(config: Mapping[str, Any]) -> dict[str, Expected] | None:
    """The tensors of a BF16 checkpoint with this config.json; None for an architecture that is not in MODEL_TYPES.

    Raises KeyError naming a size that the config lacks, ValueError one that is none.
    """
    if config.get("model_type") not in MODEL_TYPES:
        return None
    for key, largest in SIZES.items():
        size = config.get(key)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= largest):
            raise ValueError(f"{key} is {str(size)[:40]}; it must be a whole number of at most {largest}")
    layers, each = config["num_hidden_layers"], config.get("num_experts") or config.get("num_local_experts") or 0
    if layers * each > MOST_EXPERTS:
        raise ValueError(f"{layers} layers of {each} experts are {layers * each}; at most {MOST_EXPERTS} can be meant")
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    tensors = {
        "model.embed_tokens.weight": Expected((vocabulary, hidden)),
        "model.norm.weight": Expected((hidden,)),
        "lm_head.weight": Expected((vocabulary, hidden), optional=bool(config.get("tie_word_embeddings"))),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = Expected((hidden,))
        tensors[f"{prefix}.post_attention_layernorm.weight"] = Expected((hidden,))
        tensors |= _attention(config, f"{prefix}.self_attn")
        tensors |= _experts(config, f"{prefix}.mlp") if _is_sparse(config, layer) else _dense(config, f"{prefix}.mlp")
    return tensors


def _attention(config: Mapping[str, Any], prefix: str) -> dict[str, Expected]:
    model_type, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    is_qwen3 = model_type in ("qwen3", "qwen3_moe")
    head = config.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads)
    kv_heads = config.get("num_key_value_heads") or heads
    biases = {"qwen2": (True, False), "mistral": (False, False)}
    qkv_bias, output_bias = biases.get(model_type, (bool(config.get("attention_bias")),) * 2)
    tensors = _linear(f"{prefix}.q_proj", heads * head, hidden, qkv_bias)
    tensors |= _linear(f"{prefix}.k_proj", kv_heads * head, hidden, qkv_bias)
    tensors |= _linear(f"{prefix}.v_proj", kv_heads * head, hidden, qkv_bias)
    tensors |= _linear(f"{prefix}.o_proj", hidden, heads * head, output_bias)
    if is_qwen3:
        tensors |= {f"{prefix}.{name}.weight": Expected((head,)) for name in ("q_norm", "k_norm")}
    return tensors


def _dense(config: Mapping[str, Any], prefix: str, size: int | None = None) -> dict[str, Expected]:
    hidden, inner = config["hidden_size"], size or config["intermediate_size"]
    bias = config["model_type"] == "llama" and bool(config.get("mlp_bias"))
    return (
        _linear(f"{prefix}.gate_proj", inner, hidden, bias)
        | _linear(f"{prefix}.up_proj", inner, hidden, bias)
        | _linear(f"{prefix}.down_proj", hidden, inner, bias)
    )


def _experts(config: Mapping[str, Any], prefix: str) -> dict[str, Expected]:
    count = config["num_experts"] if "num_experts" in config else config["num_local_experts"]  # the name since 5.0
    tensors = {f"{prefix}.gate.weight": Expected((count, config["hidden_size"]))}  # the router stays BF16
    for expert in range(count):
        tensors |= _dense(config, f"{prefix}.experts.{expert}", config["moe_intermediate_size"])
    return tensors


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    if config["model_type"] != "qwen3_moe" or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, Expected]:
    weight = {f"{name}.weight": Expected((rows, columns), linear=True)}
    return weight | ({f"{name}.bias": Expected((rows,))} if bias else {})
