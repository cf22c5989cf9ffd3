"""Test GPTQ through llmcompressor in a separate environment, and what happens where that environment fails."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from qerl_recipes.convert import llmcompressor_run, llmcompressor_script
from qerl_recipes.convert.quantize import quantize_checkpoint
from qerl_vllm_plugin.weights.checkpoint import check_tensors, inspect_folder
from qerl_vllm_plugin.wire.safetensors_file import read_tensor

WORDS = [f"word{i}" for i in range(60)]


@pytest.fixture
def source(tmp_path) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = Qwen2Config(num_attention_heads=2, num_key_value_heads=1, **sizes)
    folder = tmp_path / "bf16"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())  # a byte-level tokenizer, like Qwen2's
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=257, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator([], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>").save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path) -> Path:
    generator = torch.Generator().manual_seed(1)
    lines = [" ".join(WORDS[int(i)] for i in torch.randint(0, 60, (24,), generator=generator)) for _ in range(8)]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return file


@pytest.fixture
def llmcompressor() -> None:
    if "QERL_LLMCOMPRESSOR_PYTHON" not in os.environ and not llmcompressor_run.is_ready():
        pytest.skip("llmcompressor's own environment is not made here; `qerl quantize --method gptq` makes it")


@pytest.mark.integration
def test_gptq_writes_a_checkpoint_of_the_same_format(source, texts, tmp_path, llmcompressor):
    report = quantize_checkpoint(source, tmp_path / "gptq", method="gptq", calibration=texts)
    count = len(AutoTokenizer.from_pretrained(source)(texts.read_text())["input_ids"])
    assert report.calibration["texts"] == report.calibration["of"] == 8 and report.calibration["cut"] == 0
    assert 0.8 * count < report.calibration["tokens"] < count  # the file's braces and quotes are not counted
    plain = quantize_checkpoint(source, tmp_path / "rtn")
    inspected = inspect_folder(tmp_path / "gptq")
    assert inspected.complete and inspected.scheme == inspect_folder(tmp_path / "rtn").scheme
    assert [layer.name for layer in report.layers] == [layer.name for layer in plain.layers]
    tensors = {name: read_tensor(header) for name, header in inspected.tensors.items()}
    rounded = {name: read_tensor(header) for name, header in inspect_folder(tmp_path / "rtn").tensors.items()}
    for layer in report.layers:
        check_tensors(layer.name, *(tensors[f"{layer.name}.weight_{p}"] for p in ("packed", "scale", "global_scale")))
        assert 0 < layer.relative_error < 0.2
    differ = [n for n in tensors if n.endswith("packed") and not torch.equal(tensors[n], rounded[n])]
    assert differ, "GPTQ rounds some weights away from the nearest code"
    assert (tmp_path / "gptq" / "tokenizer.json").is_file()


@pytest.mark.integration
def test_llmcompressor_takes_the_modifiers_of_each_method(llmcompressor):
    call = [str(llmcompressor_run.environment()), "-I", "-c", MODIFIERS.format(script=llmcompressor_script.__file__)]
    said = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "GPTQModifier AWQModifier QuantizationModifier"


MODIFIERS = """
import runpy
from llmcompressor.modifiers import Modifier
recipe = runpy.run_path({script!r})["recipe"]
both = [*recipe("gptq", ["lm_head"]), *recipe("awq", ["lm_head"])]
print(*(type(one).__name__ if isinstance(one, Modifier) else one for one in both))
"""


def test_llmcompressor_gets_the_texts_in_their_order(source, tmp_path, monkeypatch):
    seen = {}
    names = ("llmcompressor", "llmcompressor.modifiers", "llmcompressor.modifiers.quantization")
    stubs = {name: types.ModuleType(name) for name in names}
    stubs[names[0]].oneshot = lambda **given: seen.update(given)
    stubs[names[2]].GPTQModifier = dict
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    rows = [[5, 6, 7], [8], [9, 10]]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    job = {"source": str(source), "destination": str(tmp_path / "out"), "method": "gptq", "ignore": ["lm_head"]}
    llmcompressor_script.main({**job, "rows": str(tmp_path / "rows.json")})
    assert list(seen["dataset"]["input_ids"]) == rows and seen["num_calibration_samples"] == 3
    assert list(seen["dataset"]["attention_mask"]) == [[1, 1, 1], [1], [1, 1]] and seen["max_seq_length"] == 3
    assert seen["shuffle_calibration_samples"] is False, "it shuffles by no seed, and the bits would differ each time"
    assert seen["recipe"] == [{"targets": "Linear", "scheme": "NVFP4A16", "ignore": ["lm_head"]}]
    assert seen["model"].dtype == torch.bfloat16 and (tmp_path / "out" / "model.safetensors").is_file()


PROGRAM = """#!{python}
import json, os, shutil, sys
job = json.loads(sys.argv[-1])
job["rows"] = json.load(open(job["rows"]))
json.dump(job | {{"visible": os.environ.get("CUDA_VISIBLE_DEVICES")}}, open({job!r}, "w"))
shutil.copytree({packed!r}, job["destination"], dirs_exist_ok=True)
"""


@pytest.fixture
def job(source, tmp_path, monkeypatch) -> Path:
    """Replace llmcompressor's Python by a program that writes its job to the returned file."""
    quantize_checkpoint(source, tmp_path / "rtn", quiet=True)
    program, job = tmp_path / "python", tmp_path / "job.json"
    program.write_text(PROGRAM.format(python=sys.executable, job=str(job), packed=str(tmp_path / "rtn")))
    program.chmod(0o755)
    monkeypatch.setenv("QERL_LLMCOMPRESSOR_PYTHON", str(program))
    return job


