"""What the steps of a run come to."""

import statistics
from collections.abc import Mapping, Sequence

ENDS = 5  # steps averaged at the start and at the end of a run
LATE = 10  # scored steps averaged for what the reward has come to


def summaries(steps: Sequence[Mapping[str, float]], target: float | None) -> dict[str, float]:
    """What the steps of a run come to.

    ``reward_area``: the mean reward over its steps, which is its level. ``reward_gain``: the mean of its last ten
    rewards less that of its first five, which is its growth. ``clipped_end``: the share of completions that were cut at
    their greatest length in the last five rollouts. ``entropy_start`` and ``entropy_end``: mean of its first and of its
    last steps, of the completions that were computed; ``sampled_entropy_start`` and ``..._end`` the same of all, noise
    of the rollout included, estimated by what was sampled: which completions are computed depends on the rewards, so
    that arms can be compared by these alone. ``mismatch`` and ``without_signal``: means over the steps of
    ``logp_mismatch_mean`` and of ``equal_groups``, the share of groups without signal. ``seconds_a_step`` and
    ``tokens_per_s`` (of the rollouts): their medians. ``steps_to_target`` and ``seconds_to_target``: until the mean
    reward of the last five steps reaches ``target``; absent where it never does.
    """
    scored = [step for step in steps if step.get("reward") is not None]  # a rollout for several steps is scored once
    rewards = [step["reward"] for step in scored]
    found = {"reward_area": sum(rewards) / len(rewards)} if rewards else {}
    if len(rewards) >= ENDS + LATE:
        found["reward_gain"] = statistics.fmean(rewards[-LATE:]) - statistics.fmean(rewards[:ENDS])

    def of(metric: str, part: slice = slice(None)) -> list[float]:
        return [step[metric] for step in steps[part] if step.get(metric) is not None]

    means = {
        "entropy_start": of("entropy", slice(ENDS)),
        "entropy_end": of("entropy", slice(-ENDS, None)),
        "sampled_entropy_start": of("sampled_entropy", slice(ENDS)),
        "sampled_entropy_end": of("sampled_entropy", slice(-ENDS, None)),
        "clipped_end": [s["completion_clipped"] for s in scored[-ENDS:] if s.get("completion_clipped") is not None],
        "mismatch": of("logp_mismatch_mean"),
        "without_signal": of("equal_groups"),
    }
    found |= {name: sum(values) / len(values) for name, values in means.items() if values}
    if seconds := of("step_seconds"):
        found["seconds_a_step"] = statistics.median(seconds)
    if speeds := of("rollout_tokens_per_s"):
        found["tokens_per_s"] = statistics.median(speeds)
    if target is not None:
        for i, step in enumerate(scored):
            window = rewards[max(0, i + 1 - ENDS) : i + 1]
            if len(window) == ENDS and sum(window) / ENDS >= target:
                until = sum(s.get("step_seconds") or 0.0 for s in steps if s["step"] <= step["step"])
                found |= {"steps_to_target": float(step["step"]), "seconds_to_target": until}
                break
    return found
