"""Test the table of model families: each is served packed, quantized at load, with an adapter and with noise. The
reference is transformers.

The models are tiny and random, in float32; transformers runs on the dequantized weights. Qwen3-MoE and Qwen3.5 have
tests of their own, test_experts.py and test_qwen3_5.py.
"""

import re
from pathlib import Path

import pytest
import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.noise import DEFAULT_TARGETS
from qerl_vllm_plugin.norms import QerlGemmaRMSNorm, QerlRMSNorm
from qerl_vllm_plugin.policy import Policy
from qerl_vllm_plugin.weights.families import FAMILIES

TOLERANCE = 1e-4
CASES = [family for family in FAMILIES if family not in ("qwen3_moe", "qwen3_5_text")]
SIZES = {"mistral": {"sliding_window": 8}}
NO_ADAPTER = {"glm4": "'model.layers.0.mlp.gate_up_proj', which is no linear layer of this model that can carry"}
SEPARATE = {"glm4": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]}  # the linears that can be adapted
NO_NOISE = {"olmo2": r"targets \['input_layernorm'\] match none of this model's"}
# families where the default names a norm that feeds no linear
TARGETS = dict.fromkeys(("gemma2", "gemma3_text"), ("input_layernorm", "pre_feedforward_layernorm"))
SWALLOWS = {"smollm3"}  # vLLM runs transformers' code, whose norms stay in the engine's dtype; in BF16 it warns
RESIDENT = {"qerl": {"policy_adapter": {"rank": 8}}}


PAGE = Path(__file__).parents[3] / "qerl_vllm_plugin" / "compatibility.md"


def test_every_family_of_the_table_is_tested():
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    head = next(row for row in rows if row[0] == "family")
    assert head[1:5] == ["packed", "quantized at load", "adapter", "noise"]
    for family in CASES:
        words = re.sub(r"_text$", "", family)
        pattern = re.compile(rf"(^|, ){words[:-1]}[ -]?{words[-1]}( text)?(,|$)", re.IGNORECASE)
        (row,) = [row for row in rows[rows.index(head) + 2 :] if len(row) == len(head) and pattern.search(row[0])]
        assert row[1:3] == ["yes", "yes"], family
        assert ("refused" in row[3], "refused" in row[4]) == (
            family in NO_ADAPTER,
            family in {*NO_NOISE, *TARGETS} - {"gemma2"},
        )
        assert ("swallowed" in row[4]) == (family in SWALLOWS)


def norms_of(model) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if "norm" in name}


@pytest.mark.parametrize("family", CASES)
def test_a_family_answers_as_transformers(boot, make_bf16, make_nvfp4, reference, make_adapter, measure, family):
    folder = make_nvfp4(family, **SIZES.get(family, {}))
    hf = reference(folder)
    # transformers runs first, because vLLM patches the classes of models that it runs by transformers' code
    want = measure.hf(hf)
    tensors, config, peft_model = make_adapter(hf, target_modules="all-linear", size=0.1)
    if family in NO_ADAPTER:
        *separate, peft_model = make_adapter(hf, target_modules=SEPARATE[family], size=0.1)
    adapted = measure.hf(peft_model)
    packed = boot(folder, dtype="float32", additional_config=RESIDENT)
    served = measure.engine(packed)
    assert measure.difference(served, want) < TOLERANCE

    at_load = boot(make_bf16(family, **SIZES.get(family, {})), dtype="float32", additional_config=RESIDENT)
    ours, theirs = (measure.model(llm).state_dict() for llm in (at_load, packed))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert measure.difference(measure.engine(at_load), served) == 0

    policy = Policy(packed)
    if family in NO_ADAPTER:
        with pytest.raises(AdapterError, match=NO_ADAPTER[family]):
            policy.swap(tensors, config)
        tensors, config = separate
    policy.swap(tensors, config)
    assert measure.difference(measure.engine(packed), adapted) < TOLERANCE
    assert measure.difference(adapted, served) > 10 * TOLERANCE
    policy.swap(None)

    if family in NO_NOISE:
        with pytest.raises(ValueError, match=NO_NOISE[family]):
            policy.set_noise(0.1, seed=1, rollout=1)
    else:
        layers = [m for m in measure.model(packed).modules() if isinstance(m, RMSNorm | GemmaRMSNorm)]
        ours = [isinstance(m, QerlRMSNorm | QerlGemmaRMSNorm) and m.is_fp32 for m in layers]
        assert all(ours) == (family not in SWALLOWS)
        targets = TARGETS.get(family, DEFAULT_TARGETS)
        assert policy.set_noise(0.1, seed=1, rollout=1, targets=targets).noisy_norms == 2 * 2
        assert measure.difference(measure.engine(packed), served) > 10 * TOLERANCE
        if family in SWALLOWS:
            return  # vLLM has patched this family's class in transformers by now
        noisy = dict(measure.model(packed).named_parameters())
        with torch.no_grad():
            for name, norm in norms_of(hf).items():
                norm.copy_(noisy[name])
        assert measure.difference(measure.engine(packed), measure.hf(hf)) < TOLERANCE


def test_a_family_without_nvfp4_is_refused_whatever_is_asked_for(boot, make_bf16):
    folder = make_bf16("gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(ValueError, match=r"model_type 'gpt_oss': its experts .* MXFP4"):
        boot(folder, additional_config={"qerl": {"untested_models": True}})


def test_other_families_are_refused_unless_asked_for(boot, make_bf16, make_nvfp4, measure):
    folders = [make("starcoder2", num_attention_heads=2, head_dim=32) for make in (make_nvfp4, make_bf16)]
    for folder in folders:
        with pytest.raises(ValueError, match=r"model_type 'starcoder2': .*never compared.*untested_models"):
            boot(folder)
    packed, at_load = (boot(folder, additional_config={"qerl": {"untested_models": True}}) for folder in folders)
    assert measure.difference(measure.engine(packed), measure.engine(at_load)) == 0
