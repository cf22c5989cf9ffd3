"""Test the hooks on model loading: their order, and each refusal. The model here is nothing but parameters."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.model_loader.reload import layerwise

from qerl_vllm_plugin import quantization
from qerl_vllm_plugin.compat import loading
from qerl_vllm_plugin.weights import overflow
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError
from qerl_vllm_plugin.worker.change import TOO_LARGE


@pytest.fixture
def start(monkeypatch, tmp_path):
    """start(name, weights, **changes) loads a model and returns it as vLLM would leave it, with the events in their
    order."""
    (tmp_path / "folder").mkdir()
    snapshot = tmp_path / "hub/models--someone--tiny/snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "hub/models--someone--tiny/refs").mkdir()
    (tmp_path / "hub/models--someone--tiny/refs/main").write_text("c" * 40)
    order = []
    monkeypatch.setattr(loading.vllm_layers, "is_fused_experts", lambda module: isinstance(module, torch.nn.Bilinear))

    class Model(torch.nn.Module):
        """A model whose inner module is under construction when the plugin is first told of the model."""

        def __init__(self, config, watch):
            super().__init__()
            self.norm = torch.nn.LayerNorm(2)
            self.linear = Inner(watch)
            self.mlp = torch.nn.Module()
            self.mlp.experts = torch.nn.Bilinear(2, 2, 2)
            self.linear.input_scale = torch.nn.Parameter(torch.ones(1))

        def load_weights(self, weights):
            order.append(("load", [name for name, _ in weights]))
            return Model.loaded

    class Inner(torch.nn.Linear):
        def __init__(self, watch):
            super().__init__(2, 2, bias=False)
            watch()

    def initialize_model(config, watch):
        return Model(config, watch)

    def run(name="folder", loaded=("norm.weight", "norm.bias", "linear.weight"), has_adapter=False, **changes):
        model_config = SimpleNamespace(
            model=str(tmp_path / name) if name == "folder" else name,
            revision=changes.get("revision"),
        )
        config = SimpleNamespace(
            model_config=model_config,
            load_config=SimpleNamespace(load_format=changes.get("load_format", "auto"), download_dir=tmp_path / "hub"),
            weight_transfer_config=changes.get("transfer"),
        )
        Model.loaded = None if loaded is None else set(loaded)

        def when_built(model):
            order.append("built")
            return lambda name: order.append(name)

        inspect = lambda folder: order.append(("inspect", folder.name))  # noqa: E731
        install = (lambda model: order.append("install")) if has_adapter else None
        when_ready = lambda model: order.append("ready")  # noqa: E731
        watch = lambda: loading.watch(config, inspect, when_built, install, when_ready)  # noqa: E731
        model = initialize_model(config, watch)
        if config.load_config.load_format != "dummy":
            model.load_weights([("a", torch.ones(1)), ("b", torch.ones(1))])
        return model.eval(), order

    return run


def test_a_folder_is_inspected_first_and_adapted_last(start):
    model, order = start(has_adapter=True)
    model.eval()  # a second call of eval() must trigger nothing
    assert order == [("inspect", "folder"), "built", "a", "b", ("load", ["a", "b"]), "install", "ready"]


def test_a_model_of_the_hub_is_inspected_once_it_is_there(start):
    _, order = start("someone/tiny", has_adapter=True)
    loaded = ["built", "a", "b", ("load", ["a", "b"])]
    assert order == [*loaded, ("inspect", "c" * 40), "install", "ready"]
    order.clear()
    assert start("s3://bucket/model")[1] == [*loaded, "ready"]


def test_the_asked_revision_is_inspected(start, tmp_path):
    snapshots = tmp_path / "hub/models--someone--tiny/snapshots"
    shutil.copytree(snapshots / ("c" * 40), snapshots / ("d" * 40))
    assert ("inspect", "d" * 40) in start("someone/tiny", revision="d" * 40)[1]


@pytest.mark.parametrize("lacking", ["norm.bias", "linear.weight"])
def test_every_parameter_but_experts_and_scales_must_come(start, lacking):
    all_but = [name for name in ("norm.weight", "norm.bias", "linear.weight") if name != lacking]
    with pytest.raises(CheckpointError, match=rf"lacks {lacking} \(vLLM's name\), and 0 more"):
        start(loaded=all_but)
    with pytest.raises(CheckpointError, match=r"lacks norm\.weight .* and 2 more"):
        start(loaded=[])


def test_a_model_that_names_no_loaded_weights_is_warned_of(start, monkeypatch):
    said = []
    monkeypatch.setattr(loading.logger, "warning_once", lambda text, *_: said.append(text))
    start(loaded=None)
    assert len(said) == 1 and "none can be missed" in said[0]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_what_was_loaded_is_frozen(start, load_format):
    model, order = start(load_format=load_format)
    with pytest.raises(RuntimeError, match="are frozen"):
        model.load_weights([])
    record = layerwise.LAYERWISE_INFO[model]
    for name in ("reset", "load_numel"):
        with pytest.raises(RuntimeError, match="are frozen"):
            getattr(record, name)
    if load_format == "dummy":
        assert record.can_load() is False and order == ["ready"]
    else:
        with pytest.raises(RuntimeError, match="are frozen"):
            record.can_load()


def test_random_weights_have_no_adapter_to_start_with(start):
    with pytest.raises(ValueError, match=r"policy_adapter\.path.* has no place beside --load-format dummy"):
        start(load_format="dummy", has_adapter=True)


def test_weight_transfer_has_no_place(start):
    with pytest.raises(ValueError, match=r"--weight-transfer-config has no place here: the weights .* are frozen"):
        start(transfer="nccl")


@pytest.mark.parametrize(
    ("dtype", "stages", "has_adapter", "way_out"),
    [
        (torch.float16, 1, False, overflow.NEEDS_BFLOAT16),
        (torch.float16, 1, True, overflow.NEEDS_BFLOAT16),
        (torch.bfloat16, 1, True, TOO_LARGE),
        (torch.bfloat16, 1, False, None),
        (torch.float16, 2, True, None),
    ],
)
def test_activations_are_looked_at_where_they_may_be_too_large(monkeypatch, dtype, stages, has_adapter, way_out):
    said, computed = [], []
    monkeypatch.setattr(quantization.logger, "warning_once", lambda text, *_: said.append(text))
    monkeypatch.setattr(overflow, "check_engine", lambda *given: computed.append(given) or overflow.Calls())
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype), parallel_config=SimpleNamespace(pipeline_parallel_size=stages)
    )
    look = quantization._look_for_overflow(config, has_adapter=has_adapter)
    assert (look is None) == (way_out is None) and len(said) == stages - 1
    if look is not None:
        look("model")
        assert computed == [("model", config, way_out)]


def test_a_model_that_is_built_in_another_way_is_not_known(start):
    with pytest.raises(RuntimeError, match="builds its models in a way that is not known here"):
        loading._model_being_built()
