"""The largest or the smallest of four different numbers below 100, asked in words: ``dataset_name: pick_number``.

    What is the smallest of these numbers: 12, 27, 55, 5?   ->   5

A small instruct model, decoded greedily, answers in one short sentence and is right a little more often than by chance
(a quarter). There are 2 x 100 x 99 x 98 x 97 = 188 million problems of one form: holding 1000 out leaves those to train
on as they were. (Of sums of two numbers of one digit there are 200; held out, they leave hardly any to begin with.)
"""

import random
from collections.abc import Collection

from datasets import Dataset

NUMBERS, LIMIT = 4, 100  # how many to choose from; below this
HELD_OUT, HELD_OUT_SEED = 1000, 999
SIZE = 4096
_QUESTIONS = {"largest": max, "smallest": min}


def draw(rng: random.Random) -> tuple[str, str]:
    """One random problem as (prompt, answer); each call moves ``rng`` on."""
    which = rng.choice(list(_QUESTIONS))
    numbers = rng.sample(range(LIMIT), NUMBERS)
    prompt = f"What is the {which} of these numbers: {', '.join(map(str, numbers))}?"
    return prompt, str(_QUESTIONS[which](numbers))


def problems(count: int, seed: int, exclude: Collection[str] = ()) -> Dataset:
    """``count`` different problems, columns ``prompt`` and ``answer``, none with a prompt of ``exclude``; always the
    same for the same seed."""
    rng, excluded, found = random.Random(seed), set(exclude), dict[str, str]()
    while len(found) < count:
        prompt, answer = draw(rng)
        if prompt not in excluded:
            found[prompt] = answer
    return Dataset.from_dict({"prompt": list(found), "answer": list(found.values())})


def held_out() -> Dataset:
    """The 1000 problems that evaluation alone uses, whatever the seed of a run."""
    return problems(HELD_OUT, HELD_OUT_SEED)


def training_set(count: int, seed: int) -> Dataset:
    """``count`` problems for reinforcement learning; never a held-out one."""
    return problems(count, 7000 + seed, exclude=held_out()["prompt"])
