"""Give every rollout engine the same seeds, in the trainer's process or on a server."""

from qerl_vllm_plugin.noise import seed_of


def completion_seed(run_seed: int, phase: str, rollout: int, call: int, prompt: int, sample: int) -> int:
    """Return the seed of one completion: different for each, and the same in a resumed run.

    ``phase`` is ``train``, ``evaluation`` or ``calibration``. ``call`` counts the batches of this rollout, since
    dynamic sampling draws several. ``prompt`` is the prompt's index in its batch over all ranks, and ``sample`` is the
    completion's index among those of its prompt.
    """
    return seed_of(run_seed, phase, rollout, call, prompt, sample)


class Seeds:
    """Draw the seeds of the rollout or evaluation that is open."""

    def __init__(self, run_seed: int) -> None:
        self._run_seed = run_seed
        self.open("train", 0)

    def open(self, phase: str, rollout: int) -> None:
        """Start the seeds of this rollout anew. An evaluation is always rollout 0."""
        self._phase, self._rollout, self._call = phase, rollout, 0

    def draw(self, first: int, count: int, num_generations: int) -> list[int]:
        """Return this process's seeds of the next batch: its ``count`` completions start at index ``first``."""
        key = (self._run_seed, self._phase, self._rollout, self._call)
        self._call += 1
        places = range(first, first + count)
        return [completion_seed(*key, place // num_generations, place % num_generations) for place in places]
