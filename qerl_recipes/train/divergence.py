"""Stop a run at NaN or infinity, before the optimizer step is taken and before anything is saved."""

import math
from collections.abc import Iterable

import torch

from qerl_recipes.files.run_state import whole_checkpoints
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_vllm_plugin.weights import overflow


class Diverged(ValueError):
    """Report that training has come to NaN or infinity; nothing of that has been saved."""


def check_step(step: int, loss: float, grad_norm: float, args: GRPOConfig, *, is_half: bool) -> None:
    """Raise Diverged if ``loss`` or ``grad_norm``, both over all processes, is not finite before ``step`` is taken."""
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        what = f"step {step} is not taken: its loss is {loss:g} and the gradient norm is {grad_norm:g}"
        raise Diverged(f"{what}. {_way_out(args, is_half)}")


def check_weights(step: int, weights: Iterable[tuple[str, torch.Tensor]], args: GRPOConfig, *, is_half: bool) -> None:
    """Raise Diverged if one of the named ``weights`` holds NaN or an infinity after ``step``."""
    named = list(weights)
    finite = torch.stack([weight.isfinite().all() for _, weight in named]).tolist()  # the one wait for the GPU
    wrong = [name for (name, _), is_finite in zip(named, finite, strict=True) if not is_finite]
    if wrong:
        what = f"nothing is saved of step {step}: {len(wrong)} of {len(named)} trained tensors hold NaN or infinity"
        raise Diverged(f"{what}, the first of them {wrong[0]}. {_way_out(args, is_half)}")


def _way_out(args: GRPOConfig, is_half: bool) -> str:
    keys = f"a smaller learning_rate (now {args.learning_rate:g})"
    if is_half:
        keys = (
            f"--dtype bfloat16 --fp16 false --bf16 true, for activations or their gradients may be beyond the end of "
            f"float16, {overflow.LARGEST:.0f}, or {keys}"
        )
    if not (whole := whole_checkpoints(args.output_dir)):
        return f"There is no checkpoint to go on from; start again with {keys}"
    start = f"adapter_name_or_path {whole[-1]}"
    return f"The last checkpoint is whole; go on from it in a new output_dir ({start}) with {keys}"
