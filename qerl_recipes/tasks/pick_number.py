"""Generate the problems of ``dataset_name: pick_number``: name the largest or smallest of four numbers.

The numbers are different and below 100; the question is in words.

    What is the smallest of these numbers: 12, 27, 55, 5?   ->   5

A small instruct model, decoded greedily, answers in one short sentence. It is right a little more often than by chance
(a quarter).

There are 2 x 100 x 99 x 98 x 97 = 188 million problems, all of one form. Holding out 1000 of them hardly reduces the
problems to train on. By contrast, there are only 200 sums of two one-digit numbers; holding them out would leave hardly
any.
"""

import random
from collections.abc import Collection

from datasets import Dataset

NUMBERS, LIMIT = 4, 100  # how many numbers a problem names, all of them below LIMIT
HELD_OUT, HELD_OUT_SEED = 1000, 999
SIZE = 4096
_QUESTIONS = {"largest": max, "smallest": min}


def draw(rng: random.Random) -> tuple[str, str]:
    """Draw one random problem as (prompt, answer); each call advances ``rng``."""
    which = rng.choice(list(_QUESTIONS))
    numbers = rng.sample(range(LIMIT), NUMBERS)
    prompt = f"What is the {which} of these numbers: {', '.join(map(str, numbers))}?"
    return prompt, str(_QUESTIONS[which](numbers))


def problems(count: int, seed: int, exclude: Collection[str] = ()) -> Dataset:
    """Return ``count`` different problems with the columns ``prompt`` and ``answer``.

    None has a prompt of ``exclude``. The same seed always gives the same problems.
    """
    rng, excluded, answers = random.Random(seed), set(exclude), dict[str, str]()
    while len(answers) < count:
        prompt, answer = draw(rng)
        if prompt not in excluded:
            answers[prompt] = answer
    return Dataset.from_dict({"prompt": list(answers), "answer": list(answers.values())})


def held_out() -> Dataset:
    """Return the 1000 problems that only evaluation uses, whatever the seed of a run."""
    return problems(HELD_OUT, HELD_OUT_SEED)


def training_set(count: int, seed: int) -> Dataset:
    """Return ``count`` problems for reinforcement learning; none is held out."""
    return problems(count, 7000 + seed, exclude=held_out()["prompt"])
