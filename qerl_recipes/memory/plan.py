"""Plans the GPU memory of a training run, part by part, before anything is loaded.

    recipe = parse(["--config", "recipes/Qwen2.5-32B-Instruct/grpo/nvfp4_lora_aqn.yaml"])
    plan = make(*recipe, gpu=Gpu(80_000_000_000, is_hopper=True))

A run has two phases: in a rollout the engine samples, and in training the gradient is computed. Memory that one phase
alone holds is free in the other; memory that both hold counts in both. Weights, adapter and optimizer are exact.
Activations, the engine's scratch and CUDA's own memory are estimates for sequences of full length, so a plan is a
worst case.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from qerl_recipes.files.adapter import engine_rank
from qerl_recipes.files.base_model import read_config
from qerl_recipes.machine.gpu import Gpu, gigabytes
from qerl_recipes.memory import activation_bytes, adapter_size, engine_bytes, optimizer_bytes, weight_bytes
from qerl_recipes.memory.activation_bytes import MicroBatch
from qerl_recipes.memory.model_size import ModelSize, measure
from qerl_recipes.memory.parts import SLEEP, Part, Plan
from qerl_recipes.model import shared
from qerl_recipes.model.attention import LARGEST_HEAD
from qerl_recipes.recipe.configs import AS_FEW_AS_FIT, SERVER, GRPOConfig, ModelConfig, ScriptArguments

CONTEXT = 900_000_000  # CUDA context and kernels, cuBLAS workspaces
SHARE_KEY = "vllm_gpu_memory_utilization"
MOST_SHARE = 0.95  # the largest share of the GPU that is advised for the engine
SPARE = 0.03  # share of the GPU that stays free if the plan chooses how many blocks to recompute
# Memory that the allocator holds but cannot use: SLACK times the temporary memory, but at most MOST_SLACK bytes. With
# both, plans are within 4 % of what 15 of the 17 runs in kernels/results took, and within 5.2 % of the other two. All
# runs but one reach MOST_SLACK, so of SLACK they only show that it is more than 0.2.
SLACK, MOST_SLACK = 0.4, 1_500_000_000
FP32, BF16 = 4, 2


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

    ``config`` is the checkpoint's config.json, by default that of the recipe's model. ``limit`` is the number of bytes
    of the GPU that may be used, by default all. ``recompute_layers: -1`` becomes the smallest number that leaves 3 %
    of them free; if there is none, all blocks are checkpointed.

    Raises ValueError if the model's sizes cannot be found, or if ``recompute_layers`` exceeds its blocks.
    """
    if config is None:
        config = read_config(str(model.model_name_or_path), model.model_revision)
    size = measure(config)
    allowed = (1 - SPARE) * (limit or gpu.memory)
    run = _Run(script, training, model, size, gpu)
    held = (*run.engine_parts(), *run.weight_parts(), *run.trained_parts())
    for checkpointed in _to_try(training, size):
        working = run.working_parts(checkpointed)
        parts = (*held, *working, _context(working))
        plan = Plan(parts, gpu, run.problem(), checkpointed, run.beside_cache(), run.cache_of_a_token(), run.remark())
        if plan.peak <= allowed:
            break
    return plan


def _to_try(training: GRPOConfig, size: ModelSize) -> Iterable[int]:
    """Return the numbers of recomputed blocks to try, in order."""
    requested = training.recompute_layers
    if not training.gradient_checkpointing:
        return [0]
    if requested == AS_FEW_AS_FIT:
        return range(size.layers + 1)
    if requested is not None and requested > size.layers:
        raise ValueError(f"recompute_layers is {requested}, and this model has {size.layers} blocks; name no more")
    return [size.layers if requested is None else requested]


def _context(working: Iterable[Part]) -> Part:
    size = CONTEXT + min(MOST_SLACK, int(SLACK * sum(part.training for part in working)))
    return Part("CUDA and allocator", size, size, "estimate: context, kernels, cuBLAS, unusable blocks")


