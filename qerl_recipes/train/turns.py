"""Let TRL's trainer take several turns on the rollout engine: with tools, environments, or a rollout function.

TRL resets environments, tokenizes and scores. The turns are those of ``rollout.episodes``.
"""

import functools
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context

from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.rollout.calls import in_one_type
from qerl_recipes.rollout.episodes import Episode, Player, for_trl
from qerl_recipes.rollout.interface import RolloutEngine, TakesTurns
from qerl_recipes.tasks.environment_process import take_losses
from qerl_recipes.tasks.environments import Starts
from qerl_recipes.train import loss, metrics

RolloutFunc = Callable[[list[Any], GRPOTrainer], dict[str, Any]]


class TurnsTrainer(GRPOTrainer):
    """Take all turns of a batch in one go of the engine, and measure the episodes."""

    args: GRPOConfig
    vllm_generation: RolloutEngine  # type: ignore[assignment]  # TRL's name for its own engine
    starts: Starts  # gives the environments of a group the same seed, and is opened anew for each rollout
    _episodes: Sequence[Episode] = ()  # of the last batch
    _tool_masks: Sequence[Sequence[int]] | None = None  # of the same: 1 where the policy sampled the token
    _has_told_room = False
    _tool_seconds = 0.0  # of this process in tools, since the trainer last set it to 0

    @property
    def rollout_func(self) -> RolloutFunc | None:
        """Return what TRL calls in place of its own turns; None if the user has given no function."""
        return None if self._rollout_func is None else self._custom_rollout

    @rollout_func.setter
    def rollout_func(self, function: RolloutFunc | None) -> None:
        self._rollout_func = function

    def _custom_rollout(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        assert self._rollout_func is not None
        output = self._rollout_func(prompts, trainer)
        if not self.tools:
            self._turns.close()
        return output

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.environment_factories is not None:
            resets = {name: pool[0].reset for name, pool in self._environment_pool.items()}
            first = self.accelerator.process_index * len(inputs)
            group = self.num_generations if self.model.training else self.num_generations_eval
            inputs = self.starts.seeded(inputs, resets, first, group)
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        losses = [take_losses(environment) for environment in self.environments or ()]
        if losses and None not in losses:
            lost = self.accelerator.gather(torch.tensor(losses, device=self.accelerator.device))
            self._metrics["train" if self.model.training else "eval"][metrics.LOST].append(lost.float().mean().item())
        return scored

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        ids, *others = super()._tokenize_prompts(prompts)
        if self.environments:
            self._check_room(max(map(len, ids)))
        return ids, *others

    def _check_room(self, longest: int) -> None:
        """Raise ValueError if a prompt of ``longest`` tokens leaves no room; warn once if it leaves too little."""
        engine = self.vllm_generation
        assert isinstance(engine, TakesTurns)
        room = engine.longest - longest
        if room >= self.max_completion_length or (room >= 1 and self._has_told_room):
            return
        what = f"completions are cut off before max_completion_length ({self.max_completion_length})"
        text = (
            f"with the text that reset of the environment adds, a prompt has {longest} tokens of the {engine.longest} "
            f"of a sequence: {what if room >= 1 else 'there is no room for an answer'}; let reset add less, or raise "
            "vllm_max_model_length, and --max-model-len of a server"
        )
        if room < 1:
            raise ValueError(text)
        self._has_told_room = True
        warnings.warn(text, stacklevel=2)

    @functools.cached_property
    def _player(self) -> Player:
        engine = self.vllm_generation
        assert isinstance(engine, TakesTurns)  # check_turns has refused others
        return Player(
            engine,
            self._tokenizer,
            {**self.chat_template_kwargs, "chat_template": self.chat_template},
            most_tokens=self.max_completion_length,
            most_turns=self.max_tool_calling_iterations,
            tool_tokens=self.args.max_tool_tokens,
            tool_seconds=self.args.max_tool_seconds,
            loop=getattr(self, "async_loop", None),  # TRL starts one for async tools and rewards
        )

    def _generate(self, prompts: list[Any]) -> Any:
        # the player is made first: it lets the tokenizer read any text, of the first turn too
        engine = self._player.engine if self.tools else self.vllm_generation
        # closed where the turns end, before TRL gathers: other processes of this engine may have turns left
        with ExitStack() as self._turns:
            self._turns.callback(self._end_turns)
            if (self.tools or self.rollout_func is not None) and isinstance(engine, TakesTurns):
                self._turns.enter_context(engine.episodes())
            generated = super()._generate(prompts)
        self._tool_masks = generated[2]
        return generated

    def _end_turns(self) -> None:
        """Do what the trainer has to do between the last turn and the score."""

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, **options: Any
    ) -> Any:
        """Return ids and log-probabilities of the first turns; with tools, the turns after them have been taken too."""
        if not self.tools:
            answers = super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, **options)
            self._turns.close()
            return answers
        self._play(prompt_ids, num_generations)
        firsts = [(one.ids[: one.turns[0]], one.logprobs[: one.turns[0]]) for one in self._episodes]
        return tuple(map(list, zip(*firsts, strict=True)))

    def _play(self, prompt_ids: Any, num_generations: int = 1, firsts: Sequence[tuple[Any, ...]] = ()) -> None:
        """Play an episode of each prompt, from its first turn (``Episode.take``) on where ``firsts`` gives those."""
        tools = map(dict.__or__, self._sync_tool_dicts, self._async_tool_dicts)
        self._episodes = [Episode(ids, own) for ids, own in zip(prompt_ids, tools, strict=True)]
        for episode, first in zip(self._episodes, firsts, strict=bool(firsts)):
            episode.take(*first)
        profiler = profiling_context(self, "vLLM.generate")
        self._tool_seconds += self._player.play(self._episodes, num_generations, profiler)
        self._turns.close()

    def _calculate_rewards(self, inputs: Any, *others: Any) -> torch.Tensor:
        if self._tool_masks is not None:
            inputs = [{**row, "tool_mask": mask} for row, mask in zip(inputs, self._tool_masks, strict=True)]
        return super()._calculate_rewards(inputs, *others)

    def _tool_call_loop(
        self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, logprobs: Any, *images: Any
    ) -> tuple[Any, ...]:
        if self.rollout_func is not None:  # it has taken the first turns
            self._play(prompt_ids, firsts=list(zip(completion_ids, logprobs, chain(*completions), strict=True)))
        return for_trl(self._episodes)

    def _note_ends(self, scored: dict[str, Any], logged: dict[str, list[float]]) -> None:
        """Log turns and how many completions were cut off, which TRL cannot tell; mask those if the recipe says so."""
        if not self.tools and not metrics.has_stops(self.args.generation_kwargs or {}):
            return
        ends, gather = {*self.eos_token_ids, self._tokenizer.pad_token_id}, self.accelerator.gather
        stops = (ends, self._tokenizer.decode, self.args.generation_kwargs or {})
        is_cut = metrics.cut_off(scored["completion_ids"], loss.mask_of(scored), *stops)
        if self.tools:
            ran_out = torch.tensor([episode.is_cut for episode in self._episodes], device=is_cut.device)
            turns = torch.tensor([len(episode.turns) for episode in self._episodes], device=is_cut.device)
            is_cut |= ran_out  # they end with a call and its end token
            for name, values in ((metrics.TURNS, turns), (metrics.CUT, ran_out)):
                logged[name].append(gather(values).float().mean().item())
            if self.mask_truncated_completions:
                scored["completion_mask"] = scored["completion_mask"] * ~is_cut[:, None]
                scored["num_items_in_batch"] = gather(loss.mask_of(scored).sum()).sum()
            table = self._logs["completion"]
            self._logs["completion"] = deque(map(in_one_type, table), table.maxlen)
        logged[metrics.CLIPPED][-1] = gather(is_cut).float().mean().item()
