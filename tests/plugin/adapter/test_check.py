"""Test which adapters are accepted and which modules they name. The rules are PEFT's, so PEFT itself is the
reference."""

import copy
import dataclasses
import json
import math
import re

import peft
import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists

from qerl_vllm_plugin.adapter import check as adapters
from qerl_vllm_plugin.adapter.check import AdapterError, Checker, Target, check, check_config, converted, named_modules

SHAPES = {"q_proj": (8, 8), "k_proj": (8, 4), "v_proj": (8, 4), "o_proj": (8, 8)} | {
    "gate_proj": (8, 16),
    "up_proj": (8, 16),
    "down_proj": (16, 8),
}
TARGETS = {
    f"model.layers.{layer}.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}": Target(name, 0, *shape)
    for layer in range(12)
    for name, shape in SHAPES.items()
}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}


def tensors_for(config):
    tensors = {}
    for name in named_modules(config, TARGETS):
        target = TARGETS[name]
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(config["r"], target.in_features)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(target.out_features, config["r"])
    return tensors


SELECTIONS = {
    "a name": {"target_modules": ["q_proj"]},
    "longer names": {"target_modules": ["self_attn.q_proj", "model.layers.3.mlp.up_proj"]},
    "a set": {"target_modules": {"v_proj", "o_proj"}},
    "a pattern": {"target_modules": r".*\.layers\.[0-3]\.mlp\..*"},
    "patterns": {"target_modules": r".*(q|v)_proj", "exclude_modules": r".*layers\.1.*"},
    "excluded names": {
        "target_modules": ["q_proj", "up_proj"],
        "exclude_modules": ["layers.2.mlp.up_proj", "self_attn.q_proj"],
    },
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": 1},
    "layers": {"target_modules": ["q_proj"], "layers_to_transform": [0, 1, 11]},
    "a pattern of layers": {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "patterns of layers": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [1],
        "layers_pattern": ["blocks", "layers"],
    },
    "no layers": {"target_modules": ["q_proj"], "layers_to_transform": []},
}


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
def test_modules_are_those_that_peft_adapts(selection):
    config = peft.LoraConfig(r=2, **selection)
    theirs = {name for name in TARGETS if check_target_module_exists(config, name) is True or _matched(config, name)}
    assert theirs, "a selection that PEFT resolves to nothing proves nothing"
    assert named_modules(config.to_dict(), TARGETS) == theirs


def _matched(config, name):
    return isinstance(check_target_module_exists(config, name), re.Match)


def test_whole_adapter_is_accepted_with_its_scaling():
    adapter = check(tensors_for(CONFIG), CONFIG, TARGETS, max_rank=8)
    assert (adapter.rank, adapter.scaling, len(adapter.pairs)) == (2, 2.0, 24)
    rooted = {**CONFIG, "use_rslora": True}
    assert check(tensors_for(rooted), rooted, TARGETS, 8).scaling == pytest.approx(4 / 2**0.5)


