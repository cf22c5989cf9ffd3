"""Write the NVFP4 checkpoint of a BF16 one: check it, then pack shard by shard into a folder that appears whole."""

import errno
import json
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from qerl_kernels.nvfp4 import GROUP_SIZE, quantize
from qerl_kernels.scale_search import quantize_mse
from rich.console import Console

from qerl_recipes.convert.pack import LayerError, find_divisors, make_plan, measure, packed_shards, write_packed
from qerl_recipes.convert.shards import copy_other_files, naming_target, repack, write_config
from qerl_recipes.files.base_model import local_folder
from qerl_recipes.files.whole_folder import whole_folder
from qerl_vllm_plugin.weights.checkpoint import CheckpointReport, inspect_folder, weights_taken
from qerl_vllm_plugin.weights.families import WITHOUT_NVFP4, never_compared
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

METHODS, SCALES = ("rtn", "gptq", "awq"), ("amax", "mse")


@dataclass(frozen=True)
class QuantizeReport:
    """Hold the result of ``quantize_checkpoint``; ``layers`` is empty where no errors are known."""

    source: str
    destination: str
    method: str
    scales: str
    ignore: tuple[str, ...]
    layers: list[LayerError] = field(default_factory=list)
    calibration: dict[str, int] | None = None  # for gptq and awq: the counts that `calibration_file.read` returns
    hub: str | None = None  # the hub's model that `--quantization qerl_nvfp4` rounds to these weights while loading it

    def write(self, folder: Path) -> None:
        (folder / "quantize_report.json").write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def print(self, console: Console | None = None) -> None:
        """Print what it was calibrated on, and the largest error of each kind of linear."""
        console = console or Console()
        if (used := self.calibration) is not None:
            console.print(
                f"calibrated on {used['texts']} of {used['of']} texts, {used['tokens']} tokens; {used['cut']} texts "
                f"were cut at {used['longest']} tokens",
                soft_wrap=True,
            )
        if not self.layers:
            console.print(
                f"written to {self.destination}; {self.method} scales weights before it rounds them, so that no error "
                "of a single layer is known",
                soft_wrap=True,
            )
            return
        worst = {}  # the last part of a layer's name -> the layer with the largest error
        for layer in sorted(self.layers, key=lambda layer: layer.relative_error):
            worst[layer.name.rpartition(".")[2]] = layer
        for layer in reversed(worst.values()):
            console.print(f"largest relative error: {layer.relative_error:.4f} {layer.name}", soft_wrap=True)
        console.print(f"written to {self.destination}, with the other errors in quantize_report.json", soft_wrap=True)


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    method: str = "rtn",
    scales: str = "amax",
    device: str | None = None,
    ignore: Sequence[str] = ("lm_head",),
    overwrite: bool = False,
    calibration: str | Path | None = None,
    calibration_samples: int | None = None,
    quiet: bool = False,
) -> QuantizeReport:
    """Write the NVFP4 checkpoint of ``source``, which stock vLLM loads too (compressed-tensors nvfp4-pack-quantized).

    ``source`` is a folder or a model id of the hub, whose FP16 and FP32 weights are rounded to BF16 first. NVFP4
    weights in another form (ModelOpt, W4A4, mixed with FP8) are rewritten with the same codes and scales, FP8 layers in
    BF16. The command's help says what the options are.

    Return the report with the error of each layer (awq has none), also written to quantize_report.json. Raise
    CheckpointError (a ValueError) for a source that cannot be quantized, ValueError for options that do not fit,
    OSError for a destination, and RuntimeError if llmcompressor fails.
    """
    if device is None:
        device = "cuda" if (method, scales) != ("rtn", "amax") and torch.cuda.is_available() else "cpu"
    _check_options(method, scales, device, calibration, calibration_samples)
    folder, target = local_folder(source), Path(destination).absolute()
    if target == folder.resolve() or folder.resolve() in target.parents or target in folder.resolve().parents:
        raise CheckpointError(f"destination {target} and source {folder} overlap; name another destination")
    report = inspect_folder(folder, weight_only=True)
    if report.scheme is not None:
        if not report.scheme.extras:
            raise CheckpointError(f"{folder}: is an NVFP4 checkpoint already; start from the BF16 checkpoint")
        changed = {"method": method != "rtn", "scales": scales != "amax", "ignore": tuple(ignore) != ("lm_head",)}
        if options := [name for name, is_changed in changed.items() if is_changed]:
            raise ValueError(f"{options[0]}: {folder} has NVFP4 weights already, written as they are; leave it out")
        _warn_of_family(report)
        return _take_over(report, str(source), target, overwrite)
    if reason := WITHOUT_NVFP4.get(str(report.config.get("model_type"))):
        raise CheckpointError(f"{folder} is a {report.config['model_type']}: {reason}")
    plan = make_plan(report, ignore)
    if not plan.linears:
        raise CheckpointError(f"{folder}: no linear layer is left to quantize; ignore fewer layers")
    _warn_of_family(report)
    rows: list[list[int]] = []
    counts = None
    if method != "rtn":
        from transformers import AutoTokenizer

        from qerl_recipes.convert import calibrate

        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows, counts = calibrate.read(Path(str(calibration)), calibration_samples, tokenizer)
    with whole_folder(target, overwrite=overwrite) as partial, naming_target(target):
        _check_free(sum(entry.nbytes for entries in packed_shards(report, plan).values() for entry in entries), target)
        if method == "rtn":
            divisors, pack = find_divisors(report, plan, device), quantize if scales == "amax" else quantize_mse
            layers = write_packed(report, plan, divisors, partial, pack, device)
            write_config(partial, report.config, quantization_config(plan.ignore))
        else:
            from qerl_recipes.convert.llmcompressor_run import run

            run(folder, partial, method=method, ignore=plan.ignore, rows=rows, device=device)
            # awq moves a factor from each weight into the layer before: source and result cannot be compared
            layers = [] if method == "awq" else measure(report, inspect_folder(partial), plan)
        copy_other_files(folder, partial)
        is_default = (method, scales, tuple(ignore)) == ("rtn", "amax", ("lm_head",))
        hub = str(source) if is_default and not Path(source).is_dir() else None
        result = QuantizeReport(str(source), str(target), method, scales, plan.ignore, layers, counts, hub)
        result.write(partial)
    if not quiet:
        result.print()
    return result


