"""verl's FSDP2 engine on the frozen model: what it computes, trains and sends."""

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.usefixtures("verl_on_a_cpu")

PROMPTS = [[5, 9, 17, 33, 60, 21, 8, 14, 2, 40, 41, 3], [11, 11, 30, 4, 55, 62, 7]]


@pytest.fixture(scope="module")
def group(verl_on_a_cpu, hold_port):
    """verl's engines ask for a process group; of one here."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{hold_port()}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(make_nvfp4) -> Path:
    return make_nvfp4("qwen2")


@pytest.fixture
def start(group, folder, monkeypatch):
    """start(model={}, actor={}) -> the engine that verl's registry finds for fsdp2 on an NVIDIA GPU, on this CPU."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")

    def build(model=None, actor=None):
        model_config = HFModelConfig(
            path=str(folder),
            external_lib="qerl_recipes.verl.register",
            override_config={"attn_implementation": "eager"},
            use_remove_padding=False,
            **{"lora_rank": 8, "lora_alpha": 16, **(model or {})},
        )
        engine = EngineRegistry.new(
            "language_model",
            "fsdp2",
            model_config=model_config,
            engine_config=FSDPEngineConfig(**{"strategy": "fsdp2", "use_torch_compile": False, **(actor or {})}),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10, lr_warmup_steps=0),
            checkpoint_config=CheckpointConfig(),
        )
        engine.initialize()
        return engine

    return build


def batch_of(prompts):
    """A batch as verl's trainer hands it to an engine: jagged sequences, and what its worker adds."""
    from verl.utils import tensordict_utils as tu

    def jagged(sequences):
        return torch.nested.as_nested_tensor(sequences, layout=torch.jagged)

    return tu.get_tensordict(
        {
            "input_ids": jagged([torch.tensor(ids) for ids in prompts]),
            "position_ids": jagged([torch.arange(len(ids)) for ids in prompts]),
            "loss_mask": jagged([torch.ones(len(ids)) for ids in prompts]),
        },
        {
            "temperature": 1.0,
            "use_remove_padding": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 1,
            "pad_token_id": 0,
            "global_token_num": [len(ids) for ids in prompts],
        },
    )


def logprobs_of(engine):
    """Of every token of PROMPTS but the first ones."""
    with engine.eval_mode():
        found = engine.infer_batch(batch_of(PROMPTS))["model_output"]["log_probs"]
    return torch.cat([sequence[:-1] for sequence in found.unbind()]).float()


@torch.no_grad()
def expected_logprobs(folder, tensors, config):
    """Of the frozen model with that PEFT adapter, rounded as by the rollout, without verl."""
    import peft

    from qerl_recipes.model import fused_lora, loading

    model = loading.load(folder, quantization="qerl_nvfp4", attn_implementation="eager")
    model = peft.get_peft_model(model, peft.LoraConfig(**config), autocast_adapter_dtype=False)
    lora = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert not peft.set_peft_model_state_dict(model, lora).unexpected_keys
    fused_lora.install(model, fused_lora.ADAPTER)
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        for ids in PROMPTS:
            logits = model.eval()(torch.tensor([ids])).logits[0].float()
            found.append(torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(found)


def test_it_trains_the_adapter_alone_on_the_bytes_of_the_checkpoint(start, folder):
    from safetensors.torch import load_file

    engine = start()
    assert type(engine).__module__ == "qerl_recipes.verl.engine"
    base = logprobs_of(engine)

    def loss(model_output, data, dp_group):
        return -model_output["log_probs"].values().mean(), {}

    with engine.train_mode():
        norm = [engine.train_batch(batch_of(PROMPTS), loss)["metrics"]["grad_norm"] for _ in range(3)]
    assert min(norm) > 0
    trained = logprobs_of(engine)
    assert trained.mean() > base.mean() + 0.001

    weights, config = engine.get_per_tensor_param(base_sync_done=True)
    tensors = dict(weights)
    assert len(tensors) == 2 * 7 * 2 and {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert all(bool(tensor.any()) for tensor in tensors.values())
    untouched = {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in tensors.items()}
    plain = {key: config[key] for key in ("r", "lora_alpha", "target_modules", "task_type")}
    for measured, sent in ((trained, tensors), (base, untouched)):
        # log-probabilities of float32: bf16 ones would be up to 0.017 away
        assert float((measured - expected_logprobs(folder, sent, plain)).abs().max()) < 1e-5
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
