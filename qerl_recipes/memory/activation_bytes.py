"""Estimates of what comes and goes: the trainer's activations and logits, the engine's scratch.

The trainer's part counts the tensors that PyTorch saves in one block of a Llama-like model, with a gated MLP or with
experts (all the families that are trained here), on a GPU, with PEFT's LoRA in fp32; a test counts them for real. What
comes and goes beside them is counted where it is most.
"""

from dataclasses import dataclass

from qerl_kernels.linear_logprob import CHUNK_BYTES
from qerl_kernels.linear_tiles import slab_rows
from qerl_kernels.nvfp4 import GROUP_SIZE
from qerl_kernels.wide import columns

from qerl_recipes.memory.model_size import ExpertsSize, ModelSize

FP32, BF16, INT64 = 4, 2, 8
ENGINE_TOKENS = 4096  # the most that the engine computes at once: rollout's max_num_batched_tokens
SAMPLER_COPIES = 3  # of the logits, in fp32: processed, sorted, log-softmax
GRAPHS = 600_000_000  # CUDA graphs of the engine; vLLM reports 0.3 to 0.7 GiB for batches of 64 to 256
# widest activations that the backward of a block needs beside what was saved: at the input of down_proj the gradients
# through the adapter and through the frozen weight and their sum, less the input itself, which is free by then. The
# scales of a frozen weight go into cuBLAS and cost no copy.
WORKING_COPIES = 2


@dataclass(frozen=True)
class MicroBatch:
    """What the trainer computes between two backwards.

    ``tokens`` in all, of which at most ``at_once`` go through the model together, ``scored`` of them through the head;
    ``rows`` of ``length`` tokens are padded to a batch (0: packed, without a mask). Where completions share a prompt,
    each still attends to it: ``attended`` is how many tokens the attention sees for each that is computed.
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
    """Bytes a token that the backward of one block keeps.

    ``targets``: linears of a block that carry the adapter. ``padded_to``: tokens of a padded sequence, whose mask makes
    the attention keep k and v for every query head, and the mask; 0: packed, without a mask. ``autocast``: to BF16,
    with the adapter computed by ``fused_lora``; without it PEFT computes the adapter in fp32. ``itemsize``: that of the
    model's dtype. ``attended``: tokens that the attention sees for each, above 1 where prompts are shared. ``at_once``:
    one call of the attention takes all sequences of a packed row, as on a GPU in 16 bits (packed_attention.py), so that
    of a shared prompt keys and values alone are kept more than once, and nothing is put together afterwards.
    ``widens``: the frozen weights are NVFP4, and behind each row of down_proj's input is room for the adapter's part.
    """
    H, I, Q, KV = size.hidden, size.intermediate, size.heads * size.head_dim, size.kv_heads * size.head_dim  # noqa: E741
    width, taken = (BF16, BF16) if autocast else (itemsize, FP32)  # of an activation, and of what an adapter takes
    norms = 2 * (itemsize * H + FP32)  # the input, and one number
    if len(size.norms) > 2 * size.layers + 1:  # with norms on q and k
        norms += width * (Q + KV) + FP32 * (size.heads + size.kv_heads)
    is_cast = autocast != (itemsize == BF16)  # the input of an adapter, which is then a tensor of its own
    # q, k, v share one, and gate, up another: where it is cast, too, if one function computes them, as fused_lora does
    # under autocast, for q, k, v in packed rows alone
    qkv = 3 if is_cast and (padded_to or not autocast) else 1
    # o_proj takes the attention's output, which a packed row puts together from that of its sequences
    inputs = qkv * H + (Q if not (padded_to or at_once) or (is_cast and not autocast) else 0)
    gated = 2 * width * I  # gate, up
    if size.experts:  # which carry no adapter
        gated = max(_saved_by_experts(layer, width) for layer in size.experts)
    else:
        inputs += (2 if is_cast and not autocast else 1) * H + I
        gated += width * (columns(rank)[1] - rank) if widens and autocast else 0
    adapter_inputs = taken * inputs * targets // (4 if size.experts else 7) + taken * rank * targets
    attention = FP32 * size.heads + width * (4 * Q + padded_to if padded_to else 2 * Q + 2 * KV)  # q, k, v, output
    if at_once:
        return norms + adapter_inputs + FP32 * size.heads + width * (2 * Q + int(attended * 2 * KV)) + gated
    return norms + adapter_inputs + int(attended * attention) + gated


def _saved_by_experts(layer: ExpertsSize, width: int) -> int:
    """Bytes a token: gate and up and the output of each expert that it goes through, its places in the sorted rows, the
    router's probabilities."""
    return layer.used * (width * (2 * layer.inner + layer.hidden) + 3 * INT64) + 2 * FP32 * layer.count


