"""Share one copy of the frozen weights: the trainer's model reads those of the engine in its process.

The trainer keeps its own copy only of what it cannot read there: the adapter, the norms (the engine's hold the noise),
and, with a warning, linears that the engine holds in a form that cannot be cut into views.
"""

import warnings
from typing import TYPE_CHECKING

import torch
from qerl_kernels.marlin_layout import MarlinWeight
from qerl_kernels.nvfp4 import NVFP4Weight
from transformers import PreTrainedModel

from qerl_recipes.model.frozen import FrozenMarlinLinear, FrozenNVFP4Linear, FrozenTiledLinear

if TYPE_CHECKING:  # recipe.configs imports TRL, which the model does not need; frozen_weights imports vllm
    from qerl_recipes.recipe.configs import GRPOConfig
    from qerl_vllm_plugin.weights.frozen_weights import FrozenWeight, FrozenWeights

ARM = "qerl_nvfp4"
LEAVES = ("weight", "bias", "weight_packed", "weight_scale", "weight_global_scale")  # of a linear, in a checkpoint
OWN_COPY = "the trainer keeps its own copy of the frozen weights"


def obstacle(training: "GRPOConfig") -> str | None:
    """Say why this configuration cannot share the weights; None if it can."""
    from qerl_recipes.recipe.configs import SERVER

    if training.quantization != ARM:
        return f"quantization: {training.quantization} has a form of its own in the engine; only {ARM} is shared"
    if training.vllm_mode == SERVER:
        return f"vllm_mode: {SERVER}: the engine's are in another process"
    if training.vllm_tensor_parallel_size > 1:
        return (
            f"vllm_tensor_parallel_size: {training.vllm_tensor_parallel_size} leaves each GPU a part of every weight, "
            "and each trainer process needs all of them on its own"
        )
    return None


def is_wanted(training: "GRPOConfig") -> bool:
    """Return True if the engine must start first, so that the trainer can read its weights.

    Raises ValueError if ``share_weights: true`` cannot be honoured. Warns if ``share_weights`` was left open and the
    weights of the NVFP4 arm cannot be shared; vllm_mode: server gives no warning.
    """
    if training.share_weights is False:
        return False
    from qerl_recipes.recipe.configs import SERVER

    reason = obstacle(training)
    if reason is not None:
        if training.share_weights:
            raise ValueError(f"share_weights: {reason}; use share_weights: false")
        if training.quantization == ARM and training.vllm_mode != SERVER:  # it implies a copy
            warnings.warn(f"{OWN_COPY}: {reason}", stacklevel=2)
    return reason is None


def borrow(engine: object, training: "GRPOConfig") -> "FrozenWeights | None":
    """Return a running engine's weights; without any warn and return None, or raise for ``share_weights: true``."""
    from qerl_vllm_plugin.weights.frozen_weights import NotShareableError

    try:
        if not hasattr(engine, "frozen_weights"):
            raise NotShareableError(f"the rollout engine {training.rollout_engine} lends no weights")
        weights = engine.frozen_weights()
        if weights.device.type != training.device.type:
            raise NotShareableError(f"the engine is on {weights.device.type}, the trainer on {training.device.type}")
    except NotShareableError as error:
        if training.share_weights:
            raise ValueError(f"share_weights: {error}; or use share_weights: false") from error
        warnings.warn(f"{OWN_COPY}: {error}", stacklevel=2)
        return None
    return weights


def install(model: PreTrainedModel, weights: "FrozenWeights", dtype: torch.dtype) -> set[str]:
    """Fill a model on the meta device with views of ``weights``; return the checkpoint tensors that need no reading.

    ``dtype`` is that of embedding, head and activations. What the engine does not lend stays on the meta device. Raises
    ValueError if a linear has another shape in the engine.
    """
    read: set[str] = set()
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name in weights.linears:
            frozen = _linear(weights.linears[name], dtype)
            if (frozen.out_features, frozen.in_features) != (module.out_features, module.in_features):
                raise ValueError(f"{name} is {module} in the checkpoint and {frozen} in the engine: not the same model")
            model.set_submodule(name, frozen)
            read |= {f"{name}.{leaf}" for leaf in LEAVES}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        lent = weights.dense.get(name)
        if lent is not None and parameter.is_meta and (lent.shape, lent.dtype) == (parameter.shape, dtype):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(lent, requires_grad=False))
            read.add(name)
    _warn_of_copies(model, weights)
    return read


def _linear(lent: "FrozenWeight", dtype: torch.dtype) -> FrozenNVFP4Linear:
    if isinstance(lent.weight, NVFP4Weight):
        weight = lent.weight
        return FrozenNVFP4Linear(weight.codes, weight.block_scales, weight.divisor, lent.bias, dtype)
    if isinstance(lent.weight, MarlinWeight):
        return FrozenMarlinLinear(lent.weight, lent.bias, dtype)
    return FrozenTiledLinear(lent.weight, lent.bias, dtype)


def _warn_of_copies(model: PreTrainedModel, weights: "FrozenWeights") -> None:
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    own = [name for name, module in linears.items() if module.weight.is_meta and name != "lm_head"]
    if own:
        reason = weights.apart.get(own[0], "the engine has no layer of that name")
        warnings.warn(
            f"{len(own)} of {len(linears)} linears are not shared with the engine, and the trainer keeps its own copy "
            f"of them: {own[0]}: {reason}",
            stacklevel=2,
        )
