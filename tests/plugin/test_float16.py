"""Test an engine in float16. It is closer to fp32 than one in bfloat16, and refuses to start where activations exceed
float16's range."""

import re

import pytest
import torch
from safetensors.torch import save_file


def test_float16_is_nearer_to_fp32_than_bfloat16(make_bf16, write_packed, reference, boot, measure, make_adapter):
    folder = write_packed(make_bf16("qwen2"))
    tensors, config, adapted = make_adapter(reference(folder), size=0.1)
    expected, base = measure.hf(adapted), measure.hf(reference(folder))
    error = {}
    for dtype in ("bfloat16", "float16"):
        from qerl_vllm_plugin.policy import Policy

        llm = boot(folder, dtype=dtype, additional_config={"qerl": {"policy_adapter": {"rank": 8}}})
        layers = dict(measure.model(llm).named_modules())
        assert layers["model.layers.0.mlp.down_proj"].policy_a.dtype == getattr(torch, dtype)
        assert layers["model.norm"].weight.dtype == torch.float32
        plain = measure.difference(measure.engine(llm), base)
        Policy(llm).swap(tensors, config)
        error[dtype] = plain, measure.difference(measure.engine(llm), expected)
    for half, full in zip(error["float16"], error["bfloat16"], strict=True):
        assert 0 < half < full / 3, error
    assert measure.difference(base, expected) > 10 * error["float16"][1], "an adapter that cannot be seen"


def test_a_model_beyond_float16_does_not_start(folder, edited, boot):
    folder = edited(folder, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight_global_scale"].div_(1e6))
    named = r"model\.layers\.1\.mlp\.down_proj: the engine computes an activation of (\d+); float16 ends at 65504"
    with pytest.raises(ValueError, match=named) as refused:
        boot(folder, dtype="float16")
    value = int(re.search(named, str(refused.value)).group(1))
    from qerl_vllm_plugin.weights.overflow import LARGEST

    assert value > LARGEST and "--dtype bfloat16" in str(refused.value)
    boot(folder, dtype="bfloat16")  # the way out that the refusal names


@pytest.fixture(scope="module")
def half(boot, make_nvfp4):
    return boot(make_nvfp4("qwen2"), dtype="float16", additional_config={"qerl": {"policy_adapter": {"rank": 8}}})


def test_a_small_adapter_that_leads_beyond_float16_is_refused(half, make_nvfp4, reference, measure, make_adapter):
    from qerl_vllm_plugin.adapter.check import AdapterError
    from qerl_vllm_plugin.policy import Policy
    from qerl_vllm_plugin.worker.policy import policy_of

    policy = Policy(half)
    tensors, config, _ = make_adapter(reference(make_nvfp4("qwen2")), size=0.5, target_modules=["up_proj", "down_proj"])
    policy.swap(tensors, config)
    assert policy.parts["try"] > 0, "the time of the trial is told apart"
    before, answers = policy.state(digest=True), measure.engine(policy._llm)
    large = {name: tensor * 3 for name, tensor in tensors.items()}
    norms = {f"model.layers.{i}.post_attention_layernorm.weight": torch.full((64,), 90.0) for i in range(2)}
    inside = policy_of(measure.worker(policy._llm))
    assert inside.carrier.stage(inside.checker.check(large, config)).strength < 1e4
    with pytest.raises(
        AdapterError, match=r"mlp\.act_fn: the engine computes .* float16 ends at 65504\. The adapter, the"
    ):
        policy.swap(large, config, norms=norms)
    assert policy.state(digest=True) == before and torch.equal(measure.engine(policy._llm), answers)


def test_an_adapter_too_large_to_compute_with_is_no_start(make_nvfp4, reference, boot, make_adapter, tmp_path):
    folder = make_nvfp4("qwen2")
    tensors, _, model = make_adapter(reference(folder))
    model.save_pretrained(tmp_path)
    save_file({name: tensor * 1e15 for name, tensor in tensors.items()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"beyond 1e\+17 .* Use an earlier checkpoint"):
        boot(folder, additional_config={"qerl": {"policy_adapter": {"rank": 8, "path": str(tmp_path)}}})


def test_the_check_computes_every_linear_again_and_leaves_the_model_as_it_was(half, measure, monkeypatch):
    """Check that a rank computes again without an overflow of its own, since another rank may have one."""
    from qerl_vllm_plugin.weights.overflow import check_engine

    model, computed, first = measure.model(half), [], measure.engine(half)
    assert not any(module._forward_hooks for module in model.modules()) and "eval" not in vars(model)
    linear = model.model.layers[0].mlp.down_proj
    forward = type(linear).forward
    monkeypatch.setattr(type(linear), "forward", lambda self, x: computed.append(self) or forward(self, x))
    check_engine(model, half.llm_engine.vllm_config)
    assert computed.count(linear) == 2
    assert torch.equal(first, measure.engine(half)) and bool(torch.isfinite(first).all())


@pytest.mark.parametrize("family", ["llama", "smollm3"])  # vLLM runs smollm3 by transformers' own classes
def test_the_check_attends_as_sequences_of_one_token_do(family, make_bf16, boot, measure):
    """Compare what ``watched`` sees at the last norm with what the engine computes for each token alone."""
    from qerl_vllm_plugin.compat import layers as vllm_layers

    llm = boot(
        make_bf16(family, num_attention_heads=4, hidden_size=128), dtype="float16"
    )  # two query heads share a key head
    model, config = measure.model(llm), llm.llm_engine.vllm_config
    if family == "smollm3":  # vLLM before 0.30 keeps the attention of such a model outside its modules
        for module in list(model.modules()):
            for name in [name for name, inner in module.named_children() if vllm_layers.is_attention(inner)]:
                vars(module)[name] = module._modules.pop(name)
        assert not any(vllm_layers.is_attention(module) for module in model.modules())
    tokens = torch.tensor([3, 17, 40])
    with torch.inference_mode():
        expected = (
            model.compute_logits(vllm_layers.forward_single_tokens(model, config, tokens)).float().log_softmax(-1)
        )
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, logprobs=5, temperature=0)
    outputs = llm.generate([{"prompt_token_ids": [int(t)]} for t in tokens], sampling, use_tqdm=False)
    for row, output in zip(expected, outputs, strict=True):
        for token, found in output.outputs[0].logprobs[0].items():
            assert abs(float(row[token]) - found.logprob) < 1e-4
