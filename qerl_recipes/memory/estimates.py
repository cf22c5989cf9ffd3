"""Estimate the memory that comes and goes: the trainer's activations and logits, and the engine beside its weights.

The trainer's part counts the tensors that PyTorch saves in one block of a Llama-like model on a GPU, with LoRA in fp32.
The block has a gated MLP or experts, as all model families that are trained here. A test counts the tensors for real,
with the dtypes that a run has by default. For other dtypes the estimates are within 10 %.
"""

from dataclasses import dataclass

from qerl_kernels.linear_logprob import CHUNK_BYTES
from qerl_kernels.linear_tiles import slab_rows

from qerl_recipes.files.adapter import engine_rank
from qerl_recipes.machine.gpu import Gpu
from qerl_recipes.memory.sizes import ExpertsSize, ModelSize, adapter_slots, engine_weights, resident_adapter
from qerl_recipes.recipe.configs import GRPOConfig

FP32, BF16, INT64 = 4, 2, 8
ENGINE_TOKENS = 4096  # the most tokens per engine step: the rollout's max_num_batched_tokens
SAMPLER_COPIES = 3  # of the logits, in fp32: processed, sorted, log-softmax
GRAPHS = 600_000_000  # CUDA graphs of the engine; vLLM reports 0.3 to 0.7 GiB for batches of 64 to 256
# How many copies of the widest activation the backward of a block needs beside the saved tensors. The peak is at the
# input of down_proj: the gradients through the adapter and through the frozen weight, and their sum, are three copies.
# The input itself is free by then, which leaves two. The scales of a frozen weight go into cuBLAS and cost no copy.
WORKING_COPIES = 2


@dataclass(frozen=True)
class MicroBatch:
    """Hold the sizes of one micro-batch of the trainer.

    ``tokens`` are computed, at most ``at_once`` of them together, and ``scored`` of those go through the head. ``rows``
    sequences are padded to ``length`` tokens; 0 means packed. ``attended`` is the number of tokens that the attention
    sees, divided by ``tokens``: completions that share a prompt each attend to it.
    """

    tokens: int
    at_once: int
    scored: int
    rows: int
    length: int
    attended: float = 1.0


def saved_in_a_block(
    size: ModelSize, batch: MicroBatch, rank: int, targets: int, *, autocast: bool = True, itemsize: int = BF16
) -> int:
    """Return the bytes per token that one block saves for its backward.

    * ``targets``: the number of linears of a block that carry the adapter.
    * ``autocast``: autocast to BF16 is on and model/lora.py computes the adapter. Without it PEFT does, in fp32.
    """
    H, I, Q, KV = size.hidden, size.intermediate, size.heads * size.head_dim, size.kv_heads * size.head_dim  # noqa: E741
    width, lora_width = (BF16, BF16) if autocast else (itemsize, FP32)  # bytes of an activation, of an adapter's input
    norms = 2 * (itemsize * H + FP32)  # the input, and one number per token
    if len(size.norms) > 2 * size.layers + 1:  # the model has norms on q and k
        norms += width * (Q + KV) + FP32 * (size.heads + size.kv_heads)
    is_copied = lora_width > itemsize  # PEFT casts the input of each adapter, to a tensor of its own
    # Otherwise q, k and v share one saved input, gate and up share another, and o_proj takes the attention's output.
    inputs = 3 * H + Q if is_copied else H
    if size.experts:  # experts carry no adapter
        linears, mlp = 4, max(_saved_by_experts(layer, width) for layer in size.experts)
    else:
        linears, mlp = 7, 2 * width * I  # gate, up
        inputs += (2 * H if is_copied else H) + I
    adapter_inputs = lora_width * inputs * targets // linears + lora_width * rank * targets
    # padded, the attention saves the mask, and keys and values for every query head
    keys = batch.length + 2 * Q if batch.rows else int(batch.attended * 2 * KV)
    return norms + adapter_inputs + FP32 * size.heads + width * (2 * Q + keys) + mlp


def _saved_by_experts(layer: ExpertsSize, width: int) -> int:
    """Return the bytes per token of a layer: each used expert's gate, up, output and places, and the router."""
    return layer.used * (width * (2 * layer.inner + layer.hidden) + 3 * INT64) + 2 * FP32 * layer.count


def kept(size: ModelSize, batch: MicroBatch, block: int, *, checkpointed: int, itemsize: int = BF16) -> int:
    """Return the bytes that stay from the forward to the backward; ``block`` is what one block saves per token."""
    last = 4 * BF16 * size.hidden + FP32  # for the last norm and the head, whose gradient the forward prepares
    blocks = checkpointed * itemsize * size.hidden + (size.layers - checkpointed) * block
    return batch.tokens * (blocks + last)