class _Run:
    """The settings of a recipe on a GPU, with the sizes that follow from both."""

    def __init__(
        self, script: ScriptArguments, training: GRPOConfig, model: ModelConfig, size: ModelSize, gpu: Gpu
    ) -> None:
        self.training, self.size, self.gpu = training, size, gpu
        self.arm, self.itemsize = training.quantization, FP32 if model.dtype == "float32" else BF16
        self.dtype = {"float16": "FP16", "float32": "FP32"}.get(model.dtype or "", "BF16")
        self.layout = engine_bytes.layout(gpu, self.itemsize)
        self.reason = _own_copy_reason(training)
        self.tensor_parallel = training.vllm_tensor_parallel_size
        self.sequences = engine_bytes.sequences(training)
        completion, prompt = training.max_completion_length or size.positions, script.max_prompt_length
        self.engine_length = training.vllm_max_model_length or size.positions
        self.length = self.engine_length if prompt is None else min(prompt + completion, self.engine_length)
        self.completion = min(completion, self.length)
        self.rank, self.targets = adapter_size.trained(script, model, size)
        self.pack_tokens = training.pack_tokens or 0
        self.is_flash = (model.attn_implementation or "").startswith(("flash", "kernels"))

    def engine_parts(self) -> tuple[Part, ...]:
        """Return the parts of the engine; they are empty if the engine is a server of its own.

        A server is on another GPU, or uses a share of this one that the run does not control.
        """
        if self.training.vllm_mode == SERVER:
            return ()
        scratch, graphs = self._scratch(), activation_bytes.GRAPHS
        return (
            *self._engine_weight_parts(),
            self.kv_cache(),
            Part("engine's scratch", scratch, 0, f"estimate: {activation_bytes.ENGINE_TOKENS} tokens at once, sampler"),
            Part("CUDA graphs", graphs, graphs, "estimate"),
        )

    def _engine_weight_parts(self) -> tuple[Part, ...]:
        size, sleeps = self.size, self.training.vllm_enable_sleep_mode
        weights, adapter = engine_bytes.weights(
            size, self.training, self.layout, rank=self.rank, itemsize=self.itemsize
        )
        awake = 0 if sleeps and self.reason is not None else 1
        form = {"qerl_nvfp4": f"NVFP4, {self.layout}", "bf16": "BF16", "nf4": "NF4"}[self.arm]
        knobs = self._smaller() if sleeps or self.reason is None else (SLEEP, *self._smaller())
        return (
            Part("engine's weights", weights, weights * awake, f"{form}; embedding and head in {self.dtype}", knobs),
            Part("engine's adapter", adapter, adapter * awake, f"rank {engine_rank(self.rank)}", self._lower_rank()),
        )

    def weight_parts(self) -> tuple[Part, ...]:
        own = weight_bytes.trainer_weights(
            self.size, self.arm, self.layout, shared=self.reason is None, itemsize=self.itemsize
        )
        own_what = "norms; experts, which the engine holds otherwise" if self.size.experts else "norms"
        copy = f"reads the engine's weights; its own: {own_what}" if self.reason is None else f"own copy: {self.reason}"
        return (Part("trainer's weights", own, own, copy, _how_to_share(self.training) or self._smaller()),)

    def _smaller(self) -> tuple[str, ...]:
        """Return the change of the recipe that makes the weights smaller, if there is one."""
        return () if self.arm == shared.ARM else (f"quantization: {shared.ARM}",)

    def kv_cache(self) -> Part:
        """Return the KV cache: the size that the recipe sets, or the rest of the engine's share of the GPU.

        It is freed while the trainer works if the engine sleeps then.
        """
        left, tokens = self._left_for_cache(), self.cache_tokens()
        full = self.sequences * self.engine_length
        fitting = f"{tokens // self.engine_length} of {self.sequences} full sequences at a time"
        sleeps, key = self.training.vllm_enable_sleep_mode, self._cache_key()
        value = getattr(self.training, key)  # a share of the GPU, or bytes, which are shown with all digits
        size = f"{value:g}" if key == SHARE_KEY else str(value)
        lower = f"{key} below {size}"
        knobs = (lower,) if sleeps else (SLEEP, lower)
        held = fitting if tokens < full else f"room for all {self.sequences} sequences of {self.engine_length} tokens"
        cache, how = max(left, 0), f"rest of {key} {size}; {held}" if key == SHARE_KEY else f"{key}; {held}"
        return Part("KV cache", cache, 0 if sleeps else cache, how, knobs)

    def _cache_key(self) -> str:
        """Return the key of the recipe that determines the size of the KV cache."""
        return SHARE_KEY if self.training.vllm_kv_cache_memory_bytes is None else "vllm_kv_cache_memory_bytes"

    def cache_tokens(self) -> int:
        """Return the number of tokens that the KV cache holds."""
        return max(0, self._left_for_cache()) // self.cache_of_a_token()

    def problem(self) -> str:
        """Say why vLLM would not start, with a way out; return "" if it would.

        vLLM refuses to start if one sequence of full length does not fit into its KV cache.
        """
        if self.training.vllm_mode == SERVER or self.engine_length <= self.cache_tokens():
            return ""
        length, cache_bytes = self.engine_length, self.training.vllm_kv_cache_memory_bytes
        if cache_bytes is not None:
            return (
                f"vllm_kv_cache_memory_bytes: {cache_bytes} does not hold one sequence of {length} tokens; use "
                f"{length * self.cache_of_a_token()} or more ({self._how_many()}), or a shorter max_completion_length"
            )
        share = self.training.vllm_gpu_memory_utilization
        budget = share * self.gpu.memory
        needed = (self.beside_cache() + self.engine_length * self.cache_of_a_token()) / self.gpu.memory
        least = f"{math.ceil(100 * needed) / 100:.2f}"
        way_out = f"use vllm_gpu_memory_utilization: {least} or more ({self._how_many()}), or a shorter "
        way_out += "max_completion_length"
        if needed > MOST_SHARE:
            way_out = "the GPU is too small for this model" + (
                "" if self.arm == "qerl_nvfp4" else "; use quantization: qerl_nvfp4"
            )
        return (
            f"vllm_gpu_memory_utilization: {share:g} gives the engine {gigabytes(budget)}, which does not hold its "
            f"weights and one sequence of {self.engine_length} tokens; {way_out}"
        )

    def remark(self) -> str:
        """Say that the engine is not part of this plan, or that it cannot hold all sequences of a rollout at a time.

        The second comes with what would change it. Returns "" if neither is so.
        """
        if self.training.vllm_mode == SERVER:
            return "the server's memory is not in this plan: on this GPU its --gpu-memory-utilization comes on top"
        fitting = self.cache_tokens() // self.engine_length
        if self.problem() or fitting >= self.sequences:
            return ""
        return (
            f"the engine holds {fitting} of {self.sequences} sequences of {self.engine_length} tokens at a time, and "
            f"the others wait: slow; {self._cache_key()}: {self._how_many()}"
        )

    def _how_many(self) -> str:
        """Say which cache setting holds all full sequences, or how many fit at the largest sensible share."""
        token, memory = self.cache_of_a_token() * self.engine_length, self.gpu.memory
        if self.training.vllm_kv_cache_memory_bytes is not None:
            return f"{self.sequences * token} holds all {self.sequences}"
        share = math.ceil(100 * (self.beside_cache() + self.sequences * token) / memory) / 100
        if share <= MOST_SHARE:
            return f"{share:.2f} holds all {self.sequences}"
        fitting = max(0, int((MOST_SHARE * memory - self.beside_cache()) // token))
        return f"{MOST_SHARE} holds {fitting} of {self.sequences}"

    def trained_parts(self) -> tuple[Part, ...]:
        """Return the parts of the trained adapter, its gradients and the optimizer's state.

        The adapter is in fp32. In training, 16-bit copies of it are added, which autocast keeps through a forward.
        """
        count = weight_bytes.adapter_elements(self.targets, self.rank)
        norms = _trained_norms(self.training, self.size)
        name, total = str(getattr(self.training.optim, "value", self.training.optim)), count + sum(norms)
        detail = f"{count / 1e6:.1f} million numbers in fp32, in training in {self.dtype} too"
        copies = count * BF16 if self.itemsize == BF16 else 0
        knobs = self._lower_rank() if "8bit" in name else ("optim: adamw_8bit", *self._lower_rank())
        pairs = [shape for of in self.targets for shape in ((self.rank, of.K), (of.N, self.rank))]
        states = optimizer_bytes.state(name, [*pairs, *((norm,) for norm in norms)])
        # DDP sums gradients in buckets of its own, which stay when the gradients are freed.
        buckets = total * FP32 if self.training.world_size > 1 else 0
        how = f"fp32, {sum(norms)} of norms" if norms else "fp32"
        how += ", and buckets in which processes sum them" if buckets else ""
        return (
            Part("trained adapter", count * FP32, count * FP32 + copies, detail, self._lower_rank()),
            Part("gradients", buckets, total * FP32 + buckets, how, self._lower_rank()),
            Part("optimizer", states, states, f"{name}: {states / total:.3g} bytes each", knobs),
        )

    def micro_batch(self) -> MicroBatch:
        rows, packs = self.training.per_device_train_batch_size, self.pack_tokens
        tokens = attended = rows * self.length
        if self._shares_prompts():
            generations, prompt = self.training.num_generations, self.length - self.completion
            in_a_row = max(1, (packs - prompt) // self.completion)  # of a group; each packed row has its own prompt
            prompts = rows // generations * -(-generations // in_a_row)
            tokens = rows * self.completion + prompts * prompt
        at_once = min(tokens, max(packs, self.length)) if packs else tokens
        scored = min(rows * self.completion, at_once) if packs else rows * self.completion
        padded = 0 if packs or self.is_flash else rows
        return MicroBatch(tokens, at_once, scored, padded, self.length, attended / tokens)

    def _shares_prompts(self) -> bool:
        """Return True if all completions of a prompt are sure to share a micro-batch.

        A packed row of them then computes the prompt once. TRL shuffles the completions of a rollout.
        ``packing.even_micro_batches`` puts whole groups together again if the rollout is one optimizer step, the loss
        is a sum over rows, and whole groups fill each micro-batch. A step with a single micro-batch needs no such loss.
        """
        training = self.training
        if not self.pack_tokens or self.is_flash or self.completion >= self.length:
            return False
        is_one_step = (training.steps_per_generation or 1) == training.gradient_accumulation_steps
        has_bonus = training.entropy_coef or training.use_adaptive_entropy
        is_a_sum = training.loss_type != "bnpo" and not has_bonus and training.top_entropy_quantile == 1.0
        are_whole = training.per_device_train_batch_size % training.num_generations == 0
        return are_whole and is_one_step and (is_a_sum or training.gradient_accumulation_steps == 1)

    def working_parts(self, checkpointed: int) -> tuple[Part, ...]:
        """Return the activations and the temporary tensors of training, with ``checkpointed`` blocks recomputed."""
        batch = self.micro_batch()
        targets = adapter_size.most_in_a_block(self.targets)
        padded_to, itemsize = self.length if batch.rows else 0, self.itemsize
        # With use_cpu the recipe is read on a machine without a GPU, where bf16 says nothing about a run on a GPU.
        autocast = bool(self.training.bf16 or self.training.fp16) or self.training.use_cpu
        block = activation_bytes.saved_in_a_block(
            self.size,
            self.rank,
            targets,
            padded_to,
            autocast=autocast,
            itemsize=itemsize,
            attended=batch.attended,
            at_once=not padded_to and (autocast or itemsize == 2) and self.size.head_dim <= LARGEST_HEAD,
            widens=self.arm == shared.ARM,
        )
        kept = activation_bytes.kept(self.size, batch, block, checkpointed=checkpointed, itemsize=itemsize)
        in_block, head = activation_bytes.at_work(
            self.size,
            batch,
            block,
            checkpointing=checkpointed > 0,
            expands=self.arm != "bf16",
            rearranges=self.layout == "marlin" and self.reason is None,
            itemsize=itemsize,
        )
        others = self.size.layers - checkpointed
        share = f", recompute_layers: {checkpointed} of {self.size.layers}" if checkpointed else ""
        once = ", prompts of a group once" if batch.attended > 1 else ""
        what = (f"all of {others} blocks" if others else "hidden states") + f" of {batch.tokens} tokens{once}{share}"
        where = "one block" if in_block >= head else "the head"
        return (
            Part("activations", 0, kept, what, self._less_to_keep(checkpointed)),
            Part("at work", 0, max(in_block, head), f"estimate: {where}, {batch.at_once} tokens", self._less_at_once()),
        )

    def cache_of_a_token(self) -> int:
        """Return the bytes that one token takes in the KV cache of one GPU of the engine."""
        return engine_bytes.cache_of_a_token(self.size, self.tensor_parallel, self.itemsize)

    def beside_cache(self) -> int:
        """Return the bytes of the engine without its KV cache."""
        return engine_bytes.beside_cache(self.size, self.training, self.gpu, rank=self.rank, itemsize=self.itemsize)

    def _left_for_cache(self) -> int:
        return engine_bytes.left_for_cache(self.size, self.training, self.gpu, rank=self.rank, itemsize=self.itemsize)

    def _scratch(self) -> int:
        return engine_bytes.scratch(self.size, self.training, self.itemsize)

    def _lower_rank(self) -> tuple[str, ...]:
        return (f"lora_r below {self.rank}",)

    def _less_to_keep(self, checkpointed: int) -> tuple[str, ...]:
        if not self.training.gradient_checkpointing:
            return ("gradient_checkpointing: true",)
        if checkpointed < self.size.layers:
            return (f"recompute_layers: {self.size.layers}",)
        return self._fewer_rows()

    def _less_at_once(self) -> tuple[str, ...]:
        if self.pack_tokens and self.micro_batch().at_once > self.length:
            return (f"pack_tokens: {self.length}",)
        return self._fewer_rows()

    def _fewer_rows(self) -> tuple[str, ...]:
        rows = self.training.per_device_train_batch_size
        if rows > 1:
            return (f"per_device_train_batch_size below {rows}, with gradient_accumulation_steps raised as much",)
        return (f"max_completion_length below {self.completion}",)


def _own_copy_reason(training: GRPOConfig) -> str | None:
    """Return the reason why the trainer has its own copy of the weights, or None if it reads the engine's."""
    if (reason := shared.obstacle(training)) is not None:
        return reason
    return "share_weights: false" if training.share_weights is False else None


def _how_to_share(training: GRPOConfig) -> tuple[str, ...]:
    """Return the change of the recipe that would avoid the second copy of the weights, if there is one."""
    is_off = training.share_weights is False and shared.obstacle(training) is None
    return ("share_weights: true",) if is_off else ()


def _trained_norms(training: GRPOConfig, size: ModelSize) -> list[int]:
    """Return the number of elements of each trained norm."""
    from qerl_vllm_plugin.noise import is_target

    if not training.train_norms:
        return []
    return [count for name, count in size.norms.items() if is_target(name, tuple(training.noise_targets))]
