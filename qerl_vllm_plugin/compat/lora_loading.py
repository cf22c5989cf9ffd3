"""Check the adapters of LoRA requests when vLLM reads them.

vLLM (0.26 to 0.32) has no hook before an adapter goes into a slot. A method of its WorkerLoRAManager
(``vllm/lora/worker_manager.py``) reads the adapter, and a model runner makes that manager after the model. Both methods
are wrapped for this engine alone, on the objects themselves, while its model is being built.
"""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_vllm_plugin.compat import worker as vllm_worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig


CheckFolder = Callable[[Path, Path | None, int], None]  # the adapter's folder, the base's, the largest rank
CheckModules = Callable[[Path, Iterable[str], Iterable[str]], None]  # the folder, its modules, those with a slot


def watch(vllm_config: "VllmConfig", check_folder: CheckFolder, check_modules: CheckModules) -> None:
    """Let no adapter into an engine's LoRA slots unchecked. Call it while the engine's model is being built.

    ``check_folder`` is called before vLLM reads an adapter, ``check_modules`` with what it has read.
    """
    if vllm_config.lora_config is None:
        return
    runner = vllm_worker.runner_above()
    load = runner.load_lora_model
    if getattr(load, "is_qerl_watch", False):  # wrapped already for the main model: a drafter is built beside it
        return

    @functools.wraps(load)
    def load_and_watch(*args: Any, **keywords: Any) -> Any:
        model = load(*args, **keywords)
        _check_what_is_read(runner.lora_manager, vllm_config, check_folder, check_modules)
        return model

    load_and_watch.is_qerl_watch = True  # type: ignore[attr-defined]
    runner.load_lora_model = load_and_watch


def _check_what_is_read(
    manager: Any, vllm_config: "VllmConfig", check_folder: CheckFolder, check_modules: CheckModules
) -> None:
    """Run the checks around the method by which vLLM's WorkerLoRAManager reads an adapter before its first request."""
    from vllm.lora.utils import get_adapter_absolute_path

    from qerl_vllm_plugin.compat.engine import checkpoint_folder

    read, layers = manager._load_adapter, manager._adapter_manager
    parts = [part for module in layers.packed_modules.values() for part in module]
    # a pipeline rank drops other ranks' layers from what it has read
    slots = set().union(*vllm_worker.of_all_stages({*layers.modules, *parts}))

    def read_checked(request: Any) -> Any:
        folder = Path(get_adapter_absolute_path(request.lora_path))
        if (folder / "adapter_config.json").is_file():  # vLLM itself reports a missing file
            check_folder(folder, checkpoint_folder(vllm_config), manager.lora_config.max_lora_rank)
        lora = read(request)
        check_modules(folder, lora.loras, slots)
        return lora

    manager._load_adapter = read_checked
