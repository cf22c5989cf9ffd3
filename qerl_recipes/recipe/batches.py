"""Divide the completions of a rollout into steps and micro-batches, by TRL's keys or by the tokens of packed rows.

``config`` is a GRPOConfig: ``fill_in`` is called before TRL checks it, and ``settle`` afterwards.
"""

import math
import warnings
from typing import Any, NamedTuple

from qerl_recipes.recipe.file import ConfigError

PACK_TOKENS = 16384  # at this size, expanding the 4-bit weights costs little beside the matrix products
FAST_TOKENS = 4096  # a packed row of this size is by some 3 % slower than one of twice the size
AS_MANY_AS_FIT = -1  # a value of pack_tokens
MICRO_BATCH = 8  # TRL's default of per_device_train_batch_size


class Named(NamedTuple):
    """Hold the batch sizes that a recipe names, None for each that it does not name.

    ``rows`` is ``per_device_train_batch_size``, ``micro_batches`` is ``gradient_accumulation_steps``, ``rollout`` is
    ``generation_batch_size`` and ``steps`` is ``steps_per_generation``.
    """

    rows: int | None
    micro_batches: int | None
    rollout: int | None
    steps: int | None

    @property
    def is_by_trl(self) -> bool:
        """Return True if the recipe cuts a step into micro-batches by TRL's keys."""
        return self.rows is not None or self.micro_batches is not None


def fill_in(config: Any) -> Named:
    """Fill in the batch sizes that TRL computes with, and return what the recipe says of them.

    Without ``per_device_train_batch_size`` and ``gradient_accumulation_steps`` each process gets its share of a step as
    one micro-batch of TRL's, which the trainer splits.
    """
    rows, micro_batches = config.per_device_train_batch_size, config.gradient_accumulation_steps
    named = Named(rows, micro_batches, config.generation_batch_size, config.steps_per_generation)
    # a quantile over the tokens of a micro-batch does not follow from those of its parts
    config.splits_by_tokens = not named.is_by_trl and config.top_entropy_quantile == 1
    if config.pack_tokens is None:
        config.pack_tokens = AS_MANY_AS_FIT
    if config.pack_tokens < AS_MANY_AS_FIT:
        raise ConfigError(
            f"pack_tokens must be at least 1, 0 for padded batches or -1 for as many as fit, not {config.pack_tokens}"
        )
    if config.pack_tokens == AS_MANY_AS_FIT and not config.splits_by_tokens:
        config.pack_tokens = PACK_TOKENS
    config.per_device_train_batch_size = MICRO_BATCH if rows is None else rows
    config.gradient_accumulation_steps = 1 if micro_batches is None else micro_batches
    if named.rollout is not None and not named.is_by_trl:
        # TRL, which counts the processes, then returns the share of each as steps_per_generation
        config.per_device_train_batch_size, config.steps_per_generation = 1, None
    return named


def settle(config: Any, named: Named) -> None:
    """Divide a rollout into steps, now that TRL has divided it among processes; warn of an unexpected division."""
    if named.rollout is None:
        return
    share, accumulated = config.steps_per_generation, config.gradient_accumulation_steps
    if not named.is_by_trl:
        steps = named.steps or 1
        if share % steps:
            raise ConfigError(
                f"steps_per_generation: {steps} does not divide the {share} completions that each process has of "
                f"generation_batch_size: {named.rollout}"
            )
        config.per_device_train_batch_size, config.steps_per_generation = share // steps, steps
    elif None in (named.rows, named.micro_batches) and share != accumulated:
        missing = "per_device_train_batch_size" if named.rows is None else "gradient_accumulation_steps"
        warnings.warn(
            f"{missing} is not set, and TRL's default for it is {getattr(config, missing)}: an optimizer step has "
            f"{named.rollout * accumulated // share} of the {named.rollout} completions of generation_batch_size; "
            "set both keys, or neither",
            stacklevel=4,
        )


def not_whole_groups(config: Any) -> str | None:
    """Say what to change where a rollout is not a whole number of groups; return None where it is."""
    size, group = config.generation_batch_size, config.num_generations
    if not isinstance(size, int) or group < 1 or size % group == 0:
        return None
    if config.splits_by_tokens:
        return (
            f"generation_batch_size: {size} is not whole groups of num_generations: {group}; use "
            f"{max(1, size // group) * group} or another multiple of {group}"
        )
    batch, steps, processes = config.per_device_train_batch_size, config.steps_per_generation, config.world_size
    whole = group // math.gcd(group, steps * processes)  # whole groups need a multiple of this
    launched = group // math.gcd(group, batch * steps)
    return (
        f"a rollout of {size} completions (per_device_train_batch_size {batch} x steps_per_generation {steps} x "
        f"processes {processes}) is not whole groups of num_generations: {group}; use "
        f"per_device_train_batch_size: {max(whole, batch // whole * whole)}, or a multiple of {launched} processes "
        f"(accelerate launch --num_processes {launched})"
    )
