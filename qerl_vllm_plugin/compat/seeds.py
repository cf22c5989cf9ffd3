"""Let seeded requests on a CPU survive a prompt that is computed in parts, for vLLM 0.26 to 0.32."""

import functools
from typing import Any

from vllm.platforms import current_platform

from qerl_vllm_plugin.compat import engine


def draw_with_whole_prompts_alone() -> None:
    """Draw no random number for a seeded request whose prompt is incomplete after a step.

    Call it while a model is being built; it does nothing except on a CPU. It wraps one method of this engine's model
    runner. vLLM draws a token for such a request, too, throws it away and sets the request's generator back. A CPU
    generator cannot be set back, so the engine would end.
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
