"""Adapters that vLLM reads itself, one a LoRA request: ``--lora-modules``, ``lora_local_path`` of
lm-evaluation-harness, ``/v1/load_lora_adapter``. What it would leave out of them without a word is refused here.

vLLM (0.26 to 0.32, ``vllm/lora``) takes the tensors, and of the config rank, alpha and whether it is rank-stabilized.
It looks at no file beside them, and drops tensors for which it has no layer. The answers would be another policy's.
"""

from collections.abc import Iterable
from pathlib import Path

from qerl_vllm_plugin import adapter_folder
from qerl_vllm_plugin.adapter import AdapterError, check_config

EXPERTS = ".experts"  # vLLM keeps the adapters of a layer's experts as one, under names of its own


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
