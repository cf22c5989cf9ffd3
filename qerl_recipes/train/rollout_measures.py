"""Measure anew two figures of a rollout for which TRL 1.16 computes something else than their names say.

``frac_reward_zero_std``, our ``equal_groups``, should be the share of groups whose rewards are all equal: those without
signal. Where ``scale_rewards`` is ``batch``, or each reward is normalized before the sum, TRL looks at the deviation of
the whole batch. Its figure is then 0 as soon as any two completions differ.

``completions/clipped_ratio``, our ``completion_clipped``, should be the share of completions that were cut off. TRL
counts all without an end-of-sequence token, even those ended by ``stop`` or ``stop_token_ids`` of
``generation_kwargs``.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from qerl_recipes.train.dynamic_sampling import TOTAL, informative_groups, judged_by

if TYPE_CHECKING:
    from qerl_recipes.train.trainer import QerlGRPOTrainer


def equal_groups(per_reward: torch.Tensor, weights: torch.Tensor, num_generations: int, is_summed: bool) -> float:
    """Return the share of groups in which no completion has an advantage over another.

    ``per_reward`` is (completions, rewards), with NaN for a missing value; ``weights`` is (rewards,). With
    ``is_summed`` the completions are compared by the weighted sum, else by each reward whose weight is not 0.
    """
    if is_summed:
        columns = [judged_by(per_reward, weights, (), TOTAL)]
    else:
        columns = [per_reward[:, i] for i, weight in enumerate(weights.tolist()) if weight]
    has_signal = torch.stack([informative_groups(column, num_generations) for column in columns]).any(dim=0)
    return 1 - has_signal.float().mean().item()


def is_stopped(ids: Sequence[int], text: str, generation_kwargs: Mapping[str, Any]) -> bool:
    """Return True if ``stop`` or ``stop_token_ids`` of ``generation_kwargs`` ended the completion."""
    stop = generation_kwargs.get("stop") or ()
    strings = [stop] if isinstance(stop, str) else stop
    return ids[-1] in (generation_kwargs.get("stop_token_ids") or ()) or any(string in text for string in strings)


def correct(trainer: "QerlGRPOTrainer", batch: Mapping[str, torch.Tensor]) -> None:
    """Replace TRL's two figures by ours; ``batch`` is what this process has scored last."""
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    metrics["frac_reward_zero_std"][-1] = trainer.equal_groups
    generation_kwargs = trainer.args.generation_kwargs or {}
    if not generation_kwargs.get("stop") and not generation_kwargs.get("stop_token_ids"):
        return
    end_tokens, tokenizer = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}, trainer._tokenizer
    # masks are those of whole completions: these keys are refused together with mask_truncated_completions
    padded = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    rows = [ids[mask.bool()].tolist() for ids, mask in padded]
    is_cut = [
        ids[-1] not in end_tokens and not is_stopped(ids, tokenizer.decode(ids), generation_kwargs) for ids in rows
    ]
    gathered = trainer.accelerator.gather(torch.tensor(is_cut, device=batch["completion_ids"].device))
    metrics["completions/clipped_ratio"][-1] = gathered.float().mean().item()
