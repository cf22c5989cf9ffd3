"""Draw problems from a seed; the data sets ``running_sum`` and ``pick_number`` are made in this way.

A problem of ``pick_number`` asks for the largest or smallest of four different numbers below 100:

    What is the smallest of these numbers: 12, 27, 55, 5?   ->   5

There are 188 million of them, so that holding 1000 out hardly reduces those to train on.
"""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from datasets import Dataset

SIZE = 4096  # training problems, unless a recipe sets dataset_size
HELD_OUT_SEED, TRAINING_SEED = 999, 7000  # the latter is added to dataset_seed
NUMBERS, LIMIT = 4, 100  # how many numbers pick_number names, all of them below LIMIT
_CHOICES = {"largest": max, "smallest": min}
Problem = dict[str, str]  # its prompt and its answer


@dataclass(frozen=True)
class Generator:
    """Draw different problems by ``draw``, the same for the same seed; ``held_out_count`` of them are held out."""

    name: str
    draw: Callable[[random.Random], Problem]
    held_out_count: int

    def problems(self, count: int, seed: int, exclude: Collection[str] = ()) -> list[Problem]:
        """Return ``count`` problems with different prompts, none of them in ``exclude``."""
        rng, used, drawn = random.Random(seed), set(exclude), list[Problem]()
        while len(drawn) < count:
            problem = self.draw(rng)
            if problem["prompt"] not in used:
                used.add(problem["prompt"])
                drawn.append(problem)
        return drawn

    def held_out(self, count: int | None = None) -> list[Problem]:
        """Return the first ``count`` (None: all) of the problems that only evaluation uses, whatever a run's seed."""
        return self.problems(self.held_out_count, HELD_OUT_SEED)[:count]

    def training_set(self, count: int, seed: int) -> Dataset:
        """Return ``count`` problems to train on, with the columns ``prompt`` and ``answer``; none is held out."""
        exclude = {problem["prompt"] for problem in self.held_out()}
        return Dataset.from_list(self.problems(count, TRAINING_SEED + seed, exclude))


def _draw(rng: random.Random) -> Problem:
    choice = rng.choice(list(_CHOICES))
    numbers = rng.sample(range(LIMIT), NUMBERS)
    prompt = f"What is the {choice} of these numbers: {', '.join(map(str, numbers))}?"
    return {"prompt": prompt, "answer": str(_CHOICES[choice](numbers))}


PICK_NUMBER = Generator("pick_number", _draw, held_out_count=1000)
