"""Whether each answer is what the policy it names computes: its tokens are given to a reference engine under that
policy, and every log-probability must come back."""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event, Lock

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
    name, ``told_apart`` were found wrong. ``wrong`` says why, by the number of the answer; ``waiting`` are not yet
    judged."""

    one: int = 0
    several: int = 0
    left_out: int = 0
    worst: float = 0.0
    wrong: dict[int, str] = field(default_factory=dict)
    controls: int = 0
    told_apart: int = 0
    waiting: int = 0


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


class _Docket:
    """The answers, the policies that each is replayed under, and what has been found; an answer is judged, and what was
    replayed for it forgotten, as soon as its last policy is there."""

    def __init__(self, answers: Sequence[Answer], changes: Sequence[Change], tolerance: float) -> None:
        self.answers, self.tolerance, self.verdict = answers, tolerance, Verdict()
        self.places: dict[int, list[int]] = {}  # answer -> the changes that it names
        self.controls: dict[int, int] = {}  # answer -> a change that it does not name
        self.values: dict[int, dict[int, list[float]]] = {}  # answer -> change -> log-probabilities
        wanted: dict[int, list[int]] = defaultdict(list)
        places_of = functools.cache(lambda policy: named(policy, changes))  # many answers name the same
        for i, answer in enumerate(answers):
            if not answer.tokens:
                continue
            found = places_of(answer.policy)
            if not found:
                self.verdict.wrong[i] = f"answer {i} names policy {answer.policy}, which was never served"
            elif "-" in answer.policy and len(found) > MOST_POLICIES:
                self.verdict.left_out += 1
            else:
                self.places[i], self.values[i] = found, {}
                if i % CONTROL_EVERY == 0 and found[0] > 0:
                    self.controls[i] = found[0] - 1
                for place in self._all_of(i):
                    wanted[place].append(i)
        self.work = dict(wanted)  # change -> answers that are replayed under it
        self.verdict.waiting = len(self.values)

    def _all_of(self, i: int) -> list[int]:
        return [*self.places[i], *([self.controls[i]] if i in self.controls else [])]

    def enter(self, place: int, replayed: Sequence[list[float]]) -> None:
        """What the answers of a change have under it."""
        for i, logprobs in zip(self.work[place], replayed, strict=True):
            self.values[i][place] = logprobs
            if len(self.values[i]) == len(self._all_of(i)):
                self._judge(i, self.values.pop(i))

    def _judge(self, i: int, values: Mapping[int, list[float]]) -> None:
        answer, found, verdict = self.answers[i], self.places[i], self.verdict
        verdict.waiting -= 1
        if "-" in answer.policy:
            verdict.several += 1
            off = difference(answer, [values[place] for place in found], self.tolerance)
        else:  # a version may have been served with and without noise, and this is one of the two from end to end
            verdict.one += 1
            off = min(difference(answer, [values[place]], self.tolerance) for place in found)
            verdict.worst = max(verdict.worst, off if off <= self.tolerance else 0.0)
        if not off <= self.tolerance:
            verdict.wrong[i] = f"answer {i} of policy {answer.policy}: a log-probability is {off:.3g} off"
        if i in self.controls:
            verdict.controls += 1
            verdict.told_apart += difference(answer, [values[self.controls[i]]], self.tolerance) > self.tolerance


def judge(
    answers: Sequence[Answer],
    changes: Sequence[Change],
    replays: Sequence[Replay],
    tolerance: float,
    told: Callable[[Verdict], None] = lambda verdict: None,
) -> Verdict:
    """Every answer with tokens against every policy that it names; the policies are shared out among ``replays``.

    ``told`` gets what is known so far, after each policy. What one of ``replays`` raises ends the others, too.
    """
    docket, turn, ended = _Docket(answers, changes, tolerance), Lock(), Event()

    def work(replay: Replay, places: Sequence[int]) -> None:
        for place in places:
            if ended.is_set():
                return
            try:
                replayed = replay(changes[place], [answers[i] for i in docket.work[place]])
            except BaseException:
                ended.set()
                raise
            with turn:
                docket.enter(place, replayed)
                told(docket.verdict)

    sizes = {place: sum(len(answers[i].tokens) for i in members) for place, members in docket.work.items()}
    with ThreadPoolExecutor(len(replays)) as pool:
        for done in [pool.submit(work, *share) for share in zip(replays, portions(sizes, len(replays)), strict=True)]:
            done.result()
    return docket.verdict
