"""Test a plan's estimates against real tensors: what a forward saves for its backward, and what is alive in it."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from qerl_kernels import nvfp4
from transformers import AutoConfig, AutoModelForCausalLM

from qerl_recipes.files.base_model import read_config
from qerl_recipes.memory import estimates
from qerl_recipes.memory.sizes import ModelSize, adapter_elements, measure
from qerl_recipes.model import attention, frozen, logprobs, lora, norms, rounding
from qerl_recipes.model.attention import Spans
from qerl_recipes.model.frozen import FrozenNVFP4Experts, FrozenNVFP4Linear, PackedExperts
from qerl_recipes.model.packing import pack
from qerl_recipes.recipe import shapes

KINDS = ("qwen2", "qwen3", "llama", "qwen3_moe")
TOKENS = 512


class MLPOnAGpu(rounding.GatedMLP):
    """Compute what a GatedMLP computes on a GPU, by the CPU reference of the same operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return lora.gated(*lora.together(x, self.gate_proj, self.up_proj), self.down_proj)


def small(kind: str, layers: int) -> Any:
    return AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=256,
        intermediate_size=1280,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        **({"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 384} if kind == "qwen3_moe" else {}),
    )


def packed_experts(module: Any) -> FrozenNVFP4Experts:
    """Return packed experts with some of the shapes of ``module``."""

    def packed(w: torch.Tensor, parts: int) -> PackedExperts:
        each = [nvfp4.quantize(expert) for expert in w.data]
        divisors = torch.stack([p.divisor.expand(parts) for p in each])
        return PackedExperts(
            torch.stack([p.codes for p in each]), torch.stack([p.block_scales for p in each]), divisors
        )

    return FrozenNVFP4Experts(packed(module.gate_up_proj, 2), packed(module.down_proj, 1))


def policy_of(config: Any, dtype: torch.dtype, *, autocast: bool) -> Any:
    """Return a random model as the trainer has it, with an adapter of rank 16 in fp32."""
    torch.manual_seed(0)  # A CPU runs one expert after another, so the routing of tokens decides what is alive.
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight, (parent, _, leaf) = nvfp4.quantize(module.weight.data), name.rpartition(".")
            parts = (weight.codes, weight.block_scales, weight.divisor, module.bias, dtype)
            setattr(model.get_submodule(parent), leaf, FrozenNVFP4Linear(*parts))
    norms.replace(model, rounded=False)
    is_mixture = config.model_type == "qwen3_moe"
    for name, module in frozen.dense_experts(model):
        model.set_submodule(name, packed_experts(module))
    replaced = rounding.replace_mlps(model), frozen.replace_routers(model)
    assert replaced == ((0, config.num_hidden_layers) if is_mixture else (config.num_hidden_layers, 0))
    model.requires_grad_(False)
    targets = list(shapes.ATTENTION) if is_mixture else "all-linear"
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
    policy = get_peft_model(model, adapter)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if autocast:
        assert lora.install(policy, "default") == (4 if is_mixture else 7) * config.num_hidden_layers
    return policy


class FlashAttention(torch.autograd.Function):
    """Save what PyTorch's does: queries, keys, values, output and one number per head and query."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = query.clone(memory_format=torch.contiguous_format)
        ctx.save_for_backward(query, key, value, out, torch.zeros(query.shape[1], query.shape[0]))
        return out


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make MLPs and the attention of a packed row save what they save on a GPU."""
    arguments = logprobs._arguments

    def with_spans(base: Any, row: Any) -> dict[str, Any]:
        return arguments(base, row) | {"spans": Spans.of(row.segments, torch.device("cpu"))}

    monkeypatch.setattr(rounding, "GatedMLP", MLPOnAGpu)
    monkeypatch.setattr(logprobs, "_arguments", with_spans)
    monkeypatch.setattr(attention, "varlen_attn", lambda *a, **k: FlashAttention.apply(*a[:3]))


def saved_bytes(
    kind: str, layers: int, *, padded: bool, autocast: bool, dtype: torch.dtype, shared: int
) -> tuple[int, ModelSize]:
    """Return the bytes that a forward saves for its backward, without weights, and the size of the model.

    The tokens are one padded sequence, two packed ones, or three that share a prompt of ``shared`` tokens.
    """
    config = small(kind, layers)
    policy = policy_of(config, dtype, autocast=autocast)
    own = {t.untyped_storage().data_ptr() for t in (*policy.parameters(), *policy.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            saved[address] = tensor  # kept alive, so that no other tensor gets its address
        return tensor

    ids = torch.randint(2, 60, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    keeping = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
    casting = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    if padded:
        mask = (torch.arange(TOKENS) >= 7).long()[None]
        with keeping, casting:
            policy.get_base_model().model(ids, attention_mask=mask, use_cache=False)
    else:
        assert logprobs.prepare(policy) is None
        sequences = ids.view(2, -1)
        completion = sequences.shape[1] - 1
        if shared:
            ends = ids[0, shared:].view(3, -1)
            sequences, completion = torch.cat([ids[:, :shared].expand(3, -1), ends], dim=1), ends.shape[1]
        rows = pack(sequences, torch.ones_like(sequences), completion, TOKENS, share_prompts=True)
        assert len(rows) == 1 and rows[0].tokens.shape[1] == TOKENS
        with keeping:
            logprobs.completion_logprobs(policy, policy, rows, (len(sequences), completion), 1.0, lambda: casting)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()), measure(config.to_dict())


BF16, FP32 = torch.bfloat16, torch.float32
EXACT, COARSE = 0.01, 0.1


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("kind", "padded", "autocast", "dtype", "shared", "within"),
    [
        *((kind, kind == "qwen3", True, BF16, 0, EXACT) for kind in KINDS),
        ("qwen2", False, True, BF16, 128, EXACT),
        ("qwen2", True, False, BF16, 0, EXACT),
        ("qwen2", False, False, FP32, 0, COARSE),
        ("qwen2", True, True, FP32, 0, COARSE),
    ],
)
def test_a_block_keeps_what_pytorch_saves(
    kind: str, padded: bool, autocast: bool, dtype: torch.dtype, shared: int, within: float
) -> None:
    """Compare the estimate with what the second layer of a model adds."""
    options: Any = {"padded": padded, "autocast": autocast, "dtype": dtype, "shared": shared}
    (one, size), (two, _) = (saved_bytes(kind, layers, **options) for layers in (1, 2))
    # The plan counts the BF16 copy of one block's adapter elsewhere.
    casts = 2 * adapter_elements(size.linears, 16) if autocast else 0
    batch = estimates.MicroBatch(TOKENS, TOKENS, TOKENS, int(padded), TOKENS, 1 + 2 * shared / TOKENS)
    options = {"autocast": autocast, "itemsize": dtype.itemsize}
    estimate = estimates.saved_in_a_block(size, batch, 16, 4 if size.experts else 7, **options)
    assert (two - one - casts) / TOKENS == pytest.approx(estimate, rel=within)


def test_the_head_needs_what_was_measured_on_an_h200() -> None:
    """Compare with 1.37 GiB measured for linear_logprob with its backward.

    It was measured on 8192 tokens of the 7B model; see kernels/results/README.md.
    """
    batch = estimates.MicroBatch(8192, 8192, 8192, 0, 8192)
    size = measure(read_config("Qwen/Qwen2.5-7B-Instruct"))
    _, head = estimates.at_work(size, batch, 0, checkpointed=size.layers, expands=False)
    assert head / 2**30 == pytest.approx(1.37, abs=0.02)
