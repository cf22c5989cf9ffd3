"""Whether each answer is what the policy it names computes: its tokens are given to a reference engine under that
policy, and every log-probability must come back."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from qerl_recipes.bench.soak_load import Change
from qerl_recipes.bench.soak_streams import Answer

MOST_POLICIES = 4  # of an answer that names FIRST-LAST: of more, almost anything could be a mixture
CONTROL_EVERY = 10  # answers are judged under a policy that they do not name, too

# replay(change, answers) -> log-probabilities of the tokens of each answer under that policy
Replay = Callable[[Change, Sequence[Answer]], list[list[float]]]


@dataclass
class Verdict:
    """``one`` answers were judged under the one policy that they name, ``several`` as a sequence of policies that
    changes at some tokens; ``left_out`` name more than ``MOST_POLICIES``. ``worst`` is the largest difference of a
    log-probability of those right under one policy. Of ``controls`` answers judged under a policy that they do not
    name, ``told_apart`` were found wrong."""

    one: int = 0
    several: int = 0
    left_out: int = 0
    worst: float = 0.0
    wrong: list[str] = field(default_factory=list)
    controls: int = 0
    told_apart: int = 0


def named(policy: str, changes: Sequence[Change]) -> list[int]:
    """The numbers of the changes that an answer may have been computed under, in their order; empty if it names a
    version that was never served."""
    ends = policy.split("-")
    first = [i for i, change in enumerate(changes) if str(change.version) == ends[0]]
    last = [i for i, change in enumerate(changes) if str(change.version) == ends[-1]]
    return list(range(first[0], last[-1] + 1)) if first and last else []


def difference(answer: Answer, replayed: Sequence[Sequence[float]], tolerance: float) -> float:
    """The largest difference of ``answer`` to policies that follow one another: as few of its tokens as can be are
    computed by the later ones, and none by an earlier one again. Above ``tolerance`` there is no such sequence."""
    place, worst = 0, 0.0
    for i, logprob in enumerate(answer.logprobs):
        off = abs(logprob - replayed[place][i])
        while not off <= tolerance and place + 1 < len(replayed):
            place += 1
            off = abs(logprob - replayed[place][i])
        if not off <= tolerance:
            return off
        worst = max(worst, off)
    return worst


def portions(sizes: Mapping[int, int], count: int) -> list[list[int]]:
    """The keys in their order, cut into ``count`` runs of about equal sizes; some may be empty."""
    total, before = sum(sizes.values()), 0
    found: list[list[int]] = [[] for _ in range(count)]
    for key in sorted(sizes):
        found[min(count * before // max(total, 1), count - 1)].append(key)
        before += sizes[key]
    return found


def judge(answers: Sequence[Answer], changes: Sequence[Change], replays: Sequence[Replay], tolerance: float) -> Verdict:
    """Every answer with tokens against every policy that it names; the policies are shared out among ``replays``."""
    verdict = Verdict()
    places: dict[int, list[int]] = {}
    wanted: dict[int, set[int]] = defaultdict(set)  # change -> answers that are replayed under it
    controls: dict[int, int] = {}
    for i, answer in enumerate(answers):
        if not answer.tokens:
            continue
        found = named(answer.policy, changes)
        if not found:
            verdict.wrong.append(f"answer {i} names policy {answer.policy}, which was never served")
        elif "-" in answer.policy and len(found) > MOST_POLICIES:
            verdict.left_out += 1
        else:
            places[i] = found
            if i % CONTROL_EVERY == 0 and found[0] > 0:
                controls[i] = found[0] - 1
            for place in [*found, *([controls[i]] if i in controls else [])]:
                wanted[place].add(i)
    work = {place: sorted(members) for place, members in wanted.items()}

    def replayed(replay: Replay, places: Sequence[int]) -> dict[tuple[int, int], list[float]]:
        found: dict[tuple[int, int], list[float]] = {}
        for place in places:
            logprobs = replay(changes[place], [answers[i] for i in work[place]])
            found |= {(place, i): of_one for i, of_one in zip(work[place], logprobs, strict=True)}
        return found

    parts = portions({place: sum(len(answers[i].tokens) for i in work[place]) for place in work}, len(replays))
    values: dict[tuple[int, int], list[float]] = {}
    with ThreadPoolExecutor(len(replays)) as pool:
        for part in pool.map(replayed, replays, parts):
            values |= part
    for i, found in places.items():
        answer = answers[i]
        if "-" in answer.policy:
            verdict.several += 1
            off = difference(answer, [values[place, i] for place in found], tolerance)
        else:  # a version may have been served with and without noise, and this is one of the two from end to end
            verdict.one += 1
            off = min(difference(answer, [values[place, i]], tolerance) for place in found)
            verdict.worst = max(verdict.worst, off if off <= tolerance else 0.0)
        if not off <= tolerance:
            verdict.wrong.append(f"answer {i} of policy {answer.policy}: a log-probability is {off:.3g} off")
        if i in controls:
            verdict.controls += 1
            verdict.told_apart += difference(answer, [values[controls[i], i]], tolerance) > tolerance
    return verdict
