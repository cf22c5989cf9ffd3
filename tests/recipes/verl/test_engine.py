"""Test verl's FSDP2 engine on the frozen model: what it computes, trains and sends."""

import functools
import os
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.usefixtures("verl_on_a_cpu")


@pytest.fixture(scope="module")
def group(verl_on_a_cpu, hold_port):
    """Start a process group of one, which verl's engines need."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{hold_port()}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(make_nvfp4) -> Path:
    return make_nvfp4("qwen2")


@pytest.fixture
def start(group, folder, monkeypatch):
    """Return start(model={}, actor={}, checkpoint={}), which builds on this CPU verl's fsdp2 engine for an
    NVIDIA GPU.
    """
    from verl_engines import build

    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    return functools.partial(build, folder)


@torch.no_grad()
def expected_logprobs(folder, tensors, config):
    """Compute the log-probabilities without verl: the frozen model with this PEFT adapter, rounded as in the
    rollout.
    """
    import peft
    from verl_engines import PROMPTS

    from qerl_recipes.model import loading, lora

    model = loading.load(folder, quantization="qerl_nvfp4", attn_implementation="eager")
    model = peft.get_peft_model(model, peft.LoraConfig(**config), autocast_adapter_dtype=False)
    state = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert not peft.set_peft_model_state_dict(model, state).unexpected_keys
    lora.install(model, lora.ADAPTER)
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        for ids in PROMPTS:
            logits = model.eval()(torch.tensor([ids])).logits[0].float()
            found.append(torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(found)


def test_it_trains_the_adapter_alone_on_the_bytes_of_the_checkpoint(start, folder):
    from safetensors.torch import load_file
    from verl_engines import PROMPTS, adapter_of, logprobs_of, train

    engine = start()
    assert type(engine).__module__ == "qerl_recipes.verl.engine"
    base = logprobs_of(engine)
    assert min(train(engine, PROMPTS)) > 0
    trained = logprobs_of(engine)
    assert trained.mean() > base.mean() + 0.001

    tensors, config = adapter_of(engine)
    assert len(tensors) == 2 * 7 * 2 and {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert all(bool(tensor.any()) for tensor in tensors.values())
    untouched = {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in tensors.items()}
    for measured, sent in ((trained, tensors), (base, untouched)):
        # These are log-probabilities in float32; bf16 ones would differ by up to 0.017.
        assert float((measured - expected_logprobs(folder, sent, config)).abs().max()) < 1e-5
    assert float((trained - base).abs().max()) > 0.4

    state = {name.replace("base_model.model.", ""): tensor for name, tensor in engine.module.state_dict().items()}
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        for end in (".weight_packed", ".weight_scale"):
            if name.endswith(end):
                held = state[name.replace(end, ".base_layer" + end)]
                assert torch.equal(held, tensor.view(torch.uint8)), name
        if "norm" in name:
            assert state[name].dtype == torch.float32 and torch.equal(state[name], tensor.float()), name
    assert {id(p) for group in engine.optimizer.param_groups for p in group["params"] if p.requires_grad} == {
        id(p) for name, p in engine.module.named_parameters() if "lora_" in name
    }


@pytest.mark.parametrize(
    ("model", "actor", "reason"),
    [
        ({"lora_rank": 0}, {}, "model.lora_rank is 0"),
        ({"lora": {"merge": True}}, {}, "model.lora.merge"),
        ({"use_liger": True}, {}, "model.use_liger"),
        ({"use_fused_kernels": True}, {}, "model.use_fused_kernels"),
        ({}, {"mixed_precision": {"param_dtype": "fp32"}}, "mixed_precision.param_dtype"),
        ({}, {"strategy": "fsdp"}, "actor.strategy=fsdp would cast"),
    ],
)
def test_what_the_frozen_model_cannot_honour_is_refused_by_name(start, model, actor, reason):
    with pytest.raises(ValueError, match=reason):
        start(model, actor)


def test_packed_weights_are_not_saved_as_a_model(start):
    with pytest.raises(ValueError, match="save_contents names hf_model"):
        start(checkpoint={"save_contents": ["model", "hf_model"]})


def test_a_checkpoint_goes_on_and_gives_a_peft_adapter(start, folder, tmp_path):
    from safetensors.torch import load_file
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger
    from verl_engines import PROMPTS, adapter_of, logprobs_of, train

    from qerl_recipes.files.adapter import open_adapter

    first, second = start(), start()
    train(first, PROMPTS)
    first.save_checkpoint(str(tmp_path / "actor"), global_step=3)
    assert not torch.equal(logprobs_of(second), logprobs_of(first))
    second.load_checkpoint(str(tmp_path / "actor"), del_local_after_load=False)
    assert torch.equal(logprobs_of(second), logprobs_of(first))
    tensors, config = adapter_of(first)
    assert train(first, PROMPTS) == train(second, PROMPTS)
    assert torch.equal(logprobs_of(second), logprobs_of(first))

    folders = {"local_dir": str(tmp_path / "actor"), "target_dir": str(tmp_path / "merged")}
    config_path = str(tmp_path / "actor" / "huggingface")
    FSDPModelMerger(ModelMergerConfig("merge", "fsdp", hf_model_config_path=config_path, **folders)).merge_and_save()
    saved = open_adapter(tmp_path / "merged" / "lora_adapter")
    assert (saved.rank, saved.config["lora_alpha"]) == (config["r"], config["lora_alpha"])
    found = load_file(saved.path / "adapter_model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.bfloat16()), name


def test_two_ranks_compute_the_same_and_send_one_adapter(folder, hold_port, start_process, tmp_path):
    """Run two ranks with their own prompts, each holding half of every trained tensor.

    The frozen weights come from the first rank.
    """
    script = Path(__file__).parents[2] / "fixtures" / "verl" / "verl_engines.py"
    port, environment = hold_port(), {"VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    processes = [
        start_process([sys.executable, script, folder, rank, "2", str(port), tmp_path / rank], log, **environment)
        for rank, log in (("0", tmp_path / "log0"), ("1", tmp_path / "log1"))
    ]
    for rank, process in enumerate(processes):
        assert process.wait(200) == 0, (tmp_path / f"log{rank}").read_text()[-4000:]
    first, second = (torch.load(tmp_path / rank, weights_only=False) for rank in ("0", "1"))
    tensors, config = first["tensors"], first["config"]
    assert set(first["p"]) == {"DTensor"}
    assert tensors.keys() == second["tensors"].keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, second["tensors"][name]) and tensor.any(), name
    untouched = {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in tensors.items()}
    for state, sent in (("trained", tensors), ("base", untouched)):
        expected = expected_logprobs(folder, sent, config)
        for rank in (first, second):
            assert float((rank[state] - expected).abs().max()) < 1e-5, state
    assert float((first["trained"] - first["base"]).abs().max()) > 0.1
