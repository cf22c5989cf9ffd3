"""Check the adapters of LoRA requests when vLLM reads them, and keep them out of other requests on a CPU.

vLLM (0.26 to 0.32) has no hook before an adapter goes into a slot. A method of its WorkerLoRAManager
(``vllm/lora/worker_manager.py``) reads the adapter, and a model runner makes that manager after the model. Both methods
are wrapped for this engine alone, on the objects themselves, while its model is being built.

On a CPU vLLM (0.26 to 0.32, ``vllm/lora/ops/torch_ops``) takes the slot -1 of a request without an adapter for the last
one: beside a request with an adapter, it would be answered by whatever adapter lies there.
"""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qerl_vllm_plugin.compat import layers as vllm_layers
from qerl_vllm_plugin.compat import worker as vllm_worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Checks(Protocol):
    """Call the checks of adapter/folder.py: of an adapter's folder before vLLM reads it, then of what it reads.

    ``base`` is the checkpoint's folder. ``slots`` are the modules with a slot, ``sizes`` their inputs and outputs.
    """

    def check_folder(self, folder: Path, base: Path | None, max_rank: int) -> None: ...
    def check_modules(self, folder: Path, adapted: Iterable[str], slots: Iterable[str]) -> None: ...
    def check_tensors(
        self, folder: Path, pairs: Mapping[str, Any], rank: int, sizes: Mapping[str, tuple[int, int]]
    ) -> None: ...


def watch(vllm_config: "VllmConfig", checks: Checks) -> None:
    """Let no adapter into an engine's LoRA slots unchecked. Call it while the engine's model is being built."""
    if vllm_config.lora_config is None:
        return
    runner = vllm_worker.runner_above()
    load = runner.load_lora_model
    if getattr(load, "is_qerl_watch", False):  # wrapped already for the main model: a drafter is built beside it
        return

    @functools.wraps(load)
    def load_and_watch(*args: Any, **keywords: Any) -> Any:
        model = load(*args, **keywords)
        _check_what_is_read(runner.lora_manager, vllm_config, checks)
        layers = runner.lora_manager._adapter_manager.modules.values()
        for wrapper in {getattr(layer, "punica_wrapper", None) for layer in layers}:
            if type(wrapper).__name__ == "PunicaWrapperCPU":
                _spare_others(wrapper)
        return model

    load_and_watch.is_qerl_watch = True  # type: ignore[attr-defined]
    runner.load_lora_model = load_and_watch


def _spare_others(wrapper: Any) -> None:
    """Let the LoRA operations of a CPU change no row of a request without an adapter."""

    def spare(name: str, indices: str) -> None:
        change = getattr(wrapper, name)

        @functools.wraps(change)
        def change_others(y: Any, *args: Any, **keywords: Any) -> Any:
            without = getattr(wrapper, indices) < 0
            if not without.any():
                return change(y, *args, **keywords)
            rows = y.view(-1, y.shape[-1])
            before = rows[without]
            answer = change(y, *args, **keywords)
            rows[without] = before
            return answer

        setattr(wrapper, name, change_others)

    spare("add_lora_linear", "token_lora_indices")
    spare("add_lora_embedding", "token_lora_indices")
    spare("add_lora_logits", "sampler_indices")


def _check_what_is_read(manager: Any, vllm_config: "VllmConfig", checks: Checks) -> None:
    """Run the checks around the method by which vLLM's WorkerLoRAManager reads an adapter before its first request."""
    from vllm.lora.utils import get_adapter_absolute_path

    from qerl_vllm_plugin.compat.engine import checkpoint_folder

    read, layers = manager._load_adapter, manager._adapter_manager
    sizes, parts = _sizes(layers), [part for module in layers.packed_modules.values() for part in module]
    # a pipeline rank drops other ranks' layers from what it has read
    slots = set().union(*vllm_worker.of_all_stages({*layers.modules, *parts}))

    def read_checked(request: Any) -> Any:
        folder = Path(get_adapter_absolute_path(request.lora_path))
        if (folder / "adapter_config.json").is_file():  # vLLM itself reports a missing file
            checks.check_folder(folder, checkpoint_folder(vllm_config), manager.lora_config.max_lora_rank)
        lora = read(request)
        checks.check_modules(folder, lora.loras, slots)
        pairs = {name: (weights.lora_a, weights.lora_b) for name, weights in lora.loras.items()}
        checks.check_tensors(folder, pairs, lora.rank, sizes)
        return lora

    manager._load_adapter = read_checked


def _sizes(layers: Any) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs, on all ranks together, of the linears with a slot, by their names in adapters."""
    sizes: dict[str, tuple[int, int]] = {}
    for name, module in layers.modules.items():
        layer: Any = getattr(module, "base_layer", None)
        parts = layers.packed_modules.get(name) or [name]
        if vllm_layers.is_linear(layer) and len(parts) == len(getattr(layer, "output_sizes", [layer.output_size])):
            outputs = vllm_layers.output_sizes(layer, len(parts))
            sizes.update(zip(parts, ((layer.input_size, size) for size in outputs), strict=True))
    return sizes