def _warn_of_family(report: CheckpointReport) -> None:
    if reason := never_compared(report.config.get("model_type")):
        warnings.warn(f"{report.folder}: `--quantization qerl_nvfp4` will refuse the result: {reason}", stacklevel=3)


def _take_over(report: CheckpointReport, source: str, target: Path, overwrite: bool) -> QuantizeReport:
    """Rewrite a checkpoint that has NVFP4 weights already, in another form."""
    with whole_folder(target, overwrite=overwrite) as partial, naming_target(target):
        _check_free(sum(tensor.nbytes for tensor in report.tensors.values()) * 2, target)
        ignore = repack(report, partial)
        write_config(partial, report.config, quantization_config(ignore))
        copy_other_files(report.folder, partial)
        result = QuantizeReport(source, str(target), "taken over", "as they were", ignore)
        result.write(partial)
    Console().print(weights_taken(report, "are left out"), soft_wrap=True)
    return result


def _check_options(method: str, scales: str, device: str, calibration: str | Path | None, samples: int | None) -> None:
    for name, value, values in (("method", method, METHODS), ("scales", scales, SCALES)):
        if value not in values:
            raise ValueError(f"{name}: {value!r} is unknown; choose one of {', '.join(values)}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: {device!r} is unknown; choose cpu or cuda, whose number CUDA_VISIBLE_DEVICES sets")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device: {device!r} was asked for, but torch sees no CUDA device here; use --device cpu")
    if method == "rtn":
        for name, given in (("calibration", calibration), ("calibration_samples", samples)):
            if given is not None:
                raise ValueError(f"{name}: rtn uses no texts; choose --method gptq or leave it out")
        return
    if samples is not None and samples < 1:
        raise ValueError(f"calibration_samples is {samples}; it must be at least 1")
    if scales != "amax":
        raise ValueError(f"scales: {scales!r} goes with --method rtn only; {method} chooses its own")
    if method == "awq" and device == "cpu":
        raise ValueError("method: awq needs a CUDA device (llmcompressor pins GPU memory); use gptq or --device cuda")
    if calibration is None or not Path(calibration).is_file():
        found = "name one" if calibration is None else f"there is no file {calibration}"
        raise ValueError(f'calibration: {method} needs a file of JSON lines with a key "text"; {found}')


def _check_free(needed: int, target: Path) -> None:
    """Raise OSError if the disk has less than ``needed`` bytes free, and 1 MiB for the other files."""
    free = shutil.disk_usage(target.parent).free
    if free < needed + (1 << 20):
        raise OSError(errno.ENOSPC, f"it needs {needed / 1e9:.2f} GB; free some first")


def quantization_config(ignore: Sequence[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` that compressed-tensors 0.19 writes into config.json for NVFP4A16."""
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": GROUP_SIZE,
        "num_bits": 4,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.float8_e4m3fn",
        "strategy": "tensor_group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": "nvfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "nvfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
    }