def kept(size: ModelSize, batch: MicroBatch, block: int, *, checkpointed: int, itemsize: int = BF16) -> int:
    """What stays from forward to backward: the hidden state before each checkpointed block, all that the others saved.

    ``block``: bytes a token of one block; ``checkpointed``: how many blocks are; ``itemsize``: of the model's dtype.
    """
    last = 4 * BF16 * size.hidden + FP32  # of the last norm and of the head, whose gradient the forward prepares
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
    """The most that one block, and that the head, needs beside what is kept -> (block, head), bytes.

    ``expands``: the frozen weights are 4-bit, and each is expanded for the length of a product. ``rearranges``: each is
    brought from Marlin's layout into the checkpoint's before that. ``itemsize``: that of the model's dtype.
    """
    again = batch.at_once * block if checkpointing else 0
    weights = max(linear.N * linear.K for linear in size.linears)
    widest = (weights * BF16 if expands else 0) + (weights // 2 + weights // GROUP_SIZE if rearranges else 0)
    mask = batch.rows * batch.length**2
    working = batch.at_once * size.intermediate * WORKING_COPIES * itemsize + widest
    in_block = again + mask + max([working, *(_in_experts(layer, batch, expands, itemsize) for layer in size.experts)])
    return in_block, _head(size, batch)


def _in_experts(layer: ExpertsSize, batch: MicroBatch, expands: bool, itemsize: int) -> int:
    """One layer of experts at work: gate and up of all of them expanded, and the gradients, first of the outputs with
    three rows in fp32, then of the product, gate and up, when the outputs are free. Dense ones are transformers', whose
    weighted outputs are in fp32 twice.
    """
    if expands and layer.quantized:
        of_outputs = layer.used * layer.hidden * itemsize + 3 * FP32 * layer.hidden
        of_product = layer.used * (3 * layer.inner - layer.hidden) * itemsize
        gradients = max(of_outputs, of_product) + 2 * itemsize * layer.hidden
        return 2 * layer.count * layer.inner * layer.hidden * BF16 + batch.at_once * gradients
    return batch.at_once * layer.used * (2 * FP32 * layer.hidden + 2 * layer.inner * itemsize)


def _head(size: ModelSize, batch: MicroBatch) -> int:
    """Chunks of logits in fp32 and their gradient in BF16, two of each where there is a next chunk; hidden states."""
    a_row = FP32 * size.vocabulary
    rows = max(1, CHUNK_BYTES // a_row)
    if batch.scored > rows:
        chunk = rows * (2 * a_row + BF16 * size.vocabulary)
    else:
        chunk = batch.scored * (a_row + BF16 * size.vocabulary)
    return chunk + batch.scored * size.hidden * 2 * BF16


def engine_scratch(
    size: ModelSize, sequences: int, *, expands: bool, itemsize: int = BF16, tokens: int = ENGINE_TOKENS
) -> int:
    """What vLLM's profiling run will find: the widest layer of a full batch of ``tokens``, and the sampler."""
    hidden = tokens * (3 * size.intermediate + 4 * size.hidden) * itemsize
    # gate and up, their product, and the outputs of every expert that a token goes through
    in_experts = [tokens * x.used * (3 * x.inner + x.hidden) * itemsize for x in size.experts]
    hidden = max([hidden, *in_experts])
    sampler = sequences * size.vocabulary * FP32 * SAMPLER_COPIES
    return hidden + sampler + (_slab(size) if expands else 0)


def _slab(size: ModelSize) -> int:
    """The largest piece of a weight that the engine expands at one time; q, k, v and gate, up are one weight there."""
    H, I, Q, KV = size.hidden, size.intermediate, size.heads * size.head_dim, size.kv_heads * size.head_dim  # noqa: E741
    return max(slab_rows(N) * K for N, K in ((Q + 2 * KV, H), (H, Q), (2 * I, H), (H, I))) * BF16
