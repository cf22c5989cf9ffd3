"""Make the trainer's model round where the engine does: once, where transformers rounds several times.

A fused kernel computes in fp32 and rounds what it writes. vLLM rotates queries and keys in one kernel everywhere, and
computes silu(gate) * up in one where the engine is compiled, as on a GPU. transformers computes both operation by
operation and rounds to BF16 in between. Then the policy that learns would differ from the one that samples.
"""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from qerl_recipes.model.lora import gated, together

PARTS = ("gate_proj", "up_proj", "down_proj")


class GatedMLP(torch.nn.Module):
    """Compute down(silu(gate(x)) * up(x)), on a GPU with one rounding before the last product."""

    def __init__(self, gate_proj: torch.nn.Module, up_proj: torch.nn.Module, down_proj: torch.nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x: (..., H)`` to (..., H)."""
        gate, up = together(x, self.gate_proj, self.up_proj)
        if x.is_cuda:
            return gated(gate, up, self.down_proj)
        return self.down_proj(torch.nn.functional.silu(gate) * up)


class UnroundedRotation(torch.nn.Module):
    """Wrap a rotary embedding: its cosines and sines, rounded as before, stay fp32 until the attention rounds."""

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model's cosines and sines, (B, T, D) fp32 each; Gemma 3 also passes the type of layer."""
        cosine, sine = self.rotary(*args, **kwargs)
        return cosine.float(), sine.float()


def replace_mlps(model: PreTrainedModel) -> int:
    """Replace every gated MLP of ``model`` by a GatedMLP, and return the number of replaced modules.

    It is recognized by what a small instance of its class computes; others stay, with one warning for their class.
    """
    mlps = {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, GatedMLP)
        and all(isinstance(getattr(module, part, None), torch.nn.Linear) for part in PARTS)
    }
    kinds = dict.fromkeys(map(type, mlps.values()))
    others = [kind for kind in kinds if not _is_gated_by_silu(kind, model.config)]
    for kind in others:
        warnings.warn(
            f"{kind.__name__} is not down(silu(gate) * up): it rounds as transformers does, not as the engine",
            stacklevel=2,
        )
    gated_mlps = {name: mlp for name, mlp in mlps.items() if type(mlp) not in others}
    for name, mlp in gated_mlps.items():
        model.set_submodule(name, GatedMLP(mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    return len(gated_mlps)


def replace_rotations(model: PreTrainedModel) -> int:
    """Wrap each rotary embedding, whose attention must round to the values' dtype; return how many are new."""
    wrapped = {id(module.rotary) for module in model.modules() if isinstance(module, UnroundedRotation)}
    rotaries = [
        (name, module)
        for name, module in model.named_modules()
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
        and id(module) not in wrapped
    ]
    for name, module in rotaries:
        model.set_submodule(name, UnroundedRotation(module))
    return len(rotaries)


def _is_gated_by_silu(kind: type, config: object) -> bool:
    """Return True if a small module of class ``kind`` computes what GatedMLP does."""
    generator = torch.Generator().manual_seed(0)
    module = small(kind, config, {"hidden_size": 8, "intermediate_size": 24}, generator)
    if module is None:
        return False
    with torch.no_grad():
        x = torch.randn(3, 8, generator=generator)
        ours = GatedMLP(module.gate_proj, module.up_proj, module.down_proj)(x)
        return torch.allclose(module(x), ours, rtol=1e-4, atol=1e-4)


def small(
    kind: Any, config: object, sizes: Mapping[str, Any], generator: torch.Generator, *others: Any
) -> torch.nn.Module | None:
    """Return a small random module of class ``kind`` in fp32; None if it takes other arguments than these."""
    changed = copy.deepcopy(config)
    for name, size in sizes.items():
        setattr(changed, name, size)
    try:
        with torch.device("cpu"):
            module: torch.nn.Module = kind(changed, *others).float().eval()
    except (AttributeError, TypeError):
        return None
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return module
