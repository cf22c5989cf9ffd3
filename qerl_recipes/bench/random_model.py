"""Make models of random weights in a given shape: an engine, an adapter, a checkpoint. Nothing is downloaded.

The NVFP4 checkpoint of one seed holds the BF16 one's weights, rounded to nearest.
"""

import errno
import hashlib
import json
import os
import shutil
import string
import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from qerl_kernels import nvfp4
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qerl_recipes.convert.quantize import quantization_config
from qerl_recipes.files.whole_folder import locked
from qerl_recipes.machine.environment import runs_on_cuda
from qerl_recipes.machine.gpu import GB
from qerl_recipes.model.shared import ARM
from qerl_recipes.rollout.arms import ENGINE_ON_CPU, ENGINE_QUANTIZATION
from qerl_vllm_plugin.weights.checkpoint import CONFIG, INDEX
from qerl_vllm_plugin.weights.expected import Expected, expected_tensors, experts, fused_with

if TYPE_CHECKING:
    from vllm import LLM

STD = 0.02  # standard deviation of weights, as transformers initializes them
NORM_STD = 0.1  # about 1: norms of ones would hide an error
PAD, EOS = 0, 1
CHARACTERS = string.ascii_letters + string.digits  # each a token, whichever class a library loads the tokenizer as


def start(
    config: Mapping[str, Any], *, length: int, sequences: int, scratch: str | Path | None = None, **options: Any
) -> "LLM":
    """Start an engine with the model of ``config`` (a config.json); files that vLLM needs stay in ``scratch``."""
    from vllm import LLM

    defaults: dict[str, Any] = {"enable_prefix_caching": False, "disable_log_stats": True, "load_format": "dummy"}
    defaults["dtype"] = "bfloat16"
    if not runs_on_cuda(os.environ):
        defaults |= {**ENGINE_ON_CPU, "gpu_memory_utilization": 0.1}
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own)
        packed = bool(experts(config)) and options.get("quantization") == ARM
        if packed or options.get("quantization") == ENGINE_QUANTIZATION["nf4"]:
            folder, defaults["load_format"] = Path(scratch or own, "packed" if packed else "bf16"), "auto"
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder):  # arms may start at the same time
                if not (folder / CONFIG).is_file():
                    check_disk(config, folder.parent, {packed})
                    write(folder, config, packed=packed, seed=0, device="cuda" if torch.cuda.is_available() else "cpu")
                    torch.cuda.empty_cache()
        else:
            (folder / CONFIG).write_text(json.dumps(config))
        return LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            max_model_len=length,
            max_num_seqs=sequences,
            **{**defaults, **options},
        )


def adapter(
    config: Mapping[str, Any], rank: int, *, std: float = 0.01, seed: int | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return (tensors, config) of a random PEFT adapter, of a mixture on attention alone; the same for one ``seed``."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    present, tensors = _present(config).items(), {}
    weights = {name.removesuffix(".weight"): e.shape for name, e in present if e.linear and ".experts." not in name}
    for name, (N, K) in weights.items():
        prefix = f"base_model.model.{name}"
        # drawn in fp32, which takes a CPU a fraction of the time
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, K, generator=generator).mul_(std).bfloat16()
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(N, rank, generator=generator).mul_(std).bfloat16()
    modules = sorted({name.rpartition(".")[2] for name in weights})
    return tensors, {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules}


def write(folder: str | Path, config: Mapping[str, Any], *, packed: bool, seed: int, device: str) -> None:
    """Write a whole checkpoint, config.json last: packed to NVFP4, or in BF16. One shard for each block."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {**config, "pad_token_id": PAD, "eos_token_id": EOS}
    shards: dict[str, dict[str, Expected]] = {}
    for name, expected in _present(config).items():
        shards.setdefault(".".join(name.split(".")[:3]) if ".layers." in name else "rest", {})[name] = expected
    places: dict[str, str] = {}
    for number, members in enumerate(shards.values(), start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = _draw(members, packed, seed, device)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    tokenizer(config["vocab_size"]).save_pretrained(folder)
    if packed:
        config["quantization_config"] = quantization_config(in_bf16(config))
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def in_bf16(config: Mapping[str, Any]) -> list[str]:
    """Return the modules that a packed checkpoint leaves in BF16: head and routers, as `qerl quantize` does."""
    names = (name.removesuffix(".weight") for name, e in _present(config).items() if len(e.shape) == 2 and not e.linear)
    return ["lm_head", *(name for name in names if ".layers." in name)]


def check_disk(config: Mapping[str, Any], folder: Path, kinds: set[bool]) -> None:
    """Raise OSError if a temporary ``folder`` has no room for checkpoints that are packed (True) or in BF16 (False)."""
    each, tensors = {True: 1 / 2 + 1 / nvfp4.GROUP_SIZE, False: 2.0}, _present(config).values()
    needed = sum(prod(tensor.shape) * each[packed and tensor.linear] for packed in kinds for tensor in tensors)
    free = shutil.disk_usage(folder).free
    if needed > 0.95 * free:
        message = f"{folder.parent} has {free / GB:.1f} GB free and the checkpoints take {needed / GB:.1f} GB; "
        raise OSError(errno.ENOSPC, message + "name another folder with --scratch, or fewer arms")


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each of ``CHARACTERS``; no prompt holds the other tokens' names."""
    pad, eos = "<|endoftext|>", "<eos>"  # the first is added where a tokenizer of a Qwen2 lacks it
    names = [pad, eos, *CHARACTERS]
    names += [f"<{token}>" for token in range(len(names), vocabulary)]
    model = Tokenizer(models.WordLevel({name: token for token, name in enumerate(names)}, unk_token=pad))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token=pad, eos_token=eos, padding_side="left")


def _present(config: Mapping[str, Any]) -> dict[str, Expected]:
    """Return every tensor but a head that is the embedding. Raises ValueError for an unknown architecture."""
    tensors = expected_tensors(config)
    if tensors is None:
        raise ValueError(f"no tensors are known of a model of type {config.get('model_type')!r}")
    return {name: expected for name, expected in tensors.items() if not expected.optional}


def _draw(members: Mapping[str, Expected], packed: bool, seed: int, device: str) -> dict[str, torch.Tensor]:
    """Draw the tensors of one shard, and return them on the CPU."""
    dense = {name: _values(name, expected.shape, seed, device) for name, expected in members.items()}
    drawn: dict[str, torch.Tensor] = {}
    for name, expected in members.items():
        if not (packed and expected.linear):
            drawn[name] = dense[name].cpu()
            continue
        module = name.removesuffix(".weight")
        group = fused_with(module, {member.removesuffix(".weight") for member in members})
        amax = torch.stack([dense[f"{part}.weight"].abs().amax() for part in group]).amax()
        weight = nvfp4.quantize(dense[name], nvfp4.divisor_from_amax(amax))
        drawn[f"{module}.weight_packed"] = weight.codes.cpu()
        drawn[f"{module}.weight_scale"] = weight.block_scales.cpu()
        drawn[f"{module}.weight_global_scale"] = weight.divisor.reshape(1).cpu()
    return drawn


def _values(name: str, shape: tuple[int, ...], seed: int, device: str) -> torch.Tensor:
    """Draw BF16 values that depend on the seed, the name and the kind of device alone."""
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(key[:8], "little") >> 1)
    values = torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device)
    return values.mul_(NORM_STD).add_(1) if "norm" in name.split(".")[-2] else values.mul_(STD)
