"""Checkpoints of random weights in a given shape, for benchmarks: drawn on the GPU where there is one, not downloaded.

The BF16 and the NVFP4 checkpoint of one seed hold the same weights: the second is the first, rounded to nearest.
"""

import hashlib
import json
import string
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from qerl_kernels import nvfp4
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qerl_recipes.quantize import quantization_config
from qerl_recipes.quantize_plan import FUSED
from qerl_vllm_plugin.checkpoint import CONFIG, INDEX
from qerl_vllm_plugin.expected_tensors import Expected, expected_tensors

STD = 0.02  # of weights, as transformers initializes them
NORM_STD = 0.1  # about 1: norms of ones would hide an error
PAD, EOS = 0, 1
CHARACTERS = string.ascii_letters + string.digits  # each a token, whichever class a library loads the tokenizer as


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
        config["quantization_config"] = quantization_config(["lm_head"])
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def size(config: Mapping[str, Any], *, packed: bool) -> int:
    """Bytes of the checkpoint's tensors, the few of tensor scales left out."""
    each = {True: 1 / 2 + 1 / nvfp4.GROUP_SIZE, False: 2.0}
    return int(sum(prod(e.shape) * each[packed and e.linear] for e in _present(config).values()))


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A token for each of ``CHARACTERS``, and for all the rest of the vocabulary a name that no prompt holds."""
    pad, eos = "<|endoftext|>", "<eos>"  # the first is added where a tokenizer of a Qwen2 lacks it
    names = [pad, eos, *CHARACTERS]
    names += [f"<{token}>" for token in range(len(names), vocabulary)]
    model = Tokenizer(models.WordLevel({name: token for token, name in enumerate(names)}, unk_token=pad))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token=pad, eos_token=eos, padding_side="left")


def _present(config: Mapping[str, Any]) -> dict[str, Expected]:
    """Every tensor but a head that is the embedding. Raises ValueError for an architecture that is not known."""
    tensors = expected_tensors(config)
    if tensors is None:
        raise ValueError(f"no tensors are known of a model of type {config.get('model_type')!r}")
    return {name: expected for name, expected in tensors.items() if not expected.optional}


def _draw(members: Mapping[str, Expected], packed: bool, seed: int, device: str) -> dict[str, torch.Tensor]:
    """The tensors of one shard on the CPU."""
    dense = {name: _values(name, expected.shape, seed, device) for name, expected in members.items()}
    drawn: dict[str, torch.Tensor] = {}
    for name, expected in members.items():
        if not (packed and expected.linear):
            drawn[name] = dense[name].cpu()
            continue
        module = name.removesuffix(".weight")
        amax = torch.stack([dense[sibling].abs().amax() for sibling in _siblings(name, members)]).amax()
        weight = nvfp4.quantize(dense[name], nvfp4.divisor_from_amax(amax))
        drawn[f"{module}.weight_packed"] = weight.codes.cpu()
        drawn[f"{module}.weight_scale"] = weight.block_scales.cpu()
        drawn[f"{module}.weight_global_scale"] = weight.divisor.reshape(1).cpu()
    return drawn


def _siblings(name: str, members: Mapping[str, Expected]) -> list[str]:
    """The weights that vLLM fuses with this one and that share its tensor scale, itself among them."""
    parent, leaf, _ = name.rsplit(".", 2)
    group = next((group for group in FUSED if leaf in group), (leaf,))
    return [f"{parent}.{part}.weight" for part in group if f"{parent}.{part}.weight" in members]


def _values(name: str, shape: tuple[int, ...], seed: int, device: str) -> torch.Tensor:
    """BF16 values that depend on the seed, the name and the kind of device alone."""
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(key[:8], "little") >> 1)
    values = torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device)
    return values.mul_(NORM_STD).add_(1) if "norm" in name.split(".")[-2] else values.mul_(STD)
