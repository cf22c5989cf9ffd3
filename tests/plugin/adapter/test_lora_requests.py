"""Test adapters that vLLM reads itself. One is refused if vLLM would leave out a part of it, and no other is."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from qerl_vllm_plugin.adapter import folder as adapter_folder
from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.adapter.folder import base_hash, check_folder, check_modules
from qerl_vllm_plugin.compat import lora_loading
from qerl_vllm_plugin.compat import worker as vllm_worker

TENSORS, CONFIG, NORMS, STATE = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "norms.safetensors",
    "qerl_state.json",
)


@pytest.fixture(scope="module")
def saved(reference, make_nvfp4, make_adapter, tmp_path_factory):
    """Save a real PEFT adapter to a folder that records its base."""
    folder, base = tmp_path_factory.mktemp("saved"), make_nvfp4("qwen2")
    make_adapter(reference(base), seed=5)[2].save_pretrained(folder)
    (folder / STATE).write_text(json.dumps({"base": str(base), "base_hash": base_hash(base)}))
    return folder


@pytest.fixture(scope="module")
def engine(boot, make_nvfp4, carriers, saved):
    """Start an engine with the good adapter in a slot. Tests add the others outside of a step, because a refusal amid a
    step would leave the engine with half a step."""
    engine = boot(make_nvfp4("qwen2"), **{**carriers["lora"], "max_loras": 2, "max_cpu_loras": 2})
    assert engine.llm_engine.add_lora(LoRARequest("good", 1, str(saved)))
    return engine


def config(folder, **changes):
    (folder / CONFIG).write_text(json.dumps({**json.loads((folder / CONFIG).read_text()), **changes}))


def norms(folder):
    save_file({"model.layers.0.input_layernorm.weight": torch.full((64,), 3.0)}, folder / NORMS)


def of_another_base(folder):
    (folder / STATE).write_text(json.dumps({"base": "/models/another", "base_hash": "0" * 64}))


def of_a_deeper_model(folder):
    tensors = load_file(folder / TENSORS)
    save_file({name.replace("layers.1.", "layers.7."): tensor for name, tensor in tensors.items()}, folder / TENSORS)


def tensors(change):
    def spoil(folder):
        found = load_file(folder / TENSORS)
        name = next(name for name in sorted(found) if "layers.0.mlp.down_proj.lora_A" in name)
        change(found, name)
        save_file(found, folder / TENSORS)

    return spoil


def narrow(found, name):
    found[name] = found[name][:, :-1].contiguous()


def cut(folder):
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-50])


LEFT_OUT = {
    "cut": (cut, r"adapter is damaged: .*truncated: .*save the adapter again"),
    "trained_norms": (norms, r"trained norms .*\"path\": .*qerl evaluate"),
    "another_base": (of_another_base, "trained on another base \\(/models/another\\)"),
    "layers": (of_a_deeper_model, r"adapts model\.layers\.7\.mlp\.down_proj \(and 2 more\).*no LoRA slot"),
    "alpha": (lambda folder: config(folder, alpha_pattern={"q_proj": 80}), "alpha_pattern"),
    "rank": (lambda folder: config(folder, rank_pattern={"q_proj": 2}), "rank_pattern"),
    "nan": (tensors(lambda found, name: found[name].fill_(float("nan"))), r"layers\.0\.mlp\.down_proj holds NaN"),
    "too strong": (tensors(lambda found, name: found[name].fill_(1e6)), r"stretches inputs by up to .* beyond 100000"),
    "inputs": (tensors(narrow), r"0\.mlp\.down_proj has tensors of shape \(4, \d+\) .* rank 4 need"),
    "one_alone": (tensors(lambda found, name: found.pop(name)), r"0\.mlp\.down_proj lacks one of its two tensors"),
    "ranks": (lambda folder: config(folder, r=2), r"shape \(4, \d+\) .* rank 2 need \(2, \d+\)"),
    "base_weights": (lambda folder: config(folder, init_lora_weights="pissa"), "changes the base weights too"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_promise_04_what_vllm_would_leave_out_is_refused(engine, saved, measure, tmp_path, case):
    spoil, message = LEFT_OUT[case]
    folder, good = tmp_path / "adapter", LoRARequest("good", 1, str(saved))
    before = measure.engine(engine, good)
    shutil.copytree(saved, folder)
    spoil(folder)
    with pytest.raises(AdapterError, match=message):
        engine.llm_engine.add_lora(LoRARequest("spoilt", 2, str(folder)))
    assert (measure.engine(engine, good) == before).all()
    assert measure.difference(before, measure.engine(engine)) > 0.01, "the adapter must change the answers"


def test_a_request_without_an_adapter_is_the_bases_beside_requests_with_one(engine, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "strong")
    found = load_file(tmp_path / "strong" / TENSORS)
    save_file({name: tensor * 3 for name, tensor in found.items()}, tmp_path / "strong" / TENSORS)
    requests = [None, LoRARequest("good", 1, str(saved)), LoRARequest("strong", 3, str(tmp_path / "strong")), None]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)

    def answers(*requests):
        done = engine.generate([{"prompt_token_ids": [3, 4, 5]}] * len(requests), params, lora_request=list(requests))
        return [(one.outputs[0].token_ids, one.outputs[0].cumulative_logprob) for one in done]

    alone = [answers(request)[0] for request in requests]
    assert len({ids_and_sum[1] for ids_and_sum in alone}) == 3
    for (ids, total), (expected, sum_alone) in zip(answers(*requests), alone, strict=True):
        assert list(ids) == list(expected) and abs(total - sum_alone) < 1e-3
    engine.llm_engine.remove_lora(3)


def test_adapters_of_peft_alone_and_of_experts_pass(saved, make_nvfp4, tmp_path):
    shutil.copytree(saved, tmp_path / "adapter")
    (tmp_path / "adapter" / STATE).unlink()
    config(tmp_path / "adapter", target_parameters=["mlp.experts.down_proj"])
    check_folder(tmp_path / "adapter", make_nvfp4("qwen2"), 8)
    with pytest.raises(AdapterError, match=r"adapter: the adapter has rank 4, .* at most 2; start it with 4"):
        check_folder(tmp_path / "adapter", None, 2)


def test_experts_have_slots_under_vllms_names():
    check_modules(Path("RUN"), ["model.layers.0.mlp.experts.7.up_proj", "a.q_proj"], {"a.q_proj", "a.k_proj"})
    with pytest.raises(AdapterError, match=r"RUN adapts a\.v_proj, for"):
        check_modules(Path("RUN"), ["a.v_proj", "a.q_proj"], {"a.q_proj"})


class Runner:
    """Play vLLM's model runner. It builds its model and then the LoRA slots of its pipeline stage, and does both again
    on a reload."""

    def __init__(self, config, adapted):
        self.config, self.adapted, self.reads = config, adapted, 0

    def load_model(self):
        lora_loading.watch(self.config, adapter_folder)
        self.load_lora_model()

    def load_lora_model(self):
        layer = "model.layers.1.self_attn"
        packed = {f"{layer}.qkv_proj": [f"{layer}.{name}_proj" for name in "qkv"]}
        linears = dict.fromkeys((f"{layer}.qkv_proj", f"{layer}.o_proj"), SimpleNamespace())
        slots = SimpleNamespace(modules=linears, packed_modules=packed)
        limits = SimpleNamespace(max_lora_rank=8)
        self.lora_manager = SimpleNamespace(_adapter_manager=slots, _load_adapter=self.read, lora_config=limits)

    def read(self, request):
        self.reads += 1
        weights = SimpleNamespace(lora_a=torch.ones(2, 3), lora_b=torch.ones(3, 2))
        return SimpleNamespace(loras=dict.fromkeys(self.adapted, weights), rank=2)


@pytest.mark.parametrize("of_another_stage", [0, 7])
def test_a_pipeline_stage_refuses_what_no_stage_has_slots_for(of_another_stage, monkeypatch, tmp_path):
    other = {f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"}
    monkeypatch.setattr(vllm_worker, "of_all_stages", lambda own: [other, own])
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in (of_another_stage, 1)]
    runner = Runner(SimpleNamespace(lora_config=object()), names)
    runner.load_model()
    runner.load_model()  # an engine that reloads its weights creates its slots again
    request = LoRARequest("a", 1, str(tmp_path))
    if of_another_stage == 0:
        assert list(runner.lora_manager._load_adapter(request).loras) == names
    else:
        with pytest.raises(AdapterError, match=r"adapts model\.layers\.7\.self_attn\.q_proj, for"):
            runner.lora_manager._load_adapter(request)
    assert runner.reads == 1
