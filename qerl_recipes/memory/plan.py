"""Plan the GPU memory of a training run, part by part, before anything is loaded.

In a rollout the engine samples, and in training the gradient is computed: what one phase alone holds is free in the
other. Activations, the engine's scratch and CUDA's own memory are estimates for the lengths that need most, so a plan
is a worst case. In packed rows these are not the longest sequences: shorter ones fill a row better.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qerl_recipes.files.adapter import engine_rank
from qerl_recipes.files.base_model import read_config
from qerl_recipes.machine.gpu import Gpu, gigabytes
from qerl_recipes.memory import estimates, sizes
from qerl_recipes.memory.estimates import BF16, FP32, Engine, MicroBatch
from qerl_recipes.memory.micro_batches import Trained
from qerl_recipes.memory.sizes import ModelSize, measure
from qerl_recipes.model import shared
from qerl_recipes.recipe.batches import AS_MANY_AS_FIT, FAST_TOKENS, PACK_TOKENS
from qerl_recipes.recipe.configs import AS_FEW_AS_FIT, SERVER, GRPOConfig, ModelConfig, ScriptArguments
from qerl_vllm_plugin.noise import is_target

PHASES = ("rollout", "training")
SLEEP = "vllm_enable_sleep_mode: true"  # does not lower a rollout, since the engine is awake then
FIXED_BY_A_CHECKPOINT = re.compile(r"\b(lora_r|optim|quantization|max_completion_length)\b")
CONTEXT = 900_000_000  # CUDA context and kernels, cuBLAS workspaces
SHARE_KEY, BYTES_KEY = "vllm_gpu_memory_utilization", "vllm_kv_cache_memory_bytes"
MOST_SHARE = 0.95  # the largest share of the GPU that is advised for the engine
SPARE = 0.03  # share of the GPU that stays free if the plan chooses tokens of a row or blocks to recompute
TOKENS_APART = 512  # numbers of tokens of a row that the plan tries differ by this
# Memory that the allocator holds but cannot use: SLACK times the temporary memory, but at most MOST_SLACK bytes. With
# both, plans are from 5.2 % below to 3.5 % or 1.5 GB above what the runs in kernels/results took.
SLACK, MOST_SLACK = 0.4, 1_500_000_000


@dataclass(frozen=True)
class Part:
    """Hold a part's bytes in each phase, how they come about, and ``knobs`` that lower them, best first."""

    name: str
    rollout: int
    training: int
    detail: str = ""
    knobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The memory plan of a run on a GPU.

    ``problem`` says what stops the engine from starting, and ``remark`` that sequences must wait. ``checkpointed`` of
    ``blocks`` blocks recompute their activations. ``is_chosen`` says that the plan has chosen ``pack_tokens``.
    ``engine`` is the bytes of the engine without its KV cache, ``token`` those of one token in it. ``at_full_length``
    is the peak if every sequence has full length.
    """

    parts: tuple[Part, ...]
    gpu: Gpu
    problem: str = ""
    checkpointed: int = 0
    blocks: int = 0
    pack_tokens: int = 0
    is_chosen: bool = False
    engine: int = 0
    token: int = 0
    remark: str = ""
    at_full_length: int = 0

    def engine_share(self, tokens: int) -> float:
        """Return the ``vllm_gpu_memory_utilization`` at which the KV cache holds ``tokens`` tokens."""
        return (self.engine + tokens * self.token) / self.gpu.memory

    def total(self, phase: str) -> int:
        return sum(getattr(part, phase) for part in self.parts)

    @property
    def peak(self) -> int:
        return max(self.total(phase) for phase in PHASES)

    @property
    def worse_phase(self) -> str:
        return max(PHASES, key=self.total)

    @property
    def fits(self) -> bool:
        return self.peak <= self.gpu.memory and not self.problem

    def largest(self, phase: str) -> list[Part]:
        """Return the parts that hold something in this phase, largest first."""
        held = [part for part in self.parts if getattr(part, phase)]
        return sorted(held, key=lambda part: -getattr(part, phase))

    def added(self, phase: str) -> list[Part]:
        """Return the parts that hold more in this phase than in the other, largest first."""
        (other,) = set(PHASES) - {phase}
        return [part for part in self.largest(phase) if getattr(part, phase) > getattr(part, other)]

    def advice(self, parts: Iterable[Part], phase: str, *, resuming: bool = False) -> str:
        """Say what to change so that ``phase`` needs less memory; with ``resuming`` only what a checkpoint allows."""
        reasons: dict[str, str] = {}
        for part in parts:
            knobs = [knob for knob in part.knobs if knob != SLEEP or phase == "training"]
            knobs = [knob for knob in knobs if not (resuming and FIXED_BY_A_CHECKPOINT.search(knob))]
            if knobs and len(reasons) < 2:
                reasons.setdefault(" or ".join(knobs), f"{part.name}, {gigabytes(getattr(part, phase))}")
        return "; ".join(f"{knobs} ({why})" for knobs, why in reasons.items()) or "a smaller model"

    def line(self) -> str:
        """Return one line with the peak and the largest parts of the worse phase."""
        phase = self.worse_phase
        parts = ", ".join(f"{part.name} {gigabytes(getattr(part, phase))}" for part in self.largest(phase)[:3])
        return f"{gigabytes(self.peak)} of {gigabytes(self.gpu.memory)} ({parts}, ...)"

    def choice(self) -> str:
        """Say how many tokens a packed row has and how many blocks are recomputed, and why these numbers; or ""."""
        if not self.is_chosen:
            return f"with {self.checkpointed} blocks recomputed" if self.checkpointed else ""
        row, recomputed = f"in rows of {self.pack_tokens:,} tokens", f"{self.checkpointed} of {self.blocks} blocks"
        if not self.checkpointed:
            why = "more would be no faster" if self.pack_tokens >= PACK_TOKENS else "the most that fit"
            return f"{row} ({why}), no block recomputed"
        if self.pack_tokens >= FAST_TOKENS:
            return f"{row} (enough to be fast), {recomputed} recomputed (the fewest that fit)"
        return f"{row} (the most that fit), {recomputed} recomputed"

    def obstacles(self) -> list[str]:
        """Return the reasons why the run does not fit, each with a way out; the list is empty if it fits."""
        reasons = [f"it cannot start: {self.problem}"] if self.problem else []
        if self.peak > self.gpu.memory:
            phase, over = self.worse_phase, gigabytes(self.peak - self.gpu.memory)
            advice = self.advice(self.largest(phase), phase)
            reasons.append(
                f"not enough GPU memory: {phase} needs {over} more than there is, {self.line()}; way out: {advice}"
            )
        return reasons

    def check(self) -> None:
        """Raise ValueError, with the largest parts and a way out, if the run does not fit."""
        if not self.fits:
            raise ValueError(
                f"this run does not fit on a GPU of {gigabytes(self.gpu.memory)}: {'; and '.join(self.obstacles())}. "
                "`qerl doctor --recipe RECIPE.yaml` shows the whole plan"
            )


def make(
    script: ScriptArguments,
    training: GRPOConfig,
    model: ModelConfig,
    *,
    gpu: Gpu,
    config: Mapping[str, Any] | None = None,
    limit: int | None = None,
) -> Plan:
    """Plan the memory of a recipe on a GPU.

    ``config`` is the checkpoint's config.json, by default that of the recipe's model, and ``limit`` the bytes that may
    be used. ``recompute_layers: -1`` and ``pack_tokens: -1`` become the first of ``_to_try`` that leave 3 % of them
    free, or the last. Raises ValueError for unknown sizes, or if ``recompute_layers`` exceeds the model's blocks.
    """
    if config is None:
        config = read_config(str(model.model_name_or_path), model.model_revision)
    run = _Run(script, training, model, measure(config), gpu)
    held = (*run.engine_parts(), run.weights(), *run.trained_parts())
    problem, remark, is_chosen = run.problem(), run.remark(), training.pack_tokens == AS_MANY_AS_FIT
    for tokens, checkpointed in _to_try(run):
        parts = (*held, *run.working_parts(run.trained.micro_batch(tokens), tokens, checkpointed))
        chosen = (checkpointed, run.size.layers, tokens, is_chosen)
        plan = Plan(parts, gpu, problem, *chosen, run.engine.beside_cache, run.engine.token, remark)
        if plan.peak <= (1 - SPARE) * (limit or gpu.memory):
            break
    longest = run.working_parts(run.trained.micro_batch(tokens, at_full_length=True), tokens, checkpointed)
    return replace(plan, at_full_length=replace(plan, parts=(*held, *longest)).peak)


def _to_try(run: "_Run") -> Iterator[tuple[int, int]]:
    """Yield numbers of tokens of a packed row with numbers of recomputed blocks, the fastest first.

    Recomputing all blocks takes 40 % longer, and rows of FAST_TOKENS tokens are nearly as fast as longer ones. A row
    holds two of the longest sequences as long as it can, for otherwise it may be half empty, and always one.
    """
    blocks, given = _blocks_to_try(run.training, run.size), run.training.pack_tokens or 0
    if given != AS_MANY_AS_FIT:
        yield from ((given, checkpointed) for checkpointed in blocks)
        return
    fast = max(FAST_TOKENS, run.length, min(2 * run.length, 2 * FAST_TOKENS))
    yield from ((tokens, blocks[0]) for tokens in range(max(PACK_TOKENS, fast), fast, -TOKENS_APART))
    yield from ((fast, checkpointed) for checkpointed in blocks)
    yield from ((tokens, blocks[-1]) for tokens in range(fast - TOKENS_APART, run.length - 1, -TOKENS_APART))


def _blocks_to_try(training: GRPOConfig, size: ModelSize) -> Sequence[int]:
    """Return the numbers of recomputed blocks to try, in order."""
    requested = training.recompute_layers
    if not training.gradient_checkpointing:
        return [0]
    if requested == AS_FEW_AS_FIT:
        return range(size.layers + 1)
    if requested is not None and requested > size.layers:
        raise ValueError(f"recompute_layers is {requested}, and this model has {size.layers} blocks; name no more")
    return [size.layers if requested is None else requested]


class _Run:
    """Hold the settings of a recipe on a GPU, with the sizes that follow from both."""

    def __init__(
        self, script: ScriptArguments, training: GRPOConfig, model: ModelConfig, size: ModelSize, gpu: Gpu
    ) -> None:
        self.training, self.size, self.gpu, self.arm = training, size, gpu, training.quantization
        self.itemsize = FP32 if model.dtype == "float32" else BF16
        self.dtype = {"float16": "FP16", "float32": "FP32"}.get(model.dtype or "", "BF16")
        self.rank, self.targets = sizes.trained_adapter(script, model, size)
        self.engine = Engine(size, training, gpu, self.rank, self.itemsize)
        self.sequences = estimates.sequences(training)
        self.cache_tokens = max(0, self.engine.cache) // self.engine.token
        # the key that determines the size of the KV cache
        self.cache_key = SHARE_KEY if training.vllm_kv_cache_memory_bytes is None else BYTES_KEY
        # why the trainer has its own copy of the weights, or None if it reads the engine's
        self.own_copy = shared.obstacle(training)
        self.could_share = self.own_copy is None and training.share_weights is False
        if self.could_share:
            self.own_copy = "share_weights: false"
        self.engine_length = training.vllm_max_model_length or size.positions
        self.trained = Trained.of(script, training, model, size.positions)
        self.length = self.trained.length
        # ways to need less
        self.smaller = () if self.arm == shared.ARM else (f"quantization: {shared.ARM}",)
        self.lower_rank = (f"lora_r below {self.rank}",)

    def engine_parts(self) -> tuple[Part, ...]:
        """Return the parts of the engine: none of a server, whose memory the run does not control."""
        if self.training.vllm_mode == SERVER:
            return ()
        engine, sleeps = self.engine, self.training.vllm_enable_sleep_mode
        awake = 0 if sleeps and self.own_copy is not None else 1
        form = {"qerl_nvfp4": f"NVFP4, {engine.layout}", "bf16": "BF16", "nf4": "NF4"}[self.arm]
        form += f"; embedding and head in {self.dtype}"
        knobs = self.smaller if sleeps or self.own_copy is None else (SLEEP, *self.smaller)
        weights, adapter, scratch, graphs = engine.weights, engine.adapter, engine.scratch, estimates.GRAPHS
        at_once = f"estimate: {estimates.ENGINE_TOKENS} tokens at once, sampler"
        return (
            Part("engine's weights", weights, weights * awake, form, knobs),
            Part("engine's adapter", adapter, adapter * awake, f"rank {engine_rank(self.rank)}", self.lower_rank),
            self._kv_cache(),
            Part("engine's scratch", scratch, 0, at_once),
            Part("CUDA graphs", graphs, graphs, "estimate"),
        )

    def weights(self) -> Part:
        """Return the part of the trainer's frozen weights."""
        is_shared = self.own_copy is None
        own = sizes.trainer_weights(self.size, self.arm, shared=is_shared, itemsize=self.itemsize)
        kept = "norms; experts, which the engine holds otherwise" if self.size.experts else "norms"
        detail = f"reads the engine's weights; its own: {kept}" if is_shared else f"own copy: {self.own_copy}"
        knobs = ("share_weights: true",) if self.could_share else self.smaller
        return Part("trainer's weights", own, own, detail, knobs)

    def _kv_cache(self) -> Part:
        """Return the KV cache, which is freed while the trainer works if the engine sleeps then."""
        cache, tokens = max(self.engine.cache, 0), self.cache_tokens
        held = f"{tokens // self.engine_length} of {self.sequences} full sequences at a time"
        if tokens >= self.sequences * self.engine_length:
            held = f"room for all {self.sequences} sequences of {self.engine_length} tokens"
        sleeps, key = self.training.vllm_enable_sleep_mode, self.cache_key
        value = getattr(self.training, key)  # a share of the GPU, or bytes, which are shown with all digits
        lower = f"{key} below {value:g}" if key == SHARE_KEY else f"{key} below {value}"
        detail = f"rest of {key} {value:g}; {held}" if key == SHARE_KEY else f"{key}; {held}"
        return Part("KV cache", cache, 0 if sleeps else cache, detail, (lower,) if sleeps else (SLEEP, lower))

    def problem(self) -> str:
        """Say why vLLM would not start, which takes one sequence of full length, with a way out; "" if it would."""
        if self.training.vllm_mode == SERVER or self.engine_length <= self.cache_tokens:
            return ""
        length, one = self.engine_length, self.engine_length * self.engine.token
        if (cache_bytes := self.training.vllm_kv_cache_memory_bytes) is not None:
            return (
                f"{BYTES_KEY}: {cache_bytes} does not hold one sequence of {length} tokens; use {one} or more "
                f"({self._how_many()}), or a shorter max_completion_length"
            )
        share, needed = self.training.vllm_gpu_memory_utilization, (self.engine.beside_cache + one) / self.gpu.memory
        least = f"{math.ceil(100 * needed) / 100:.2f}"
        way_out = f"use {SHARE_KEY}: {least} or more ({self._how_many()}), or a shorter max_completion_length"
        if needed > MOST_SHARE:
            way_out = "the GPU is too small for this model" + "".join(f"; use {change}" for change in self.smaller)
        return (
            f"{SHARE_KEY}: {share:g} gives the engine {gigabytes(share * self.gpu.memory)}, which does not hold its "
            f"weights and one sequence of {length} tokens; {way_out}"
        )

    def remark(self) -> str:
        """Say that the engine is not in this plan, or holds too few sequences and what would change it; or ""."""
        if self.training.vllm_mode == SERVER:
            return "the server's memory is not in this plan: on this GPU its --gpu-memory-utilization comes on top"
        fitting = self.cache_tokens // self.engine_length
        if fitting == 0 or fitting >= self.sequences:  # without room for one, the problem says it
            return ""
        return (
            f"the engine holds {fitting} of {self.sequences} sequences of {self.engine_length} tokens at a time, and "
            f"the others wait: slow; {self.cache_key}: {self._how_many()}"
        )

    def _how_many(self) -> str:
        """Say which cache setting holds all full sequences, or how many fit at the largest sensible share."""
        one, memory, beside = self.engine.token * self.engine_length, self.gpu.memory, self.engine.beside_cache
        if self.cache_key == BYTES_KEY:
            return f"{self.sequences * one} holds all {self.sequences}"
        share = math.ceil(100 * (beside + self.sequences * one) / memory) / 100
        if share <= MOST_SHARE:
            return f"{share:.2f} holds all {self.sequences}"
        return f"{MOST_SHARE} holds {max(0, int((MOST_SHARE * memory - beside) // one))} of {self.sequences}"

    def trained_parts(self) -> tuple[Part, ...]:
        """Return the adapter in fp32, in training with autocast's copies, its gradients, and the optimizer's state."""
        count, targets = sizes.adapter_elements(self.targets, self.rank), tuple(self.training.noise_targets)
        norms = [elements for name, elements in self.size.norms.items() if is_target(name, targets)]
        norms = norms if self.training.train_norms else []
        total = count + sum(norms)
        detail = f"{count / 1e6:.1f} million numbers in fp32, in training in {self.dtype} too"
        copies = count * BF16 if self.itemsize == BF16 else 0
        name = str(getattr(self.training.optim, "value", self.training.optim))
        matrices = [shape for linear in self.targets for shape in ((self.rank, linear.K), (linear.N, self.rank))]
        states = sizes.optimizer_state(name, [*matrices, *((norm,) for norm in norms)])
        knobs = self.lower_rank if "8bit" in name else ("optim: adamw_8bit", *self.lower_rank)
        # DDP sums gradients in buckets of its own, which stay when the gradients are freed.
        buckets = total * FP32 if self.training.world_size > 1 else 0
        how = f"fp32, {sum(norms)} of norms" if norms else "fp32"
        how += ", and buckets in which processes sum them" if buckets else ""
        return (
            Part("trained adapter", count * FP32, count * FP32 + copies, detail, self.lower_rank),
            Part("gradients", buckets, total * FP32 + buckets, how, self.lower_rank),
            Part("optimizer", states, states, f"{name}: {states / total:.3g} bytes each", knobs),
        )

    def working_parts(self, batch: MicroBatch, packs: int, checkpointed: int) -> tuple[Part, ...]:
        """Return activations, temporary tensors and CUDA's own, in rows of ``packs`` tokens."""
        itemsize, layers = self.itemsize, self.size.layers
        # With use_cpu the recipe is read on a machine without a GPU, where bf16 says nothing about a run on a GPU.
        autocast = bool(self.training.bf16 or self.training.fp16) or self.training.use_cpu
        most = sizes.most_in_a_block(self.targets)
        block = estimates.saved_in_a_block(self.size, batch, self.rank, most, autocast=autocast, itemsize=itemsize)
        kept = estimates.kept(self.size, batch, block, checkpointed=checkpointed, itemsize=itemsize)
        in_block, head = estimates.at_work(
            self.size, batch, block, checkpointed=checkpointed, expands=self.arm != "bf16", itemsize=itemsize
        )
        blocks = f"all of {layers - checkpointed} blocks" if checkpointed < layers else "hidden states"
        once = ", prompts of a group once" if batch.attended > 1 else ""
        share = f", recompute_layers: {checkpointed} of {layers}" if checkpointed else ""
        keep_less = compute_less = self._fewer_rows()
        if not self.training.gradient_checkpointing:
            keep_less = ("gradient_checkpointing: true",)
        elif checkpointed < layers:
            keep_less = (f"recompute_layers: {layers}",)
        if packs and batch.at_once > self.length:
            compute_less = (f"pack_tokens: {self.length}",)
        where = f"estimate: {'one block' if in_block >= head else 'the head'}, {batch.at_once} tokens"
        at_work = max(in_block, head)
        own = CONTEXT + min(MOST_SLACK, int(SLACK * (kept + at_work)))
        return (
            Part("activations", 0, kept, f"{blocks} of {batch.tokens} tokens{once}{share}", keep_less),
            Part("at work", 0, at_work, where, compute_less),
            Part("CUDA and allocator", own, own, "estimate: context, kernels, cuBLAS, unusable blocks"),
        )

    def _fewer_rows(self) -> tuple[str, ...]:
        rows = self.training.per_device_train_batch_size
        if rows > 1 and not self.training.splits_by_tokens:
            return (f"per_device_train_batch_size below {rows}, with gradient_accumulation_steps raised as much",)
        return (f"max_completion_length below {self.trained.completion}",)
