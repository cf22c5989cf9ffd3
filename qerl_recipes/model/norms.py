"""Replace the model's RMSNorms in the trainer: fp32 weights, the engine's arithmetic, and noise beside the weight."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from qerl_kernels import naive
from qerl_kernels.rms_norm import rms_norm
from safetensors.torch import load_file, save_file

from qerl_recipes.files.adapter import NORMS
from qerl_recipes.model.frozen import keeping_dtypes
from qerl_vllm_plugin import noise


class TrainerRMSNorm(torch.nn.Module):
    """Multiply the normalized input by ``offset + (weight + noise)``; the noise never changes the stored weight.

    ``weight: (H,)`` is the checkpoint's in fp32. ``offset`` is 1 for a norm that is stored as w and used as 1 + w. With
    ``rounded`` the effective weight and the normalized input are each rounded before the product, as in stock vLLM and
    transformers. Without it there is one rounding at the end, as in the engine of the NVFP4 arm.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float, *, rounded: bool = False, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.detach().float(), requires_grad=False)
        self.epsilon = epsilon
        self.rounded, self.offset = rounded, offset
        self.is_policys = False  # True if the weight is trained, now or by an earlier run
        self.register_buffer("noise", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x: (..., H)`` to (..., H), in the dtype of ``x``."""
        weight = self.weight if self.noise is None else self.weight + self.noise
        if self.offset:
            weight = self.offset + weight
        return rms_norm(x, weight, self.epsilon, rounded=self.rounded)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Move between devices; ``.to(dtype)`` leaves weight and noise in fp32, or rounding would lose the noise."""
        return super()._apply(keeping_dtypes(fn), recurse)


def replace(model: torch.nn.Module, *, rounded: bool) -> int:
    """Replace every RMSNorm of ``model`` by a TrainerRMSNorm, and return the number of replaced norms.

    An RMSNorm is recognized by what it computes, with its weight or with 1 + weight (Gemma). The second kind rounds
    once in transformers and in stock vLLM, too. Raises ValueError if a module of that form computes something else.
    """
    replacements = []
    for name, module in model.named_modules():
        weight, epsilon = getattr(module, "weight", None), _epsilon(module)
        if isinstance(weight, torch.Tensor) and weight.dim() == 1 and epsilon is not None:
            offset = _offset(name, module, weight, epsilon)
            replacements.append((name, TrainerRMSNorm(weight, epsilon, rounded=rounded and not offset, offset=offset)))
    for name, norm in replacements:
        model.set_submodule(name, norm)
    return len(replacements)


def _epsilon(module: torch.nn.Module) -> float | None:
    """Return the epsilon of a module without a bias and without a gate, by transformers' names for it, or None."""
    if getattr(module, "bias", None) is not None or "gate" in inspect.signature(module.forward).parameters:
        return None
    candidates = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    return next((epsilon for epsilon in candidates if isinstance(epsilon, float)), None)


@torch.no_grad()
def _offset(name: str, module: torch.nn.Module, weight: torch.Tensor, epsilon: float) -> float:
    """Return what the norm adds to its weight, 0 or 1. Raises ValueError if it is no RMSNorm."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, weight.numel(), generator=generator).to(weight)
    output = module(x).float()
    for offset in (0.0, 1.0):
        effective = offset + weight.float()
        expected = naive.rms_norm(x, effective, epsilon).float()
        if torch.allclose(output, expected, rtol=2**-6, atol=2**-6 * float(effective.abs().max())):
            return offset
    raise ValueError(
        f"{name} ({type(module).__name__}) is not x / rms(x) * weight, nor * (1 + weight), so noise and training of it "
        "are not defined here; use a model of the Qwen2, Qwen3, Llama or Mistral family"
    )


def named_norms(model: torch.nn.Module) -> Iterator[tuple[str, TrainerRMSNorm]]:
    """Yield every TrainerRMSNorm with its weight's name in the checkpoint, whether or not PEFT wraps the model."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for name, module in base.named_modules():
        if isinstance(module, TrainerRMSNorm):
            yield f"{name}.weight", module


def set_noise(
    model: torch.nn.Module, sigma: float, seed: int, rollout: int, targets: Sequence[str] = noise.DEFAULT_TARGETS
) -> int:
    """Set the noise of the target norms to sigma * z(seed, rollout, name), and return the number of target norms.

    It replaces all earlier noise, and has the same bits as in the engine. Raises ValueError for a negative or
    non-finite sigma, and for a target that names none of the norms; the noise then stays as it was.
    """
    sigma = noise.check_sigma(sigma)
    norms = dict(named_norms(model))
    chosen = noise.targeted(norms, targets)
    clear_noise(model)
    for name in chosen if sigma else ():
        weight = norms[name].weight
        norms[name].noise = sigma * noise.draw(seed, rollout, name, weight.numel()).to(weight.device)
    return len(chosen)


def clear_noise(model: torch.nn.Module) -> None:
    for _, norm in named_norms(model):
        norm.noise = None


def make_trainable(model: torch.nn.Module, targets: Sequence[str] = noise.DEFAULT_TARGETS) -> int:
    """Make the target norms trainable, and return their number. Raises ValueError for a target that names none."""
    norms = dict(named_norms(model))
    chosen = noise.targeted(norms, targets, "train_norms")
    for name in chosen:
        norms[name].weight.requires_grad_(True)
        norms[name].is_policys = True
    return len(chosen)


def trained_norms(norms: Iterable[tuple[str, TrainerRMSNorm]]) -> dict[str, torch.Tensor] | None:
    """Return CPU copies of the weights of ``norms`` (``named_norms``) that are trained or were loaded; None if none."""
    return {name: norm.weight.detach().cpu().clone() for name, norm in norms if norm.is_policys} or None


def save_norms(norms: Mapping[str, torch.Tensor], folder: str | Path) -> None:
    """Write ``norms.safetensors``, the fp32 weights by their names in the checkpoint."""
    save_file(dict(norms), Path(folder) / NORMS)


@torch.no_grad()
def load_norms(model: torch.nn.Module, folder: str | Path) -> int:
    """Load the norms that a training run saved in ``folder`` into ``model``, and return their number (0: no file).

    Raises ValueError, before any weight changes, if a name or shape is not this model's or a value is not finite.
    """
    file = Path(folder) / NORMS
    if not file.exists():
        return 0
    norms, saved = dict(named_norms(model)), load_file(file)
    for name, weight in saved.items():
        if name not in norms:
            raise ValueError(f"{file}: {name} is no norm of this model; was it trained on another base?")
        if weight.shape != norms[name].weight.shape:
            raise ValueError(f"{file}: {name} has shape {tuple(weight.shape)}, not {tuple(norms[name].weight.shape)}")
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"{file}: {name} holds NaN or infinite values")
    for name, weight in saved.items():
        norms[name].weight.copy_(weight)
        norms[name].is_policys = True
    return len(saved)
