"""Test lm-evaluation-harness, run as the pages print it, against ``qerl evaluate``: both give the same answers and
verdicts.
"""

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from qerl_vllm_plugin.options import Options

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "recipes" / "evaluation.md").read_text()
# These are arguments of lm_eval.models.vllm_causallms.VLLM, 0.4.13. It passes all others on to vLLM by name.
OWN = {"pretrained", "lora_local_path", "max_length", "max_gen_toks", "add_bos_token", "think_end_token"}


def printed() -> list[list[str]]:
    """Return the words of every lm_eval command on the page."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S)
    return [shlex.split(block.replace("\\\n", " ")) for block in blocks if block.startswith("lm_eval ")]


def model_arguments(words: list[str]) -> dict[str, Any]:
    """Parse the arguments as lm_eval does: JSON, or pairs of name and value."""
    text = words[words.index("--model_args") + 1]
    if text.startswith("{"):
        return json.loads(text)
    return {key: yaml.safe_load(value) for key, _, value in (part.partition("=") for part in text.split(","))}


def test_promise_09_every_printed_argument_is_read() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    vllms = {field.name for field in dataclasses.fields(EngineArgs)}
    assert "lora_path" not in vllms | OWN
    commands = [model_arguments(words) for words in printed()]
    ways = [{"enable_lora", "lora_local_path", "max_lora_rank"}, {"additional_config"}]
    assert [given.keys() - {"pretrained", "quantization"} for given in commands] == ways
    for given in commands:
        assert given.keys() <= vllms | OWN
        assert get_quantization_config(given["quantization"]).get_name() == "qerl_nvfp4"
    assert commands[0]["enable_lora"] is True and commands[0]["max_lora_rank"] == 32
    options = Options.parse(commands[1]["additional_config"])
    assert (options.adapter_rank, options.adapter_path) == (32, commands[0]["lora_local_path"])
