"""Test that weights are frozen: vLLM's reload and full-weight pushes are refused, and afterwards nothing has
changed."""

import pytest
import torch
from safetensors.torch import load_file

FROZEN = "weights of a qerl_nvfp4 engine are frozen"


@pytest.fixture(scope="module", params=["packed", "bf16"])
def engine(request, boot, make_bf16, make_nvfp4):
    return boot((make_nvfp4 if request.param == "packed" else make_bf16)("qwen2"), dtype="float32")


@pytest.fixture
def another(make_bf16, edited):
    """Return another model with tensors of the same names and sizes."""
    return edited(make_bf16("qwen2"), lambda tensors: [tensor.mul_(1.5) for tensor in tensors.values()])


def everything(model) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def push(engine, measure, folder):
    weights = list(load_file(folder / "model.safetensors").items())
    measure.model(engine).load_weights(weights)


WAYS = {
    "from_disk": lambda engine, measure, folder: engine.collective_rpc(
        "reload_weights", kwargs={"weights_path": str(folder)}
    ),
    "from_its_own_disk": lambda engine, measure, folder: engine.collective_rpc("reload_weights"),
    "from_memory": push,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_reload_is_refused_before_anything_is_touched(engine, another, measure, way):
    before, answers = everything(measure.model(engine)), measure.engine(engine)
    with pytest.raises(RuntimeError, match=FROZEN):
        WAYS[way](engine, measure, another)
    after = everything(measure.model(engine))
    assert after.keys() == before.keys()
    assert [name for name in after if after[name].is_meta or not torch.equal(after[name], before[name])] == []
    assert torch.equal(measure.engine(engine), answers)


@pytest.mark.parametrize("backend", ["nccl", "qerl"])
def test_weight_transfer_is_refused_at_start(boot, make_nvfp4, backend):
    from vllm.config.weight_transfer import WeightTransferConfig

    with pytest.raises(ValueError, match=FROZEN):
        boot(make_nvfp4("qwen2"), weight_transfer_config=WeightTransferConfig(backend=backend))


def test_a_stock_engine_in_the_same_process_still_reloads(engine, boot, make_bf16, measure):
    stock = boot(make_bf16("qwen2"), quantization=None)
    answers = measure.engine(stock)
    stock.collective_rpc("reload_weights")
    assert torch.equal(measure.engine(stock), answers)
