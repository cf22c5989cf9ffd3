"""Seeded requests on a CPU, for vLLM 0.26 to 0.32: the random numbers of a prompt that is computed in parts."""

import functools
from typing import Any

from vllm.platforms import current_platform

from qerl_vllm_plugin.compat import engine


def draw_with_whole_prompts_alone() -> None:
    """To be called while a model is being built on a CPU: a seeded request whose prompt is not complete after a step
    draws nothing in it.

    vLLM draws a token for such a request too, throws it away and sets the request's generator back. No generator of a
    CPU can be set back, so that the engine would end. Of this engine's model runner one method is wrapped.
    """
    if not current_platform.is_cpu():
        return
    runner = engine.runner_above()
    if "sample_tokens" in vars(runner):  # wrapped already: a drafter is built beside the model
        return
    sample_tokens = runner.sample_tokens

    @functools.wraps(sample_tokens)
    def sample_without_cut_prompts(*args: Any, **keywords: Any) -> Any:
        batch = runner.input_batch
        cut = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        kept = {row: batch.generators.pop(row) for row in cut if row in batch.generators}
        try:
            return sample_tokens(*args, **keywords)
        finally:
            batch.generators.update(kept)

    runner.sample_tokens = sample_without_cut_prompts