ANY = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
BAD_TENSORS = {
    "a_half_is_missing": (lambda t: t.pop(f"{ANY}A.weight"), r"q_proj.lora_A.weight is missing"),
    "a_module_is_missing": (lambda t: [t.pop(f"{ANY}A.weight"), t.pop(f"{ANY}B.weight")], "its tensors are missing"),
    "a_module_too_many": (lambda t: t.update({ANY.replace("q_", "k_") + "A.weight": torch.ones(2, 8)}), "k_proj"),
    "another_layer": (lambda t: t.update({ANY.replace(".0.", ".12.") + "A.weight": torch.ones(2, 8)}), "another base"),
    "transposed": (lambda t: t.update({f"{ANY}A.weight": torch.ones(8, 2)}), r"shape \(8, 2\)"),
    "another_rank": (lambda t: t.update({f"{ANY}A.weight": torch.ones(3, 8)}), r"shape \(3, 8\)"),
    "one_dimension": (lambda t: t.update({f"{ANY}A.weight": torch.ones(16)}), r"shape \(16,\)"),
    "nan_in_A": (lambda t: t[f"{ANY}A.weight"].view(-1)[3].fill_(float("nan")), r"q_proj holds NaN"),
    "infinity_in_B": (lambda t: t[f"{ANY}B.weight"].view(-1)[3].fill_(float("inf")), "NaN or infinite"),
    "integers": (lambda t: t.update({f"{ANY}A.weight": torch.ones(2, 8, dtype=torch.int32)}), "torch.int32"),
    "float8": (lambda t: t.update({f"{ANY}A.weight": torch.ones(2, 8).to(torch.float8_e4m3fn)}), "float8"),
    "nothing": (lambda t: t.clear(), "holds no tensors"),
    "live_names": (lambda t: t.update({f"{ANY}A.default.weight": torch.ones(2, 8)}), r"peft.get_peft_model_state_dict"),
    "dora": (lambda t: t.update({f"{ANY}magnitude_vector": torch.ones(8)}), "not part of a plain LoRA"),
    "embedding": (
        lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 8)}),
        "not part of a plain LoRA",
    ),
    "saved_module": (
        lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(8, 8)}),
        "not part of a plain LoRA",
    ),
    "lm_head": (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 8)}), "lm_head"),
    "no_prefix": (lambda t: t.update({"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 8)}), "base_model"),
}


@pytest.mark.parametrize("after_a_good_one", [False, True])
@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_are_refused(case, after_a_good_one):
    change, message = BAD_TENSORS[case]
    checker, tensors = Checker(TARGETS, 8), tensors_for(CONFIG)
    if after_a_good_one:
        checker.check(tensors, CONFIG)
    change(tensors)
    with pytest.raises(AdapterError, match=message):
        converted(checker.check(tensors, CONFIG), torch.bfloat16)


def test_a_known_layout_is_checked_once(monkeypatch):
    looks = []
    monkeypatch.setattr(adapters, "check", lambda *a: looks.append(1) or check(*a))
    checker = Checker(TARGETS, 8)
    checker.check(tensors_for(CONFIG), CONFIG)
    later = tensors_for(CONFIG)
    found = checker.check(later, dict(CONFIG))
    assert len(looks) == 1
    assert (found.rank, found.scaling) == (2, 2.0)
    assert found.pairs == check(later, CONFIG, TARGETS, 8).pairs  # the same tensor objects
    assert checker.check(later, {**CONFIG, "lora_alpha": 16}).scaling == 8.0
    assert len(looks) == 2
    checker.check({name: tensor.bfloat16() for name, tensor in later.items()}, CONFIG)
    assert len(looks) == 3
    of_a_live_model = {
        **CONFIG,
        "target_modules": {"q_proj", "down_proj"},
    }  # PEFT keeps a set, which JSON cannot represent
    assert checker.check(later, of_a_live_model).pairs.keys() == found.pairs.keys()


def test_values_that_the_engine_cannot_hold_are_refused():
    tensors = tensors_for(CONFIG)
    tensors[f"{ANY}B.weight"].view(-1)[3] = 1e5
    with pytest.raises(AdapterError, match=r"q_proj holds values too large for the engine's torch.float16"):
        converted(check(tensors, CONFIG, TARGETS, max_rank=8), torch.float16)


def test_values_whose_sum_alone_is_too_large_are_not_refused():
    tensors = {name: torch.full_like(tensor, 1e37) for name, tensor in tensors_for(CONFIG).items()}
    assert sum(tensor.numel() for tensor in tensors.values()) * 1e37 > torch.finfo(torch.float32).max
    new = converted(check(tensors, {**CONFIG, "lora_alpha": 2}, TARGETS, max_rank=8), torch.float32)
    assert all(bool((half == 1e37).all()) for pair in new.values() for half in pair)


@pytest.mark.parametrize("size", [1.0, 100.0, 1e30])
def test_strength_is_an_upper_bound(size):
    generator = torch.Generator().manual_seed(0)
    tensors = {name: size * torch.randn(t.shape, generator=generator) for name, t in tensors_for(CONFIG).items()}
    new = converted(check(tensors, CONFIG, TARGETS, max_rank=8), torch.float32)
    stretched = max(float(torch.linalg.matrix_norm(b.double() @ a.double(), 2)) for a, b in new.values())
    norms = max(float(a.double().norm() * b.double().norm()) for a, b in new.values())
    assert stretched <= norms <= new.strength * (1 + 1e-6)
    if size == 1.0:  # the strength has only to be an upper bound
        assert new.strength < adapters.STRENGTH
    else:
        assert new.strength > adapters.STRENGTH
        # squares of 1e30 overflow to infinity in fp32
        assert new.strength in (pytest.approx(norms, rel=1e-5), math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [2, 3, 4])  # scalings of 1, 1.5 and 2
def test_promise_07_a_single_linear_is_copied_too(dtype, alpha):
    """Check the copy where none is needed. A single linear is contiguous already, so it could be passed on as it is and
    scaled in place."""
    config = {**CONFIG, "lora_alpha": alpha, "target_modules": ["model.layers.0.self_attn.q_proj"]}
    tensors = {name: t.to(dtype) for name, t in tensors_for(CONFIG).items() if "layers.0.self_attn.q_proj" in name}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    (new,) = converted(check(tensors, config, TARGETS, max_rank=8), dtype).values()
    for (name, given), half, factor in zip(tensors.items(), new, (1.0, alpha / 2), strict=True):
        assert torch.equal(half, (before[name].float() * factor).to(dtype))
        half.zero_()
        assert torch.equal(given, before[name])


BAD_CONFIGS = {
    "rank_above_the_engine": ({"r": 9}, "at most 8"),
    "rank_zero": ({"r": 0}, "rank r is 0"),
    "rank_true": ({"r": True}, "rank r is True"),
    "no_alpha": ({"lora_alpha": None}, "lora_alpha is None"),
    "alpha_nan": ({"lora_alpha": float("nan")}, "finite"),
    "dora": ({"use_dora": True}, "use_dora"),
    "bias": ({"bias": "all"}, "bias is 'all'"),
    "lora_bias": ({"lora_bias": True}, "lora_bias"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "rank_pattern": ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
    "unknown_flag": ({"use_new_peft_trick": True}, r"use_new_peft_trick=True.*train without it, or delete it"),
    "unknown_number": ({"scaling": 3}, "uses scaling=3, which is not supported"),
    "one_matrix_of_three": ({"enable_lora": [True, False, True]}, "enable_lora"),  # a key of PEFT 0.2
    "pissa": ({"init_lora_weights": "pissa"}, "changes the base"),
    "pissa_niter": ({"init_lora_weights": "pissa_niter_16"}, "changes the base"),
    "loftq": ({"init_lora_weights": "loftq"}, "changes the base"),
    "not_lora": ({"peft_type": "IA3"}, "only LORA"),
    "lm_head": ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    "embedding": ({"target_modules": ["embed_tokens"]}, "embeddings"),
    "unknown_module": ({"target_modules": ["q_proj", "qproj"]}, "'qproj'"),
    "no_modules": ({"target_modules": None}, "no target_modules"),
    "expression_without_match": ({"target_modules": "q_proj"}, "names no linear layer"),
    "layers_without_match": ({"layers_to_transform": 99}, r"that .* and layers_to_transform \[99\] leave"),
    "broken_expression": ({"target_modules": "(q_proj"}, "not a regular expression"),
    "broken_exclusion": ({"exclude_modules": "*"}, "not a regular expression"),
    "broken_layers_pattern": ({"layers_to_transform": [0], "layers_pattern": "("}, "not a regular expression"),
    "broken_layers_patterns": (
        {"layers_to_transform": [0], "layers_pattern": ["layers", "("]},
        "not a regular expression",
    ),
    "modules_of_wrong_type": ({"target_modules": [1]}, "list of strings"),
    "modules_a_number": ({"target_modules": 7}, "list of strings"),
    "layers_of_wrong_type": ({"layers_to_transform": ["0"]}, "layers_to_transform"),
    "layers_of_two_types": ({"layers_to_transform": [0, "1"]}, "layers_to_transform"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_configs_are_refused(case):
    changes, message = BAD_CONFIGS[case]
    tensors = tensors_for(CONFIG)
    before = copy.deepcopy(tensors)
    with pytest.raises(AdapterError, match=message):
        check(tensors, {**CONFIG, **changes}, TARGETS, max_rank=8)
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_every_key_that_peft_saves_is_known(tmp_path):
    peft.LoraConfig(r=2, lora_alpha=4, target_modules=CONFIG["target_modules"]).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} - saved.keys() == {"runtime_config"}
    # this fails for a new key of a later PEFT, so that someone looks at it, whatever its default
    assert not saved.keys() - adapters._KNOWN - adapters._UNSUPPORTED.keys()
    assert check_config(saved, 8) == (2, 2.0)


def test_keys_about_an_adapters_origin_are_accepted():
    told = {
        "task_type": "CAUSAL_LM",
        "auto_mapping": {"base_model_class": "Qwen2ForCausalLM", "parent_library": "transformers"},
        "base_model_name_or_path": "Qwen/Qwen2.5-7B",
        "revision": "main",
        "peft_version": "0.19.0",
        "inference_mode": True,
        "lora_dropout": 0.05,
        "runtime_config": {"ephemeral_gpu_offload": False},
        "loftq_config": {"loftq_bits": 4},
        "eva_config": {"rho": 2.0},
        "corda_config": {"corda_method": "ipm"},
        "ensure_weight_tying": True,
        "merge_weights": True,  # this key and the next are of PEFT 0.2
        "enable_lora": None,
        "a_later_key": False,
    }
    assert check_config({**CONFIG, **told}, 8) == (2, 2.0)
