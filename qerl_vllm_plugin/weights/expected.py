"""Say which tensors a checkpoint must have: those of its architecture, and those of each quantized layer.

The architectures follow the model definitions of transformers 5 but do not import them. So a server can check a 32B
checkpoint in milliseconds before it builds anything. An architecture is chosen by the config's ``model_type``, never by
a folder's name.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_vllm_plugin.weights.formats import (
    FP8,
    NVFP4,
    SCALAR,
    SCALE_DTYPES,
    WAY_OUT,
    WEIGHTS_ALONE,
    Nvfp4Scheme,
    Want,
)
from qerl_vllm_plugin.wire.safetensors_file import DOWNLOAD_AGAIN, CheckpointError, TensorHeader

CONFIG = "config.json"
MODEL_TYPES = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe")
# sibling linears that vLLM stacks into one matrix; the last two groups belong to qwen3_5's linear attention
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
SIZES = (
    *("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "decoder_sparse_step", "num_experts", "num_local_experts"),
)
LARGEST = 1 << 24  # of any size; a model's largest is that of its vocabulary
MOST_LAYERS, MOST_EXPERTS = 1000, 1 << 16  # the latter in all layers together; more would exhaust the memory
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
KV_SCALES = ("k_scale", "v_scale")
# suffixes that mark the tensors of a quantized layer; a `weight` may also be unquantized, there the dtype decides
_SUFFIXES = {"weight_packed", "weight_scale", "weight_global_scale", "weight_scale_2", "input_scale"}
_SUFFIXES |= {"input_global_scale", "pre_quant_scale", "weight_scale_inv", "weight_zero_point", "weight_shape"}
_CACHE_SUFFIXES = {*KV_SCALES, "q_scale", "kv_scale"}


@dataclass(frozen=True)
class Expected:
    """Describe a tensor of the BF16 model, ``linear`` if it may be packed, ``optional`` if it may be missing."""

    shape: tuple[int, ...]
    linear: bool = False
    optional: bool = False


def fused_with(module: str, modules: Container[str]) -> list[str]:
    """Return the linears that vLLM stacks into one matrix with ``module``, in vLLM's order and including it.

    They share one tensor scale. Only linears that the model has (``modules``) are returned.
    """
    parent, dot, leaf = module.rpartition(".")
    leaves = next((leaves for leaves in FUSED if leaf in leaves), (leaf,))
    return [name for name in (f"{parent}{dot}{leaf}" for leaf in leaves) if name == module or name in modules]


def experts(config: Mapping[str, Any]) -> str:
    """Return ``KEY=COUNT`` for a config.json that describes a mixture of experts, "" for a dense model."""
    counts = ((key, config.get(key)) for key in EXPERT_COUNTS)
    return next((f"{key}={count}" for key, count in counts if isinstance(count, int) and count > 1), "")


def expected_tensors(config: Mapping[str, Any]) -> dict[str, Expected] | None:
    """Return a BF16 checkpoint's tensors, None for other model types; raise KeyError or ValueError for a bad size."""
    if config.get("model_type") not in MODEL_TYPES:
        return None
    for key in SIZES:
        size = config.get(key)
        if size is not None and (type(size) is not int or not 0 <= size <= LARGEST):
            raise ValueError(f"{key} is {str(size)[:40]}; it must be a whole number of at most {LARGEST}")
    layers, each = config["num_hidden_layers"], config.get("num_experts") or config.get("num_local_experts") or 1
    if layers > MOST_LAYERS or layers * each > MOST_EXPERTS:
        limits = f"at most {MOST_LAYERS} layers and {MOST_EXPERTS} experts in all of them can be meant"
        raise ValueError(f"num_hidden_layers is {layers}, with {each} experts each; {limits}")
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


