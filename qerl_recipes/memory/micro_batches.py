"""Size the micro-batches of a run, for those lengths of its sequences that need most memory."""

from dataclasses import dataclass

from qerl_recipes.memory.estimates import MicroBatch
from qerl_recipes.model.packing import distribute
from qerl_recipes.recipe.batches import FAST_TOKENS
from qerl_recipes.recipe.configs import GRPOConfig, ModelConfig, ScriptArguments
from qerl_recipes.recipe.keys import means_of_a_micro_batch


@dataclass(frozen=True)
class Trained:
    """Hold the most tokens of a sequence, its prompt and its completion; with ``is_flash`` no prompts are shared."""

    training: GRPOConfig
    length: int
    prompt: int
    completion: int
    is_flash: bool

    @staticmethod
    def of(script: ScriptArguments, training: GRPOConfig, model: ModelConfig, positions: int) -> "Trained":
        """Return the lengths that a recipe gives a model of so many ``positions``."""
        most, prompt = training.vllm_max_model_length or positions, script.max_prompt_length
        completion = training.max_completion_length or positions
        length = most if prompt is None else min(prompt + completion, most)
        is_flash = (model.attn_implementation or "").startswith(("flash", "kernels"))
        return Trained(training, length, min(prompt or length, length), min(completion, length), is_flash)

    def micro_batch(self, packs: int, *, at_full_length: bool = False) -> MicroBatch:
        """Return the sizes in rows of ``packs`` tokens (0: padded), for lengths that need most or the largest ones."""
        if self.training.splits_by_tokens:
            return self._longest_row(packs) if packs and at_full_length else self._part(packs)
        rows = self.training.per_device_train_batch_size
        attended, prompt, generations = rows * self.length, self.length - self.completion, self.training.num_generations
        prompts = rows
        if self._shares_prompts(packs):
            in_a_row = max(1, (packs - prompt) // self.completion)  # of a group; each packed row has its own prompt
            prompts = rows // generations * -(-generations // in_a_row)
        elif attended <= packs and not self.is_flash:  # one packed row has each prompt of the rollout once at most
            prompts = min(rows, self.training.generation_batch_size // generations)
        tokens = rows * self.completion + prompts * prompt
        at_once = min(tokens, max(packs, self.length)) if packs else tokens
        scored = min(rows * self.completion, at_once) if packs else rows * self.completion
        padded = 0 if packs or self.is_flash else rows
        return MicroBatch(tokens, at_once, scored, padded, self.length, attended / tokens)

    def _part(self, packs: int) -> MicroBatch:
        """Return the largest sizes of a part: one packed row, or as many padded ones as have FAST_TOKENS.

        Sequences of some lengths fill the row. With the shortest completions that do, all of a step are in it.
        """
        training = self.training
        rows, group, prompt = training.per_device_train_batch_size, training.num_generations, self.prompt
        if not packs:
            rows = min(rows, max(1, FAST_TOKENS // self.length))
            return MicroBatch(rows * self.length, rows * self.length, rows * self.completion, rows, self.length)
        prompts, shared = rows, 0
        tokens = min(rows * self.length, max(packs, self.length))
        if not self.is_flash:
            prompts = min(rows, training.generation_batch_size // group)  # of a rollout, for all processes
            tokens = min(tokens, rows * self.completion + prompts * prompt)
            groups, rest = divmod(tokens, prompt + group)  # of completions of a token each
            together = min(rows, groups * group + max(0, rest - prompt))
            shared = min((together - -(-together // group)) * prompt, rows * self.length - tokens)
        scored = min(rows * self.completion, tokens)
        return MicroBatch(tokens, tokens, scored, 0, self.length, 1 + shared / tokens)

    def _longest_row(self, packs: int) -> MicroBatch:
        """Return the sizes of the longest packed row of sequences of full length, each group of which is whole."""
        rows, group = self.training.per_device_train_batch_size, 1 if self.is_flash else self.training.num_generations
        groups = [range(first, min(first + group, rows)) for first in range(0, rows, group)]
        prompts, completions = [self.length - self.completion] * rows, [self.completion] * rows
        packed = distribute(groups, prompts, completions, packs)
        tokens, sequences = max((sum(t.size for t in row), sum(len(t.rows) for t in row)) for row in packed)
        return MicroBatch(tokens, tokens, sequences * self.completion, 0, self.length, sequences * self.length / tokens)

    def _shares_prompts(self, packs: int) -> bool:
        """Return True if all completions of a prompt are sure to share a micro-batch, though TRL shuffles them.

        ``packing.even_micro_batches`` puts whole groups together again if the rollout is one optimizer step, the loss
        is a sum over rows, and whole groups fill each micro-batch. A step with a single micro-batch needs no such loss.
        """
        training = self.training
        if not packs or self.is_flash or self.completion >= self.length:
            return False
        is_one_step = (training.steps_per_generation or 1) == training.gradient_accumulation_steps
        is_a_sum = not any(means_of_a_micro_batch(vars(training)))
        are_whole = training.per_device_train_batch_size % training.num_generations == 0
        return are_whole and is_one_step and (is_a_sum or training.gradient_accumulation_steps == 1)
