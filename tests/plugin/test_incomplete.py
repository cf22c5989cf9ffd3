"""Test that a weight missing from the checkpoint is noticed for every architecture, not only for those with a table of
tensors."""

import json
import shutil
from types import SimpleNamespace

import pytest

from qerl_vllm_plugin.compat import engine
from qerl_vllm_plugin.weights import checkpoint, expected


@pytest.fixture
def no_architecture_is_known(monkeypatch):
    monkeypatch.setattr(expected, "MODEL_TYPES", ())


@pytest.mark.usefixtures("no_architecture_is_known")
@pytest.mark.parametrize(
    ("packed", "name"),
    [
        (True, "model.norm.weight"),
        (True, "lm_head.weight"),
        (False, "model.embed_tokens.weight"),
        (False, "model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_a_missing_weight_is_refused(boot, make_bf16, make_nvfp4, edited, packed, name):
    folder = edited((make_nvfp4 if packed else make_bf16)("qwen3"), lambda tensors: tensors.pop(name))
    with pytest.raises(checkpoint.CheckpointError, match=f"lacks {name}"):
        boot(folder)


@pytest.mark.usefixtures("no_architecture_is_known")
def test_a_whole_checkpoint_of_such_an_architecture_is_served(boot, make_nvfp4, reference, measure):
    folder = make_nvfp4("qwen3")
    assert not checkpoint.inspect_folder(folder).complete
    served = measure.engine(boot(folder, dtype="float32"))
    assert measure.difference(served, measure.hf(reference(folder))) < 1e-4


def test_a_checkpoint_of_the_hub_is_inspected_where_it_was_put(make_nvfp4, tmp_path):
    """Build the hub's own cache layout: a ref names the commit, and a snapshot folder of that name holds the files."""
    folder = tmp_path / "models--someone--tiny" / "snapshots" / ("c" * 40)
    shutil.copytree(make_nvfp4("qwen2"), folder)
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text("c" * 40)

    def snapshot(name, revision=None):
        model, load = SimpleNamespace(model=name, revision=revision), SimpleNamespace(download_dir=str(tmp_path))
        return engine.checkpoint_folder(SimpleNamespace(model_config=model, load_config=load))

    assert snapshot("someone/tiny") == folder
    assert snapshot("someone/tiny", "c" * 40) == folder
    assert snapshot("someone/other") is None
    assert snapshot("s3://bucket/model") is None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(checkpoint.CheckpointError, match=r"layers\.2"):
        checkpoint.inspect_folder(snapshot("someone/tiny"))