def at_work(
    size: ModelSize, batch: MicroBatch, block: int, *, checkpointed: int, expands: bool, itemsize: int = BF16
) -> tuple[int, int]:
    """Return the peak bytes of (one block, the head) beside what is kept; ``expands`` says that weights are 4-bit.

    The first ``checkpointed`` blocks recompute. Where others keep their tensors, these are free by then, and a
    recomputed block takes the place of one of them.
    """
    recomputed = batch.at_once * block if checkpointed == size.layers else 0
    expanded = max(linear.N * linear.K for linear in size.linears) * BF16 if expands else 0
    working = batch.at_once * size.intermediate * WORKING_COPIES * itemsize + expanded
    in_experts = [_in_experts(layer, batch, expands, itemsize) for layer in size.experts]
    mask = batch.rows * batch.length**2
    # the head has two chunks of fp32 logits, a BF16 gradient, and two BF16 hidden states
    rows = max(1, CHUNK_BYTES // (FP32 * size.vocabulary))
    head = min(batch.scored, 2 * rows) * FP32 * size.vocabulary
    head += BF16 * (min(batch.scored, rows) * size.vocabulary + 2 * batch.scored * size.hidden)
    return recomputed + mask + max([working, *in_experts]), head


def _in_experts(layer: ExpertsSize, batch: MicroBatch, expands: bool, itemsize: int) -> int:
    """Return the peak bytes of one layer of experts.

    Quantized experts have gate and up of all experts expanded. First come the gradients of the outputs, with three rows
    per token in fp32, then those of the product, of gate and of up. Dense ones hold the weighted outputs in fp32 twice.
    """
    if expands and layer.quantized:
        of_outputs = layer.used * layer.hidden * itemsize + 3 * FP32 * layer.hidden
        of_product = layer.used * (3 * layer.inner - layer.hidden) * itemsize
        gradients = max(of_outputs, of_product) + 2 * itemsize * layer.hidden
        return 2 * layer.count * layer.inner * layer.hidden * BF16 + batch.at_once * gradients
    return batch.at_once * layer.used * (2 * FP32 * layer.hidden + 2 * layer.inner * itemsize)


@dataclass(frozen=True)
class Engine:
    """Hold the bytes of a rollout engine on one GPU; ``rank`` is the adapter's, ``itemsize`` of its numbers."""

    size: ModelSize
    training: GRPOConfig
    gpu: Gpu
    rank: int
    itemsize: int = BF16

    @property
    def layout(self) -> str:
        """Return the layout in which the engine holds NVFP4 weights, "tiled" or "marlin"."""
        return "tiled" if self.gpu.is_hopper and self.itemsize == BF16 else "marlin"

    @property
    def weights(self) -> int:
        held = engine_weights(self.size, self.training.quantization, self.itemsize)
        return held // self.training.vllm_tensor_parallel_size

    @property
    def adapter(self) -> int:
        room = resident_adapter if self.training.quantization == "qerl_nvfp4" else adapter_slots
        return room(self.size, engine_rank(self.rank), self.itemsize) // self.training.vllm_tensor_parallel_size

    @property
    def scratch(self) -> int:
        expands = self.training.quantization != "bf16"
        drafts = self.training.vllm_speculative_config
        drafted = drafts.get("num_speculative_tokens", 0) if isinstance(drafts, dict) else 0
        rows = sequences(self.training) * (1 + drafted)
        return engine_scratch(self.size, rows, expands=expands, itemsize=self.itemsize)

    @property
    def beside_cache(self) -> int:
        return self.weights + self.adapter + self.scratch + GRAPHS

    @property
    def cache(self) -> int:
        """Return the bytes of the KV cache: the recipe's, or the rest of the engine's share, which may be negative."""
        if self.training.vllm_kv_cache_memory_bytes is not None:
            return self.training.vllm_kv_cache_memory_bytes
        return int(self.training.vllm_gpu_memory_utilization * self.gpu.memory) - self.beside_cache

    @property
    def token(self) -> int:
        return cache_of_a_token(self.size, self.training.vllm_tensor_parallel_size, self.itemsize)


def sequences(training: GRPOConfig) -> int:
    """Return the number of sequences that one engine samples in a rollout, for all of its tensor-parallel ranks."""
    per_process = training.per_device_train_batch_size * (training.steps_per_generation or 1)
    return per_process * training.vllm_tensor_parallel_size


def cache_of_a_token(size: ModelSize, tensor_parallel: int, itemsize: int) -> int:
    """Return the bytes of a token in one GPU's KV cache: keys and values of all layers, of ``itemsize`` each."""
    return 2 * size.layers * -(-size.kv_heads // tensor_parallel) * size.head_dim * itemsize


def engine_scratch(
    size: ModelSize, rows: int, *, expands: bool, itemsize: int = BF16, tokens: int = ENGINE_TOKENS
) -> int:
    """Return the bytes that vLLM's profiling run will measure: the widest layer on ``tokens`` tokens, and the sampler.

    ``rows`` are those of the sampler's logits: one a sequence and one a drafted token. With ``expands`` the largest
    piece of a 4-bit weight that the engine expands at a time is added.
    """
    # gate, up, their product and the outputs, for every expert that a token goes through
    in_experts = [layer.used * (3 * layer.inner + layer.hidden) for layer in size.experts]
    hidden = tokens * max([3 * size.intermediate + 4 * size.hidden, *in_experts]) * itemsize
    sampler = rows * size.vocabulary * FP32 * SAMPLER_COPIES
    slab = max(slab_rows(sum(part.N for part in parts)) * parts[0].K for parts in size.fused) * BF16
    return hidden + sampler + (slab if expands else 0)