def check_quantized(tensors: Mapping[str, TensorHeader], scheme: Nvfp4Scheme | None) -> None:
    """Raise CheckpointError, naming the tensor, unless all quantized tensors and cache scales are the scheme's."""
    checked: set[str] = set()
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        is_stored_small = suffix == "weight" and tensor.dtype in ("U8", "F8_E4M3")
        if suffix in _CACHE_SUFFIXES:
            _check_cache_scale(tensors, tensor, module, suffix, scheme)
        if (suffix not in _SUFFIXES and not is_stored_small) or name in checked:
            continue
        if scheme is None:
            raise CheckpointError(
                f"{tensor.file}: {name} is quantized, but {CONFIG} has no quantization_config; {WAY_OUT}"
            )
        kind = scheme.kind(module)
        if kind is None:
            listed = "lists {} in ignore" if scheme.is_ignored(module) else "names {} in no target"
            raise CheckpointError(
                f"{tensor.file}: {name} is quantized, but {CONFIG} {listed.format(module)}; {WAY_OUT}"
            )
        if module.rpartition(".")[2] == "lm_head":
            raise CheckpointError(
                f"{tensor.file}: {name}: a quantized output head is not supported, it stays in BF16; {WAY_OUT}"
            )
        codes_name = f"{module}.{scheme.format.codes if kind == NVFP4 else 'weight'}"
        codes = tensors.get(codes_name)
        if codes is None or len(codes.shape) != 2:
            raise CheckpointError(f"{tensor.file}: {name} has no two-dimensional {codes_name}; {WAY_OUT}")
        N, columns = codes.shape
        wanted = scheme.tensors(module, N, columns if kind == FP8 else 2 * columns)
        for partner, want in wanted.items():
            check_one(tensors.get(partner), partner, tensor.file, want)
        checked.update(wanted)  # `|=` with keys makes a new set each time: 15 s for the experts of a 30B model
        if name not in wanted:
            _refuse_extra(tensor, scheme)
    if scheme is not None and scheme.kv_cache and not any(name.endswith("k_scale") for name in tensors):
        raise CheckpointError(
            f"{CONFIG} declares an FP8 KV cache, but no tensor ends with k_scale; take kv_cache_scheme (in ModelOpt's "
            f"file kv_cache_quant_algo) out of it, or {DOWNLOAD_AGAIN}"
        )


def _refuse_extra(tensor: TensorHeader, scheme: Nvfp4Scheme) -> None:
    if tensor.name.endswith(f".{scheme.format.input_scale}"):
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} belongs to W4A4, but {CONFIG} says that activations are not quantized;"
            f" {DOWNLOAD_AGAIN}"
        )
    raise CheckpointError(
        f"{tensor.file}: {tensor.name} has no place in NVFP4 as {CONFIG} describes it; the weights would be wrong"
        f" without it: {WAY_OUT}"
    )


def _check_cache_scale(
    tensors: Mapping[str, TensorHeader], tensor: TensorHeader, module: str, suffix: str, scheme: Nvfp4Scheme | None
) -> None:
    """Check a scale of an FP8 KV cache and that its partner, k or v, exists. Raises CheckpointError.

    The names are ``self_attn.k_scale`` and ``v_scale``, or ModelOpt's ``k_proj.k_scale`` and ``v_proj.v_scale``.
    """
    if suffix not in KV_SCALES:
        raise CheckpointError(f"{tensor.file}: {tensor.name}: a scale of {suffix} is not supported; {WAY_OUT}")
    if scheme is None or not scheme.kv_cache:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} belongs to an FP8 KV cache, which {CONFIG} does not declare;"
            f" {DOWNLOAD_AGAIN if scheme is None else WEIGHTS_ALONE}"
        )
    want = Want(SCALE_DTYPES, SCALAR)
    other = "v" if suffix == "k_scale" else "k"
    partner = f"{module}.{other}_scale".replace(f".{suffix[0]}_proj.", f".{other}_proj.")
    for name in (tensor.name, partner):
        check_one(tensors.get(name), name, tensor.file, want)


def cache_scales(tensors: Mapping[str, TensorHeader]) -> Iterator[str]:
    """Yield the names of the scales of an FP8 KV cache."""
    yield from (name for name in tensors if name.rpartition(".")[2] in KV_SCALES)


def check_one(tensor: TensorHeader | None, name: str, place: Path, want: Want) -> None:
    """Raise CheckpointError if a tensor is missing and not optional, or is not what is wanted."""
    if tensor is None:
        if want.optional:
            return
        raise CheckpointError(
            f"{place}: tensor {name} ({want}) is missing, though {CONFIG} asks for it; {DOWNLOAD_AGAIN}"
        )
    if tensor.dtype not in want.dtypes or tensor.shape not in want.shapes:
        raise CheckpointError(
            f"{tensor.file}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, but {CONFIG} asks for {want};"
            f" {DOWNLOAD_AGAIN}"
        )
