"""Test what the card of a saved adapter says about it."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from qerl_recipes.files import adapter, base_model
from qerl_recipes.files import card as model_card
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

CONFIG = {"r": 24, "lora_alpha": 48, "target_modules": ["v_proj", "q_proj"]}


@pytest.mark.parametrize("trained_norms", [False, True])
def test_a_card_says_what_stock_vllm_would_serve(trained_norms: bool) -> None:
    card = model_card.render("Qwen/Qwen2.5-7B-Instruct", "ab" * 32, CONFIG, trained_norms=trained_norms, folder="/a b")
    assert "ab" * 32 in card
    assert "--enable-lora --max-lora-rank 32 --lora-modules 'policy=/a b'" in card
    assert ("do not travel in a LoRA request" in card) is trained_norms
    of_bf16 = model_card.render("base", "ab", CONFIG, trained_norms=trained_norms, quantization="bf16", folder="/a")
    told = "PEFT and transformers, too, compute in BF16, and want a base of BF16 weights"
    assert told in card and told not in of_bf16


def test_the_hub_learns_base_data_and_task() -> None:
    of_adapter = model_card.render("a/b", "ab", CONFIG, trained_norms=False, datasets=["c/d"], folder="/a")
    of_merged = model_card.render(
        "a/b", "ab", CONFIG, trained_norms=False, quantization="bf16", datasets=["c/d"], folder="/a", merged="cd"
    )
    for card, library in ((of_adapter, "peft"), (of_merged, "transformers")):
        told = ModelCard(card).data.to_dict()
        assert {"trl", "grpo", "vllm"} <= set(told.pop("tags"))
        told.pop("base_model_relation", None)
        expected = {"base_model": "a/b", "library_name": library, "pipeline_tag": "text-generation"}
        assert told == {**expected, "datasets": ["c/d"]}
    of_local = model_card.render("/models/b", "ab", CONFIG, trained_norms=False, folder="/a")
    assert not {"base_model", "datasets"} & ModelCard(of_local).data.to_dict().keys()


@pytest.mark.parametrize(("rank", "allowed"), [(1, 1), (2, 8), (8, 8), (9, 16), (512, 512)])
def test_a_rank_fits_the_smallest_size_that_vllm_offers(rank: int, allowed: int) -> None:
    assert adapter.engine_rank(rank) == allowed


def test_a_rank_above_512_is_refused() -> None:
    with pytest.raises(ValueError, match="at most rank 512"):
        adapter.engine_rank(513)


def test_a_base_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder"):
        base_model.local_folder(str(tmp_path / "missing"))


def test_the_written_name_of_a_base_holds_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    assert base_model.written_name("base") == base_model.written_name("./base") == f"{tmp_path}/base"
    assert base_model.written_name("Qwen/Qwen2.5-7B-Instruct", "main") == "Qwen/Qwen2.5-7B-Instruct"
    monkeypatch.setattr(base_model, "local_folder", lambda base, revision: Path("/cache") / revision)
    assert base_model.written_name("Qwen/Qwen2.5-7B-Instruct", "v2") == "/cache/v2"