@pytest.mark.parametrize(
    ("device", "count", "here", "visible"),
    [
        (None, 0, None, ""),
        (None, 2, None, None),  # None leaves all GPUs visible, since gptq uses a GPU where there is one
        ("cpu", 2, "4,6", ""),
        ("cuda", 2, "6", "6"),
    ],
)
def test_llmcompressor_sees_the_device_that_was_asked_for(
    device, count, here, visible, job, source, texts, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if here is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", here)
    quantize_checkpoint(source, job.parent / "gptq", method="gptq", calibration=texts, device=device)
    assert json.loads(job.read_text())["visible"] == visible


@pytest.mark.parametrize(("asked", "count"), [({}, 8), ({"calibration_samples": 1}, 1)])
def test_the_report_says_on_what_it_was_calibrated(asked, count, job, source, texts, tmp_path, capsys):
    quantize_checkpoint(source, tmp_path / "gptq", method="gptq", calibration=texts, **asked)
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = [tokenizer(json.loads(line)["text"])["input_ids"] for line in texts.read_text().splitlines()[:count]]
    assert json.loads(job.read_text())["rows"] == rows
    tokens = sum(map(len, rows))
    said = " ".join(capsys.readouterr().out.split())
    assert f"calibrated on {count} of 8 texts, {tokens} tokens; 0 texts were cut at 2048 tokens" in said
    saved = json.loads((tmp_path / "gptq" / "quantize_report.json").read_text())["calibration"]
    assert saved == {"texts": count, "of": 8, "tokens": tokens, "longest": 2048, "cut": 0}
    assert json.loads((tmp_path / "rtn" / "quantize_report.json").read_text())["calibration"] is None


def test_unusable_texts_are_refused_before_anything_is_written(job, source, texts, tmp_path):
    with pytest.raises(ValueError, match=r"calibration_samples is 9, and .*texts.jsonl has 8 texts; lower it"):
        quantize_checkpoint(source, tmp_path / "gptq", method="gptq", calibration=texts, calibration_samples=9)
    assert not job.exists() and not list(tmp_path.glob(".gptq*"))


def test_a_failing_llmcompressor_shows_its_last_lines(source, texts, tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho halfway > /dev/null\necho 'the reason it failed' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("QERL_LLMCOMPRESSOR_PYTHON", str(program))
    with pytest.raises(RuntimeError, match=r"llmcompressor \(gptq\) failed\nexit status 3; .*\nthe reason it failed"):
        quantize_checkpoint(source, tmp_path / "gptq", method="gptq", calibration=texts)
    assert not (tmp_path / "gptq").exists() and not list(tmp_path.glob(".gptq*"))


def test_an_environment_that_cannot_be_made_says_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.delenv("QERL_LLMCOMPRESSOR_PYTHON", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(llmcompressor_run.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"could not be made; by hand .*pip.*llmcompressor==0\.14\.0\.1"):
        llmcompressor_run.environment()
    assert not llmcompressor_run.is_ready()
