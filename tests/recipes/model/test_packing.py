"""Test that packed rows compute what a padded batch does."""

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from qerl_kernels import linear_logprob as kernel
from torch.profiler import ProfilerActivity, profile
from trl.trainer.utils import add_fused_lm_head

from qerl_recipes.model import attention, logprobs
from qerl_recipes.model import loading as model
from qerl_recipes.model.packing import pack

ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral")
P, C = 7, 9  # columns of prompts and of completions
TEMPERATURE = 0.7


@pytest.fixture
def batch():
    """Return four left-padded prompts, two of them with several completions.

    Some completions have one token, some fill the width, and one is masked out.
    """
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 64, (n,), generator=generator) for n in (P, 1, 4, 3)]
    of_prompt, lengths = (0, 0, 0, 1, 2, 2, 3), (C, 1, 4, 2, 0, C, 1)
    ids = torch.zeros(len(lengths), P + C, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, length) in enumerate(zip(of_prompt, lengths, strict=True)):
        ids[row, P - len(prompts[prompt]) : P] = prompts[prompt]
        ids[row, P : P + length] = torch.randint(2, 64, (length,), generator=generator)
        mask[row, P - len(prompts[prompt]) : P + length] = 1
    return ids, mask


def policy(folder, quantization="qerl_nvfp4", dtype=torch.float32, **options):
    loaded = model.load(folder, dtype, quantization=quantization, **options)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    add_fused_lm_head(loaded, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    torch.manual_seed(1)
    adapted = get_peft_model(loaded, lora)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return adapted


def padded(adapted, ids, mask):
    """Compute as TRL does: the padded batch through TRL's fused head."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-C] = -100
    out = adapted(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    return out.log_probs[:, -C:], out.entropy[:, -C:]


def packed(adapted, rows, shape):
    return logprobs.completion_logprobs(adapted, adapted, rows, shape, TEMPERATURE, contextlib.nullcontext)


def with_gradients(adapted, results):
    generator = torch.Generator().manual_seed(5)
    loss = sum((values * torch.randn(values.shape, generator=generator)).sum() for values in results)
    adapted.zero_grad()
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in adapted.named_parameters() if weight.requires_grad}
    return [values.detach() for values in results], gradients


def assert_same(one, other, tolerance=2e-5):
    for mine, theirs in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert one[1].keys() == other[1].keys()
    for name, theirs in other[1].items():
        assert float(theirs.abs().max()) > 0, name
        torch.testing.assert_close(one[1][name], theirs, rtol=0, atol=5e-5 * float(theirs.abs().max()), msg=name)


# Tokens of each row, by hand. Prompts of 7, 1, 4 and 3 tokens go with completions of 9 + 4 + 1, 2, 9 and 1. One by one
# each pays for its own prompt; in 24 tokens 7 + 14 goes with 1 + 2, and 4 + 9 with 3 + 1.
ROWS = {1: [16, 13, 11, 8, 4, 3], 24: [24, 17], 10_000: [41]}


@pytest.mark.parametrize("pack_tokens", ROWS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_results_are_those_of_the_padded_batch(architecture, pack_tokens, batch, make_nvfp4):
    ids, mask = batch
    adapted = policy(make_nvfp4(architecture))
    expected = with_gradients(adapted, padded(adapted, ids, mask))
    assert logprobs.prepare(adapted) is None
    assert logprobs.shares_prompts(adapted)
    rows = pack(ids, mask, C, pack_tokens, share_prompts=True)
    assert sorted((row.tokens.shape[1] for row in rows), reverse=True) == ROWS[pack_tokens]
    assert_same(with_gradients(adapted, packed(adapted, rows, (len(ids), C))), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, batch, make_nvfp4):
    ids, mask = batch
    adapted = policy(make_nvfp4("qwen2"))
    logprobs.prepare(adapted)
    rows = pack(ids, mask, C, 24, share_prompts=True)
    expected = with_gradients(adapted, packed(adapted, rows, (len(ids), C)))
    adapted.gradient_checkpointing_enable({"use_reentrant": reentrant})
    adapted.enable_input_require_grads()
    adapted.train()
    assert_same(with_gradients(adapted, packed(adapted, rows, (len(ids), C))), expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_mask_from_positions_keeps_sequences_apart(implementation, batch, make_nvfp4):
    ids, mask = batch
    adapted = policy(make_nvfp4("qwen2"), attn_implementation=implementation)
    expected = with_gradients(adapted, padded(adapted, ids, mask))
    if implementation == "eager":
        assert logprobs.prepare(adapted) is None
    assert not logprobs.shares_prompts(adapted)
    rows = pack(ids, mask, C, 10_000, share_prompts=False)
    assert_same(with_gradients(adapted, packed(adapted, rows, (len(ids), C))), expected)


def test_a_sliding_window_is_that_of_the_padded_batch(batch, make_nvfp4):
    ids, mask = batch
    adapted = policy(make_nvfp4("mistral", sliding_window=5))
    expected = with_gradients(adapted, padded(adapted, ids, mask))
    unlimited = policy(make_nvfp4("mistral"))
    assert float((padded(unlimited, ids, mask)[0] - expected[0][0]).detach().abs().max()) > 1e-2
    logprobs.prepare(adapted)
    rows = pack(ids, mask, C, 24, share_prompts=True)
    assert_same(with_gradients(adapted, packed(adapted, rows, (len(ids), C))), expected)


def test_bf16_does_not_depend_on_the_padding(batch, make_nvfp4):
    ids, mask = batch
    adapted = policy(make_nvfp4("qwen2"), dtype=torch.bfloat16)
    more = [torch.nn.functional.pad(tensor, (5, 0)) for tensor in batch]
    logprobs.prepare(adapted)
    numbers = [
        packed(adapted, pack(*tensors, C, 24, share_prompts=True), (len(ids), C))[0].detach()
        for tensors in ((ids, mask), more)
    ]
    assert torch.equal(*numbers)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", ["bf16", "qerl_nvfp4"])
def test_tied_and_untied_heads_of_either_arm(tied, quantization, batch, make_bf16):
    ids, mask = batch
    adapted = policy(make_bf16("qwen2", tie_word_embeddings=tied), quantization)
    expected = with_gradients(adapted, padded(adapted, ids, mask))
    assert logprobs.prepare(adapted) is None
    rows = pack(ids, mask, C, 10_000, share_prompts=True)
    assert_same(with_gradients(adapted, packed(adapted, rows, (len(ids), C))), expected)


def test_a_batch_without_completions_has_a_zero_gradient(batch, make_nvfp4):
    ids, mask = batch
    mask[:, -C:] = 0
    adapted = policy(make_nvfp4("qwen2"))
    logprobs.prepare(adapted)
    rows = pack(ids, mask, C, 10_000, share_prompts=True)
    results, gradients = with_gradients(adapted, packed(adapted, rows, (len(ids), C)))
    assert all(values.shape == (len(ids), C) and not values.any() for values in results)
    assert gradients
    assert not any(gradient.any() for gradient in gradients.values())


def test_a_completion_without_a_prompt_is_refused(batch):
    ids, mask = batch
    mask[3, :-C] = 0
    with pytest.raises(ValueError, match="sequence 3 of the batch has no prompt"):
        pack(ids, mask, C, 24, share_prompts=True)


class ScaledHead(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) / 8


HEADS = [
    (lambda old: torch.nn.Linear(*old.weight.shape[::-1], bias=True), "has a bias"),
    (lambda old: torch.nn.Linear(*old.weight.shape[::-1], bias=False), "is trained"),
    (lambda old: torch.nn.Sequential(old), "not a plain linear layer"),
    (lambda old: ScaledHead(*old.weight.shape[::-1], bias=False).requires_grad_(False), "not the product"),
]


@pytest.mark.parametrize(("head", "reason"), HEADS, ids=["bias", "trained", "sequential", "scaled"])
def test_a_head_that_is_no_frozen_matrix_is_an_obstacle(head, reason, make_nvfp4):
    loaded = model.load(make_nvfp4("qwen2"), torch.float32)
    loaded.lm_head = head(loaded.lm_head)
    assert reason in logprobs.prepare(loaded)
    assert loaded.config._attn_implementation == "sdpa"


def test_an_unknown_attention_is_an_obstacle(make_nvfp4):
    loaded = model.load(make_nvfp4("qwen2"), torch.float32)
    attention.AttentionInterface.register("from_elsewhere_sdpa", attention.attention)
    loaded.set_attn_implementation("from_elsewhere_sdpa")
    assert "from_elsewhere_sdpa" in logprobs.prepare(loaded)


def test_no_tensor_holds_every_token_times_the_vocabulary(make_nvfp4, monkeypatch):
    V, tokens = 2048, 300
    monkeypatch.setattr(kernel, "CHUNK_BYTES", 4 * V * 16)  # 16 tokens of fp32 logits
    adapted = policy(make_nvfp4("qwen2", vocab_size=V))
    logprobs.prepare(adapted)
    ids = torch.randint(2, V, (2, P + tokens // 2), generator=torch.Generator().manual_seed(0))
    rows = pack(ids, torch.ones_like(ids), tokens // 2, 10_000, share_prompts=True)

    def largest(run):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
        return max(event.self_cpu_memory_usage for event in profiler.events())  # bytes that one operation allocated

    seen = largest(lambda: with_gradients(adapted, packed(adapted, rows, (2, tokens // 2))))
    assert seen < 4 * tokens * V / 4
    whole = largest(lambda: adapted(input_ids=ids).logits)
    assert whole >= 4 * tokens * V  # control: whole logits are larger


lengths = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, P), st.integers(0, C)), min_size=1, max_size=8
)  # prompt number, prompt tokens, completion tokens


@given(lengths, st.integers(1, 60), st.booleans())
@settings(max_examples=60, deadline=None)
def test_each_token_has_one_place_within_the_budget(sequences, pack_tokens, share_prompts):
    ids = torch.zeros(len(sequences), P + C, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (number, prompt, own) in enumerate(sequences):
        ids[row, P - prompt : P] = number
        ids[row, P : P + own] = 10 + torch.arange(own)
        mask[row, P - prompt : P + own] = 1
    rows = pack(ids, mask, C, pack_tokens, share_prompts=share_prompts)
    places = torch.cat([row.places for row in rows])
    assert sorted(places.tolist()) == mask[:, P:].flatten().nonzero()[:, 0].tolist()
    for row in rows:
        T = row.tokens.shape[1]
        assert len(row.segments) == 1 or pack_tokens >= T
        assert torch.equal(row.targets, ids[:, P:].flatten()[row.places])
        assert (row.positions[0, row.sources] + 1).tolist() == [
            int(mask[place // C, :P].sum()) + int(place % C) for place in row.places
        ]
        assert sum(s.own + s.prompt * s.is_first for s in row.segments) == T
    if not share_prompts:
        assert all(segment.is_first for row in rows for segment in row.segments)


def test_completions_of_one_prompt_fill_rows_the_longest_first():
    """Compare with a packing by hand of a prompt of 2 tokens into rows of 10.

    The completion of 8 fills one row; 5 and 3 share the prompt in the next; 1 is left.
    """
    ids = torch.ones(4, P + C, dtype=torch.long)
    own = torch.tensor([3, 8, 1, 5])
    places = torch.arange(P + C)
    mask = ((places >= P - 2) & (places < P + own[:, None])).long()
    rows = pack(ids, mask, C, 10, share_prompts=True)
    found = [[(segment.own, segment.is_first) for segment in row.segments] for row in rows]
    assert found == [[(8, True)], [(5, True), (3, False)], [(1, True)]]
    alone = pack(ids, mask, C, 10, share_prompts=False)  # rows of 10, of 7 + 3 and of 5 tokens
    assert [[segment.own for segment in row.segments] for row in alone] == [[8], [5, 1], [3]]


SETTINGS = {"max_steps": 3, "learning_rate": 1e-3, "per_device_train_batch_size": 8, "max_completion_length": 32}
SETTINGS |= {"loss_type": "grpo", "beta": 0.05, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}


def test_three_steps_are_those_of_the_padded_batch(make_trainer, make_nvfp4, read_metrics, tmp_path):
    runs = {}
    for pack_tokens in (0, 100):
        trainer = make_trainer(
            make_nvfp4("qwen2"),
            dtype=torch.float32,
            pack_tokens=pack_tokens,
            output_dir=str(tmp_path / str(pack_tokens)),
            mask_truncated_completions=True,
            **SETTINGS,
        )
        trainer.train()
        runs[pack_tokens] = read_metrics(trainer)
    for padded_step, packed_step in zip(runs[0], runs[100], strict=True):
        assert 0 < packed_step.pop("packed_share") < 1
        packed_step.pop("frac_zero_advantage", None)  # a padded batch skips no completion and lacks the key
        assert padded_step.keys() == packed_step.keys()
        assert padded_step["reward"] == packed_step["reward"]
        for name in ("loss", "grad_norm"):
            assert math.isclose(padded_step.get(name, 0), packed_step.get(name, 0), rel_tol=1e-4, abs_tol=1e-5), name
        assert packed_step["logp_diff_mean"] < 1e-4


def test_the_trainer_computes_the_prompt_of_a_group_once(make_trainer, make_nvfp4, read_metrics, monkeypatch):
    trainer = make_trainer(make_nvfp4("qwen2"), max_steps=1)
    seen, inner = [], trainer.compute_loss
    monkeypatch.setattr(
        trainer, "compute_loss", lambda model, inputs, *a, **k: seen.append(inputs) or inner(model, inputs, *a, **k)
    )
    trainer.train()
    ((inputs,), (record,)) = seen, read_metrics(trainer)
    prompts = {tuple(i[m.bool()].tolist()) for i, m in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)}
    computed = sum(map(len, prompts)) + int(inputs["completion_mask"].sum())
    padded_tokens = inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
    assert len(prompts) == 2  # of 8 completions
    assert record["packed_share"] == pytest.approx(computed / padded_tokens, abs=1e-4)


def test_a_model_that_cannot_be_packed_is_padded_with_a_warning(make_trainer, make_nvfp4, read_metrics):
    def biased(loaded):
        loaded.lm_head.bias = torch.nn.Parameter(torch.zeros(64, dtype=loaded.dtype), requires_grad=False)

    with pytest.warns(UserWarning, match="pack_tokens is without effect.*has a bias"):
        trainer = make_trainer(make_nvfp4("qwen2"), change=biased, max_steps=1)
    trainer.train()
    assert "packed_share" not in read_metrics(trainer)[0]


def gradient_of_a_share(rank, folder, file, batch, row_sets):
    """Run one of two processes under DDP on its share of the batch, in as many packed rows as that needs."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    adapted = policy(folder)
    logprobs.prepare(adapted)
    adapted._ddp_params_and_buffers_to_ignore = [name for name, _ in adapted.named_buffers()]
    wrapped = torch.nn.parallel.DistributedDataParallel(adapted, find_unused_parameters=True)
    ids, mask = (tensor[row_sets[rank]] for tensor in batch)
    rows = pack(ids, mask, C, 12, share_prompts=True)
    shape = (len(ids), C)
    with torch.no_grad():
        logprobs.completion_logprobs(wrapped, adapted, rows, shape, TEMPERATURE, contextlib.nullcontext)
    for _ in range(2):
        adapted.zero_grad()
        results = logprobs.completion_logprobs(wrapped, adapted, rows, shape, TEMPERATURE, contextlib.nullcontext)
        sum(values.sum() for values in results).backward()
    gradients = {name: weight.grad for name, weight in adapted.named_parameters() if weight.requires_grad}
    torch.save((len(rows), gradients), f"{file}.{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.integration
def test_processes_with_different_rows_agree_on_the_gradient(batch, make_nvfp4, tmp_path):
    folder, file = make_nvfp4("qwen2"), str(tmp_path / "meeting")
    row_sets = [[3, 6], [0, 1, 2, 4, 5]]
    torch.multiprocessing.spawn(gradient_of_a_share, (folder, file, batch, row_sets), nprocs=2)
    (few, one), (many, other) = (torch.load(f"{file}.{rank}") for rank in range(2))
    assert few < many
    adapted = policy(folder)
    logprobs.prepare(adapted)
    results = packed(adapted, pack(*batch, C, 10_000, share_prompts=True), (len(batch[0]), C))
    sum(values.sum() for values in results).backward()
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            assert torch.equal(one[name], other[name])
            largest = float(weight.grad.abs().max())
            torch.testing.assert_close(2 * one[name], weight.grad, rtol=0, atol=1e-4 * largest, msg=name)
