"""Compute adaptive quantization noise: its size in each rollout, which norms carry it, and the bits that are added.

Trainer and engine both call this module; it needs torch alone. Source: QeRL (arXiv 2510.11696), section 3.3:
Z ~ N(0, sigma^2), one value per input channel, is merged into the RMSNorm weight that feeds the linears,
w_noise = w + Z. A norm that is stored as w and multiplies by 1 + w gets the same noise: 1 + (w + Z) = (1 + w) + Z.
Over a run sigma falls exponentially in num_stages stages, after a first stage without noise.
"""

import hashlib
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

MAX_SIGMA = 1e6  # norms are near 1; far above this their values would be infinite
# the norms that feed q/k/v and gate/up; the final norm and the q/k norms carry no noise unless named as targets
DEFAULT_TARGETS = ("input_layernorm", "post_attention_layernorm")
# in models that have both (Gemma), _FEEDS feeds gate and up, and _FOLLOWS follows attention and feeds no linear
_FOLLOWS, _FEEDS = "post_attention_layernorm", "pre_feedforward_layernorm"


def seed_of(*parts: object) -> int:
    """Return a seed of 63 bits from the SHA-256 of the texts of all ``parts``, joined by colons."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def draw(seed: int, rollout: int, name: str, size: int) -> torch.Tensor:
    """Draw unit Gaussian noise for one norm weight; return fp32 (size,) on the CPU.

    ``name`` is the Hugging Face parameter name, such as ``model.layers.0.input_layernorm.weight``. The generator runs
    on the CPU and is seeded by ``seed``, ``rollout`` and ``name``. Every tensor-parallel rank and the trainer thus draw
    the same bits, and a resumed run draws what the uninterrupted run would have drawn.
    """
    return draw_all(seed, rollout, {name: size})


def draw_all(seed: int, rollout: int, sizes: Mapping[str, int]) -> torch.Tensor:
    """Draw as ``draw`` does for each norm in ``sizes``; return all of it in one fp32 tensor, in the order of names."""
    generator, drawn = torch.Generator("cpu"), torch.empty(sum(sizes.values()), dtype=torch.float32, device="cpu")
    for name, part in zip(sizes, drawn.split(list(sizes.values())), strict=True):
        generator.manual_seed(seed_of(seed, rollout, name))
        torch.randn(part.shape, generator=generator, out=part)
    return drawn


def is_target(name: str, targets: Sequence[str] = DEFAULT_TARGETS) -> bool:
    """Return True if the parameter ``...<module>.weight`` belongs to a norm module named in ``targets``."""
    parts = name.split(".")
    return len(parts) >= 2 and parts[-1] == "weight" and parts[-2] in targets


def targeted(norms: Collection[str], targets: Sequence[str], purpose: str = "noise") -> set[str]:
    """Return the names in ``norms`` that are a target.

    Raises ValueError if there is no target or if one names no norm. Raises ValueError also for
    post_attention_layernorm without pre_feedforward_layernorm in a model where only the latter feeds gate and up; the
    default targets suit models where the former does.
    """
    unknown = [target for target in targets if not any(is_target(name, [target]) for name in norms)]
    if unknown or not targets:
        known = sorted({name.split(".")[-2] for name in norms})
        raise ValueError(f"{purpose} targets {unknown} match none of this model's {len(norms)} norms; it has {known}")
    if _FOLLOWS in targets and _FEEDS not in targets and any(is_target(name, [_FEEDS]) for name in norms):
        raise ValueError(
            f"{purpose} target {_FOLLOWS} feeds no linear of this model, whose gate and up are fed by {_FEEDS}; use "
            f"{[_FEEDS if target == _FOLLOWS else target for target in targets]}"
        )
    return {name for name in norms if is_target(name, targets)}


def check_sigma(sigma: object) -> float:
    """Return ``sigma`` as a float; raise ValueError unless it is a number from 0 to MAX_SIGMA.

    Text is refused, and so is a bool: JSON's ``true`` would be noise of 1, as large as the norms themselves.
    """
    if isinstance(sigma, bool) or not isinstance(sigma, numbers.Real) or sigma < 0 or not sigma <= MAX_SIGMA:
        raise ValueError(f"noise sigma is {sigma!r}; it must be a number from 0 to {MAX_SIGMA:g} (0 clears the noise)")
    return float(sigma)


def checked(sigma: Any, seed: Any, rollout: Any, targets: Any) -> tuple[float, int, int, list[str]]:
    """Return the settings of noise as plain numbers and a list; raise ValueError naming one of another kind."""
    for name, value in (("seed", seed), ("rollout", rollout)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError(f"the noise's {name} is {value!r}; it must be a whole number")
    if not isinstance(targets, list | tuple | set) or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"the noise's targets are {targets!r}; they must be a list of names of norms")
    return check_sigma(sigma), int(seed), int(rollout), list(targets)


def all_noisy(bases: Mapping[str, torch.Tensor], sigma: float, seed: int, rollout: int) -> dict[str, torch.Tensor]:
    """Return ``base + sigma * z`` in fp32 for each named norm, all on one device, by one transfer and two launches."""
    if not bases:
        return {}
    sizes = {name: base.numel() for name, base in bases.items()}
    drawn = draw_all(seed, rollout, sizes).to(next(iter(bases.values())).device)
    scaled = torch._foreach_mul(drawn.split(list(sizes.values())), sigma)
    sums = torch._foreach_add([base.float() for base in bases.values()], scaled)
    return dict(zip(bases, sums, strict=True))


def exponential_sigma(rollout: int, rollouts: int, sigma_start: float, sigma_end: float, num_stages: int) -> float:
    """Return sigma for ``rollout`` (0 is the first) of ``rollouts``, each of which is one batch of completions.

    Rollouts are split evenly over stages 0 to K = ``num_stages``. Stage 0 has no noise. Stage k has
    sigma_start * (sigma_end / sigma_start)^((k - 1) / (K - 1)); a single stage has sigma_start. Raises ValueError
    unless 0 < sigma_end <= sigma_start, both are finite, num_stages >= 1 and 0 <= rollout < rollouts.
    """
    if not (math.isfinite(sigma_start) and 0 < sigma_end <= sigma_start):
        raise ValueError(f"sigma falls from {sigma_start} to {sigma_end}; both must be positive, the second not larger")
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; noise needs at least one stage")
    if not 0 <= rollout < rollouts:
        raise ValueError(f"rollout {rollout} is not one of the {rollouts} rollouts 0 to {rollouts - 1}")
    stage = rollout * (num_stages + 1) // rollouts
    if stage == 0:
        return 0.0
    if num_stages == 1:
        return sigma_start
    return sigma_start * (sigma_end / sigma_start) ** ((stage - 1) / (num_stages - 1))
