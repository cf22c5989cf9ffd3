"""Sample from the current policy with a running vLLM server: the rollout engine of ``vllm_mode: server``.

It is a ``RolloutEngine`` (``rollout.interface``). The first trainer process pushes adapter, trained norms and noise
once a rollout, and each process requests its own completions. If the server is lost or restarted, the run waits and
pushes the same policy again. Then it requests the same completions again: each has its own seed.
"""

import contextlib
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list

from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.recipe.generation import sampling_parameters
from qerl_recipes.rollout.interface import Completions, Snapshot
from qerl_recipes.rollout.sampling import Seeds
from qerl_recipes.rollout.server_answers import Answer, Question, Questions
from qerl_recipes.rollout.server_link import ServerLink
from qerl_recipes.rollout.server_state import NO_NOISE, AnotherPolicyError, Noise, Pushed

MOST_RESTARTS = 3  # while it computes one batch; more are taken for a fault of the server
WATCH = 5.0  # seconds between two checks of a server that is generating


class ServerRollouts:
    """Use a server that holds the frozen weights of the recipe's model and the policy's adapter.

    ``rollout.interface.StartEngine`` describes the arguments. The server must be up within ``vllm_server_timeout``
    seconds.
    """

    def __init__(
        self,
        base: str,
        training: GRPOConfig,
        *,
        rank: int,
        dtype: torch.dtype,
        snapshot: Callable[[], Snapshot],
        accelerator: Accelerator | PartialState,
    ) -> None:
        """Raise ServerLostError if there is no server, and ServerRefusedError if it does not fit the recipe."""
        self._training, self._snapshot, self._accelerator = training, snapshot, accelerator
        self.tokens, self.seconds, self.version = 0, 0.0, 0
        self._seeds = Seeds(training.seed)
        self._noise = NO_NOISE
        self._pushed: Pushed | None = None
        engine_dtype, processes = str(dtype).removeprefix("torch."), accelerator.num_processes
        link = self._link = ServerLink(base, training, rank=rank, dtype=engine_dtype, processes=processes)
        parameters = sampling_parameters(training)
        self._longest = min(training.vllm_max_model_length or self._link.tokens, self._link.tokens)
        self._questions = Questions(link.url, link.api_key, parameters, link.timeout, link.login)

    def begin(self, rollout: int, sigma: float | None) -> int:
        """Open a rollout: push the current adapter and its noise (None: none), and return the number of noisy norms."""
        training = self._training
        self._seeds.open("train", rollout)
        self.tokens, self.seconds = 0, 0.0
        assert training.noise_seed is not None  # GRPOConfig sets it
        noise = Noise(sigma or 0.0, training.noise_seed, rollout, tuple(training.noise_targets))
        return self._push(noise if sigma else NO_NOISE).noisy_norms

    def begin_evaluation(self) -> None:
        """Open an evaluation: push the current adapter without noise, and use the same seeds every time."""
        self._seeds.open("evaluation", 0)
        self._push(NO_NOISE)

    def sync_weights(self) -> None:
        """Push the trainer's current adapter (and trained norms); the noise stays."""
        self._push(self._noise)

    def generate(
        self,
        prompts: list[list[int]],
        images: Any,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> Completions:
        """Return one completion for each of ``prompts``.

        The log-probabilities are taken after temperature and all other processing of the logits. Raises
        AnotherPolicyError if a completion is not from the policy that was pushed last, and ServerRefusedError if the
        server refuses a prompt. Raises ServerLostError if the server stays silent, and ValueError for images or a
        prompt that leaves no room for a completion.
        """
        if images is not None:
            raise ValueError("this policy reads text only; remove the image columns from the data set")
        first = self._accelerator.process_index * len(prompts)
        seeds = self._seeds.draw(first, len(prompts), num_generations)
        questions = {i: self._question(ids, seed) for i, (ids, seed) in enumerate(zip(prompts, seeds, strict=True))}
        began = time.perf_counter()
        with profiler or contextlib.nullcontext():
            answers = self._answers(questions)
        self.seconds += time.perf_counter() - began
        ids = [answers[i].ids for i in questions]
        self.tokens += sum(map(len, ids))
        return prompts, ids, [[[value] for value in answers[i].logprobs] for i in questions], None

    def close(self) -> None:
        """Do nothing: the server keeps running, with the policy that was pushed last."""

    def _push(self, noise: Noise) -> Pushed:
        """Push from the first process; all processes return the same result or raise the same error."""
        self.version += 1
        self._noise = noise
        outcome: list[Any] = [None]
        if self._accelerator.process_index == 0:
            try:
                outcome = [self._link.push(self._snapshot(), noise)]
            except (ValueError, OSError) as error:
                if self._accelerator.num_processes == 1:
                    raise
                outcome = [error]
        broadcast_object_list(outcome)
        (result,) = outcome
        if isinstance(result, Exception):
            raise result
        self._pushed = result
        return result

    def _question(self, prompt: list[int], seed: int) -> Question:
        room = self._longest - len(prompt)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room for an answer in the {self._longest} that the server "
                "holds; use max_prompt_length, or raise vllm_max_model_length and the server's --max-model-len"
            )
        wanted = self._training.max_completion_length
        return Question(prompt, seed, room if wanted is None else min(wanted, room))

    def _answers(self, questions: dict[int, Question]) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        restarts, failing_since = 0, None
        while True:
            assert self._pushed is not None  # begin has set it
            watch = functools.partial(self._link.watch, self._pushed, min(WATCH, self._link.timeout / 4))
            pending = {i: question for i, question in questions.items() if i not in answers}
            before = len(answers)
            failure = self._questions.ask(pending, answers, self._pushed.version, watch)
            settled = self._link.settle(self._pushed, self._snapshot())
            if settled.instance != self._pushed.instance:
                restarts += 1
                if restarts > MOST_RESTARTS:
                    raise self._link.lost(f"was restarted {restarts} times while it computed one rollout")
                self._pushed, failing_since = settled, None
                answers.clear()  # completions of the restarted server may lack the noise
                continue
            if isinstance(failure, AnotherPolicyError):
                raise failure
            if len(answers) == len(questions):
                return answers
            # the server is up, and yet completions are missing: a connection broke, or it cannot compute them
            if len(answers) > before or failing_since is None:
                failing_since = time.monotonic()
            elif time.monotonic() - failing_since > self._link.timeout:
                raise self._link.lost(f"is up and does not answer ({failure})") from failure
