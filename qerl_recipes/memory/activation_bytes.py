"""Estimates temporary memory: the trainer's activations and logits, and the engine's scratch.

The trainer's part counts the tensors that PyTorch saves in one block of a Llama-like model on a GPU, with LoRA in fp32.
The block has a gated MLP or experts, as all model families that are trained here; a test counts the tensors for real.
Further temporary tensors are counted at their peak.
"""

from dataclasses import dataclass

from qerl_kernels.linear_logprob import CHUNK_BYTES
from qerl_kernels.linear_tiles import slab_rows
from qerl_kernels.nvfp4 import GROUP_SIZE
from qerl_kernels.wide import columns

from qerl_recipes.memory.model_size import ExpertsSize, ModelSize

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
    """The sizes of one micro-batch of the trainer.

    ``tokens`` is the number of computed tokens. At most ``at_once`` of them go through the model together, and
    ``scored`` of those through the head. ``rows`` sequences are padded to ``length`` tokens; 0 means packed, without a
    mask. Completions that share a prompt each attend to it, though it is computed once. ``attended`` is the number of
    tokens that the attention sees, divided by ``tokens``.
    """

    tokens: int
    at_once: int
    scored: int
    rows: int
    length: int
    attended: float = 1.0


def saved_in_a_block(
    size: ModelSize,
    rank: int,
    targets: int,
    padded_to: int = 0,
    *,
    autocast: bool = True,
    itemsize: int = BF16,
    attended: float = 1.0,
    at_once: bool = False,
    widens: bool = False,
) -> int:
    """Return the bytes per token that one block saves for its backward.

    * ``targets``: the number of linears of a block that carry the adapter.
    * ``padded_to``: the length of a padded sequence, or 0 for packed rows without a mask. With a mask, the attention
      saves the mask, and k and v for every query head.
    * ``autocast``: autocast to BF16 is on and model/lora.py computes the adapter. Without it PEFT does, in fp32.
    * ``itemsize``: bytes of a number in the model's dtype.
    * ``attended``: tokens that the attention sees per computed token, above 1 if prompts are shared.
    * ``at_once``: one attention call takes all sequences of a packed row, as on a GPU in 16 bits
      (attention.py). Of a shared prompt, only keys and values are then kept more than once, and the outputs of
      the sequences need no concatenation.
    * ``widens``: the frozen weights are NVFP4, and each row of down_proj's input has spare columns for the adapter.
    """
    H, I, Q, KV = size.hidden, size.intermediate, size.heads * size.head_dim, size.kv_heads * size.head_dim  # noqa: E741
    width, lora_width = (BF16, BF16) if autocast else (itemsize, FP32)  # bytes of an activation, of an adapter's input
    norms = 2 * (itemsize * H + FP32)  # the input, and one number per token
    if len(size.norms) > 2 * size.layers + 1:  # the model has norms on q and k
        norms += width * (Q + KV) + FP32 * (size.heads + size.kv_heads)
    is_cast = autocast != (itemsize == BF16)  # the input of an adapter is cast, to a tensor of its own
    # q, k and v share one saved input, and gate and up another. A cast input is shared only if one function computes
    # them all. model/lora.py does so under autocast, for q, k and v only in packed rows.
    qkv = 3 if is_cast and (padded_to or not autocast) else 1
    # The input of o_proj is a new tensor if a packed row concatenates the attention outputs of its sequences.
    inputs = qkv * H + (Q if not (padded_to or at_once) or (is_cast and not autocast) else 0)
    gated = 2 * width * I  # gate, up
    if size.experts:  # experts carry no adapter
        gated = max(_saved_by_experts(layer, width) for layer in size.experts)
    else:
        inputs += (2 if is_cast and not autocast else 1) * H + I
        gated += width * (columns(rank)[1] - rank) if widens and autocast else 0
    adapter_inputs = lora_width * inputs * targets // (4 if size.experts else 7) + lora_width * rank * targets
    attention = FP32 * size.heads + width * (4 * Q + padded_to if padded_to else 2 * Q + 2 * KV)  # q, k, v, output
    if at_once:
        return norms + adapter_inputs + FP32 * size.heads + width * (2 * Q + int(attended * 2 * KV)) + gated
    return norms + adapter_inputs + int(attended * attention) + gated


def _saved_by_experts(layer: ExpertsSize, width: int) -> int:
    """Return the bytes per token that a layer of experts saves.

    They are gate, up and output of each expert that the token goes through, its places in the sorted rows, and the
    router's probabilities.
    """
    return layer.used * (width * (2 * layer.inner + layer.hidden) + 3 * INT64) + 2 * FP32 * layer.count


