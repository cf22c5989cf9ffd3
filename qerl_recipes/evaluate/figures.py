"""Compute what ``evaluation.json`` says of one policy on one task: accuracy, interval, share that ended, judgements.

An answer ends by itself at an end-of-sequence token or a stop string; others are cut at the length limit. Accuracy
judges a cut answer by the text so far, so a policy that never ends may still look good.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qerl_recipes.evaluate.intervals import mean, several, summary

if TYPE_CHECKING:
    from qerl_recipes.evaluate.answers import Judged
    from qerl_recipes.evaluate.episodes import Played

MOST_CUT = 0.1  # a larger share of cut answers is reported beside the accuracy


def summarize(judged: "Sequence[Judged]", num_samples: int) -> dict[str, Any]:
    """Return the figures of one policy on one task, as ``run.evaluate`` describes them."""
    figures = _shares(judged, num_samples)
    if num_samples > 1:
        figures |= several([problem.right for problem in judged], [problem.vote for problem in judged])
    return figures


def of_episodes(played: "Sequence[Played]", num_samples: int) -> dict[str, Any]:
    """Return the figures of one policy on a task of episodes, as ``run.evaluate`` describes them."""
    figures = _shares(played, num_samples)
    if num_samples > 1:
        right = [problem.right for problem in played]
        figures["pass_at"] = several(right, [False] * len(right))["pass_at"]  # episodes have no answer to vote for
    known = [[reward for reward in problem.rewards if reward is not None] for problem in played]
    if any(known):
        figures["reward"] = mean([sum(rewards) / len(rewards) for rewards in known if rewards])
    episodes = len(played) * num_samples
    figures["unscored"] = episodes - sum(map(len, known))
    figures["turns"] = sum(len(turns) for problem in played for turns in problem.turns) / episodes
    for name in ("calls", "failures"):
        figures[name] = sum(sum(getattr(problem, name)) for problem in played) / episodes
    return figures


def _shares(judged: "Sequence[Judged] | Sequence[Played]", num_samples: int) -> dict[str, Any]:
    ended = [[not cut for cut in problem.cut] for problem in judged]
    figures = summary([problem.share for problem in judged], num_samples)
    share = sum(map(sum, ended)) / (len(judged) * num_samples)
    rooms = [problem.room for problem in judged if any(problem.cut)]
    figures |= {"ended": share, "cut": 1 - share, "room_of_cut": [min(rooms), max(rooms)] if rooms else []}
    figures["by_problem"] = {"right": packed([problem.right for problem in judged]), "ended": packed(ended)}
    return figures


def packed(judged: Sequence[Sequence[bool]]) -> str:
    """Return one bit for each answer, problem by problem, as hexadecimal digits; zeros fill up the last byte."""
    return np.packbits(np.asarray(judged, dtype=bool)).tobytes().hex()


def unpacked(digits: str, problems: int, num_samples: int) -> np.ndarray:
    """Return ``packed`` judgements: bool (problems, num_samples); raise ValueError for another number of them."""
    data, count = np.frombuffer(bytes.fromhex(digits), dtype=np.uint8), problems * num_samples
    bits = np.unpackbits(data).astype(bool)
    if len(data) != -(-count // 8) or bits[count:].any():
        raise ValueError(f"{len(digits)} hex digits are not {num_samples} answers to each of {problems} problems")
    return bits[:count].reshape(problems, num_samples)


def too_many_cut(evaluation: Mapping[str, Any]) -> list[str]:
    """Return a line for each task of evaluation.json with over a tenth of answers cut, and the limit to raise."""
    lines = []
    for task, policies in evaluation.get("tasks", {}).items():
        cut = {label: 1 - of["ended"] for label, of in policies.items()}
        if not any(part > MOST_CUT for part in cut.values()):
            continue
        longest, length = (evaluation.get("max_new_tokens") or {}).get(task), evaluation.get("max_model_length")
        rooms = [room for of in policies.values() for room in of.get("room_of_cut", [length]) if room is not None]
        limits = {} if longest is None or (rooms and max(rooms) <= longest) else {"max_new_tokens": longest}
        if not limits or (rooms and min(rooms) < longest):  # long prompts leave less than max_new_tokens
            limits["max_model_length"] = length
        cut_at = " or ".join(name + (f"={limit}" if limit else "") for name, limit in limits.items())
        shares = " and ".join(f"{part:.0%} ({label})" for label, part in cut.items())
        lines.append(
            f"{task}: {shares} of the answers were cut at {cut_at}; accuracy counts what they had "
            f"written; raise {' and '.join(limits)}, or give the share that ended beside the accuracy"
        )
    return lines


def unscored(evaluation: Mapping[str, Any]) -> list[str]:
    """Return one line for each task with episodes that no reward has judged, as if their environment has died."""
    lines = []
    for task, policies in evaluation.get("tasks", {}).items():
        if counts := {label: of["unscored"] for label, of in policies.items() if of.get("unscored")}:
            numbers = " and ".join(f"{count} ({label})" for label, count in counts.items())
            lines.append(f"{task}: {numbers} episodes have no reward; they are no success, and not in the mean reward")
    return lines


def noisy(evaluation: Mapping[str, Any]) -> str:
    """Return what to add to how answers were sampled: the noise on the norms, "" without any."""
    sigma = evaluation.get("noise_sigma")
    return f", noise sigma {sigma:g}" if sigma else ""


def episode_rows(policies: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return (name, one text a policy) for the figures of a task's episodes; none for another task."""
    figures = list(policies.values())
    if not all("unscored" in of for of in figures):
        return []
    rows = [("mean reward", [_mean(of.get("reward")) for of in figures])]
    names = {"turns": "turns an episode", "calls": "calls of tools", "failures": "failed calls"}
    return rows + [(name, [f"{of[key]:.2f}" for of in figures]) for key, name in names.items()]


def _mean(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "none"
    return f"{figure['value']:.3f}" + ("  [{:.3f}, {:.3f}]".format(*figure["ci95"]) if figure["ci95"] else "")
