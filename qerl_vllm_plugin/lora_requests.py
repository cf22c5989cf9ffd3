"""Adapters that vLLM reads itself, one a LoRA request: ``--lora-modules``, ``lora_local_path`` of
lm-evaluation-harness, ``/v1/load_lora_adapter``. What it would leave out of them without a word is refused here.

vLLM (0.26 to 0.32, ``vllm/lora``) takes the tensors, and of the config rank, alpha and whether it is rank-stabilized.
It looks at no file beside them, and drops tensors for which it has no layer. The answers would be another policy's.
"""

import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_vllm_plugin import adapter_folder
from qerl_vllm_plugin.adapter import AdapterError, check_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EXPERTS = ".experts"  # vLLM keeps the adapters of a layer's experts as one, under names of its own


def watch(vllm_config: "VllmConfig") -> None:
    """To be called while a model of an engine with LoRA slots is being built: no adapter gets there unchecked."""
    if vllm_config.lora_config is None:
        return
    runner = _runner_above()
    load = runner.load_lora_model
    if getattr(load, "is_qerl_watch", False):  # of the model that a drafter is built beside
        return

    @functools.wraps(load)
    def load_and_watch(*args: Any, **keywords: Any) -> Any:
        model = load(*args, **keywords)
        _check_what_is_read(runner.lora_manager, vllm_config)
        return model

    load_and_watch.is_qerl_watch = True  # type: ignore[attr-defined]
    runner.load_lora_model = load_and_watch


def _check_what_is_read(manager: Any, vllm_config: "VllmConfig") -> None:
    """``manager`` is vLLM's WorkerLoRAManager, which reads an adapter once, before the first request is answered."""
    from vllm.lora.utils import get_adapter_absolute_path

    from qerl_vllm_plugin.loading import checkpoint_folder

    read = manager._load_adapter
    is_whole = vllm_config.parallel_config.pipeline_parallel_size == 1

    def read_checked(request: Any) -> Any:
        folder = Path(get_adapter_absolute_path(request.lora_path))
        if (folder / adapter_folder.CONFIG_FILE).is_file():  # what is missing, vLLM names
            check_folder(folder, checkpoint_folder(vllm_config), manager.lora_config.max_lora_rank)
        lora = read(request)
        if is_whole:  # a rank of a pipeline has no place for the layers of the others
            slots = manager._adapter_manager
            parts = [part for module in slots.packed_modules.values() for part in module]
            check_modules(folder, lora.loras, {*slots.modules, *parts})
        return lora

    manager._load_adapter = read_checked


def check_folder(folder: Path, base: Path | None, max_rank: int) -> None:
    """Raises AdapterError for an adapter of another checkpoint than ``base`` (where that is known), with trained norms,
    or with a config whose product vLLM would not compute. ``max_rank`` is the engine's ``max_lora_rank``."""
    if base is not None:
        adapter_folder.check_base(folder, base)
    if (folder / adapter_folder.NORMS_FILE).exists():
        raise AdapterError(
            f"{folder} holds trained norms ({adapter_folder.NORMS_FILE}), and a LoRA request would be answered without "
            'them, by another policy. Leave LoRA out and start the engine with additional_config={"qerl": '
            f'{{"policy_adapter": {{"rank": R, "path": "{folder}"}}}}}}, or use `qerl evaluate`, Policy.swap_folder or '
            "`qerl export --merge`"
        )
    try:  # vLLM has slots for experts, and reads what PEFT saves of them
        check_config(adapter_folder.read_config(folder), max_rank, besides=("target_parameters",))
    except AdapterError as error:
        raise AdapterError(f"{folder}: {error}") from error


def check_modules(folder: Path, adapted: Iterable[str], slots: Iterable[str]) -> None:
    """Raises AdapterError if ``adapted``, the modules of an adapter by vLLM's names, are not all among ``slots``."""
    left_out = sorted(name for name in set(adapted) - set(slots) if EXPERTS not in name)
    if left_out:
        raise AdapterError(
            f"{folder} adapts {left_out[0]} (and {len(left_out) - 1} more), for which this engine has no LoRA slot: "
            "that part would be left out. Was it trained on another base, or does lora_target_modules exclude it?"
        )


def _runner_above() -> Any:
    """vLLM's model runner, in one of whose methods a model is being built."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if hasattr(owner, "load_lora_model"):
            return owner
    raise RuntimeError("qerl_nvfp4: this vLLM gives a model its LoRA slots in a way that is not known here")