def kept(size: ModelSize, batch: MicroBatch, block: int, *, checkpointed: int, itemsize: int = BF16) -> int:
    """Return the bytes that stay from the forward to the backward.

    A checkpointed block keeps the hidden state before it, and any other block keeps all its saved tensors.
    ``block`` is the bytes per token that one block saves, and ``checkpointed`` the number of checkpointed blocks.
    ``itemsize`` is the bytes of a number in the model's dtype.
    """
    last = 4 * BF16 * size.hidden + FP32  # for the last norm and the head, whose gradient the forward prepares
    blocks = checkpointed * itemsize * size.hidden + (size.layers - checkpointed) * block
    return batch.tokens * (blocks + last)


def at_work(
    size: ModelSize,
    batch: MicroBatch,
    block: int,
    *,
    checkpointing: bool,
    expands: bool,
    rearranges: bool = False,
    itemsize: int = BF16,
) -> tuple[int, int]:
    """Return the peak bytes of (one block, the head) beside what is kept.

    ``expands``: the frozen weights are 4-bit, and each is expanded while a product uses it. ``rearranges``: each is
    first converted from Marlin's layout to the checkpoint's. ``itemsize`` is the bytes of a number in the model's
    dtype.
    """
    recomputed = batch.at_once * block if checkpointing else 0
    weights = max(linear.N * linear.K for linear in size.linears)
    widest = (weights * BF16 if expands else 0) + (weights // 2 + weights // GROUP_SIZE if rearranges else 0)
    mask = batch.rows * batch.length**2
    working = batch.at_once * size.intermediate * WORKING_COPIES * itemsize + widest
    in_experts = [_in_experts(layer, batch, expands, itemsize) for layer in size.experts]
    in_block = recomputed + mask + max([working, *in_experts])
    return in_block, _head(size, batch)


def _in_experts(layer: ExpertsSize, batch: MicroBatch, expands: bool, itemsize: int) -> int:
    """Return the peak bytes of one layer of experts.

    Quantized experts have gate and up of all experts expanded, and gradients. First come the gradients of the outputs,
    with three rows per token in fp32. Then, when these are free, come the gradients of the product, of gate and of up.
    Dense experts are computed by transformers, which holds the weighted outputs in fp32 twice.
    """
    if expands and layer.quantized:
        of_outputs = layer.used * layer.hidden * itemsize + 3 * FP32 * layer.hidden
        of_product = layer.used * (3 * layer.inner - layer.hidden) * itemsize
        gradients = max(of_outputs, of_product) + 2 * itemsize * layer.hidden
        return 2 * layer.count * layer.inner * layer.hidden * BF16 + batch.at_once * gradients
    return batch.at_once * layer.used * (2 * FP32 * layer.hidden + 2 * layer.inner * itemsize)


def _head(size: ModelSize, batch: MicroBatch) -> int:
    """Return the peak bytes of the head: a chunk of fp32 logits, its BF16 gradient, and two BF16 hidden states.

    With more than one chunk, the logits of two chunks are held at a time.
    """
    row_bytes = FP32 * size.vocabulary
    rows = max(1, CHUNK_BYTES // row_bytes)
    if batch.scored > rows:
        chunk = rows * (2 * row_bytes + BF16 * size.vocabulary)
    else:
        chunk = batch.scored * (row_bytes + BF16 * size.vocabulary)
    return chunk + batch.scored * size.hidden * 2 * BF16


def engine_scratch(
    size: ModelSize, sequences: int, *, expands: bool, itemsize: int = BF16, tokens: int = ENGINE_TOKENS
) -> int:
    """Return the bytes that vLLM's profiling run will measure: the widest layer on ``tokens`` tokens, and the sampler.

    ``sequences`` is the batch size of the sampler. ``expands`` says that the frozen weights are 4-bit.
    """
    hidden = tokens * (3 * size.intermediate + 4 * size.hidden) * itemsize
    # gate, up, their product and the outputs, for every expert that a token goes through
    in_experts = [tokens * x.used * (3 * x.inner + x.hidden) * itemsize for x in size.experts]
    hidden = max([hidden, *in_experts])
    sampler = sequences * size.vocabulary * FP32 * SAMPLER_COPIES
    return hidden + sampler + (_slab(size) if expands else 0)


def _slab(size: ModelSize) -> int:
    """Return the bytes of the largest piece of a weight that the engine expands at a time.

    The engine fuses q, k and v into one weight, and gate and up into another.
    """
    H, I, Q, KV = size.hidden, size.intermediate, size.heads * size.head_dim, size.kv_heads * size.head_dim  # noqa: E741
    return max(slab_rows(N) * K for N, K in ((Q + 2 * KV, H), (H, Q), (2 * I, H), (H, I))) * BF16
