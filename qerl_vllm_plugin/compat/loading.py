"""Watch vLLM load a model, so that every weight arrives, and lock it afterwards, so that none is replaced.

vLLM compares what it has loaded with what a model needs only for unquantized models, and not for linears. Here every
parameter is checked, whatever the architecture, and whether the model came from a folder or from the hub.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from qerl_vllm_plugin.compat import layers as vllm_layers
from qerl_vllm_plugin.compat.engine import checkpoint_folder
from qerl_vllm_plugin.options import NO_WEIGHT_TRANSFER
from qerl_vllm_plugin.wire.safetensors_file import DOWNLOAD_AGAIN, CheckpointError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.qerl")

FROZEN = (
    "the weights of a qerl_nvfp4 engine are frozen: nothing can reload or replace them while it runs. Start an engine "
    "with the other checkpoint; an adapter and trained norms are installed with qerl_vllm_plugin.policy.Policy"
)
ACTIVATION_SCALES = {"input_scale", "input_global_scale", "q_scale", "prob_scale"}


class _Frozen:
    """Replace vLLM's record for reloading a model; every access to an attribute raises RuntimeError."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(FROZEN)


class _FrozenDummy(_Frozen):
    """Tell vLLM's loader of random weights not to quantize them itself, as a ``_Frozen``; a reload asks for more."""

    def can_load(self) -> bool:
        return False


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError(FROZEN)


def watch(
    vllm_config: "VllmConfig",
    inspect: Callable[[Path], None],
    when_built: Callable[[torch.nn.Module], Callable[[str], None]],
    install: Callable[[torch.nn.Module], None] | None = None,
    when_ready: Callable[[torch.nn.Module], None] | None = None,
) -> None:
    """Check and lock a model's weights as they arrive. Call it while the model is being built.

    The callbacks run in this order:

        inspect     with the checkpoint's folder, before anything is loaded; after loading for a model named by its id
        when_built  with the model; what it returns is called with the name of each tensor before that is loaded
        install     with the model, once all are loaded
        when_ready  with the model, once the layers have been brought into their layouts

    With --load-format dummy only ``when_ready`` is called.

    Every reload, and every weight transfer in the checkpoint's format, begins by asking vLLM's record of the model, and
    goes on to ``load_weights``; both refuse. A reload would replace only half of a packed layer, for vLLM leaves the
    buffer that is computed from the tensor scales as it was.

    Raises ValueError for a start with weight transfer, and for ``install`` with --load-format dummy. Raises
    CheckpointError if a folder is not a whole checkpoint.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ValueError(NO_WEIGHT_TRANSFER)
    model = _model_being_built()
    if when_ready is not None:
        _call_when_ready(model, when_ready)
    layerwise.LAYERWISE_INFO[model] = _Frozen()  # type: ignore[assignment]
    if vllm_config.load_config.load_format == "dummy":
        layerwise.LAYERWISE_INFO[model] = _FrozenDummy()  # type: ignore[assignment]
        if install is not None:
            raise ValueError(
                '"qerl.policy_adapter.path" has no place beside --load-format dummy: it fits no such weights'
            )
        model.load_weights = _refuse  # type: ignore[assignment]
        return
    folder = Path(vllm_config.model_config.model)
    if folder.is_dir():
        inspect(folder)
    load: Callable[..., set[str] | None] = model.load_weights  # type: ignore[assignment]

    def load_and_check(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        check_place = when_built(model)
        needed = _needed(model)
        names: list[str] = []

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                check_place(name)
                names.append(name)
                yield name, tensor

        loaded = load(noted())
        vllm_layers.keep_names(model, names)
        model.load_weights = _refuse  # type: ignore[assignment]
        if loaded is None:
            logger.warning_once("this architecture does not tell vLLM which weights it has loaded: none can be missed")
        elif missing := [name for name in needed if name not in loaded]:
            raise CheckpointError(
                f"the checkpoint lacks {missing[0]} (vLLM's name), and {len(missing) - 1} more weights that the model "
                f"needs; {DOWNLOAD_AGAIN}"
            )
        if not folder.is_dir() and (snapshot := checkpoint_folder(vllm_config)) is not None:
            inspect(snapshot)
        if install is not None:
            install(model)
        return loaded

    model.load_weights = load_and_check  # type: ignore[assignment]


def _call_when_ready(model: torch.nn.Module, when_ready: Callable[[torch.nn.Module], None]) -> None:
    """Call ``when_ready`` once all layers have their layouts: in ``model.eval``, by which vLLM's loaders end."""

    def eval_and_call() -> torch.nn.Module:
        del model.eval
        when_ready(model.eval())
        return model

    model.eval = eval_and_call  # type: ignore[assignment]


def _needed(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that must be loaded.

    Experts are left out: vLLM reports them as loaded under other names, and weights/experts.py checks them. Activation
    scales may be missing, because only the weights are used.
    """
    experts = tuple(f"{name}." for name, module in model.named_modules() if vllm_layers.is_fused_experts(module))
    named = [name for name, _ in model.named_parameters() if not name.startswith(experts)]
    return [name for name in named if name.rpartition(".")[2] not in ACTIVATION_SCALES]


def _model_being_built() -> torch.nn.Module:
    """Return the model whose constructor is running, from the call stack; raise RuntimeError if there is none."""
    frame, found = sys._getframe(1), None
    while frame.f_back is not None and frame.f_code.co_name != "initialize_model":
        owner = frame.f_locals.get("self")
        found = owner if isinstance(owner, torch.nn.Module) else found
        frame = frame.f_back
    if found is None or frame.f_code.co_name != "initialize_model":
        raise RuntimeError("qerl_nvfp4: this vLLM builds its models in a way that is not known here")
    return found
