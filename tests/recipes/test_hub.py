"""Test what meets the Hugging Face hub, on a stand-in for it: models and data sets come from there, runs go there."""

import importlib.metadata
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hub_stand_in import Hub, write_data
from huggingface_hub import ModelCard
from packaging.requirements import Requirement
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qerl_recipes.files.base_model import hub_name
from qerl_recipes.machine import serve
from qerl_vllm_plugin import TESTED_VLLM

READ = """
import peft, transformers
from qerl_recipes.evaluate import tasks
from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.tasks import prompts, sources

train, _ = prompts.read(ScriptArguments(dataset_name="bigmath"), sources.LOADERS)
assert (train[0]["prompt"], train[0]["solution"], len(train)) == ("What is 1+2?", "$3$", 8)
model = transformers.AutoModelForCausalLM.from_pretrained("me/tiny")
model = peft.PeftModel.from_pretrained(model, "me/policy")
transformers.AutoTokenizer.from_pretrained("me/policy")
for benchmark in tasks.load(["gsm8k", "math_500", "aime24", "amc23"], max_samples=2):
    assert [benchmark.is_right(doc, r"so \\boxed{3}") for doc in benchmark.problems] == [True, True], benchmark.name
"""


@pytest.fixture
def hub(make_bf16: Callable[..., Path], tmp_path: Path) -> Iterator[Hub]:
    """Serve the data sets and the model me/tiny, which reads any text byte by byte and has a chat template."""
    root = tmp_path / "hub"
    write_data(root)
    model = make_bf16("qwen2", vocab_size=320, max_position_embeddings=2048)
    folder = root / "models" / "me" / "tiny"
    folder.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).write_bytes((model / name).read_bytes())
    words = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    with Hub(root) as served:
        yield served


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_run_takes_from_the_hub_and_pushes_every_checkpoint(
    hub: Hub,
    write_recipe: Callable[..., str],
    run_process: Callable[..., None],
    hold_port: Callable[[], int],
    tmp_path: Path,
) -> None:
    recipe = write_recipe(
        model_name_or_path="me/tiny",
        dataset_name="gsm8k",
        dataset_size=8,
        reward_funcs=["accuracy"],
        max_steps=2,
        max_completion_length=8,
        vllm_max_model_length=256,
        save_strategy="steps",
        save_steps=1,
        push_to_hub=True,
        hub_strategy="every_save",
        hub_model_id="me/policy",
    )
    here = hub.environment(tmp_path / "cache")
    run_process([sys.executable, "-m", "qerl_recipes.cli", "train", "--config", recipe], tmp_path / "train.log", **here)
    titles = [title for title, _ in hub.commits if "initial" not in title]
    assert titles[0] == "Training in progress, step 1" and titles[-1] == "End of training"
    for title, files in hub.commits:
        if title in titles:
            assert {"adapter_model.safetensors", "tokenizer.json", "README.md"} <= files.keys()
            assert "qerl_state.json" not in files and not any(str(tmp_path).encode() in part for part in files.values())
    pushed = hub.root / "models" / "me" / "policy"
    weights = "adapter_model.safetensors"
    assert (pushed / weights).read_bytes() == (tmp_path / "run" / "adapter" / weights).read_bytes()
    text = (pushed / "README.md").read_text()
    card = ModelCard(text).data.to_dict()
    assert (card["base_model"], card["datasets"], card["library_name"]) == ("me/tiny", ["openai/gsm8k"], "peft")
    run_process([sys.executable, "-c", READ], tmp_path / "read.log", **here)
    (line,) = [line for line in text.splitlines() if line.startswith("vllm serve") and "qerl_nvfp4" in line]
    port, (_, _, model, *flags) = hold_port(), shlex.split(line)
    flags += ["--port", str(port), "--host", "127.0.0.1", "--max-model-len", "64"]
    with serve.started(serve.command(model, flags), port, tmp_path / "serve.log", here) as server:
        asked = {"model": "policy", "prompt": "1+2", "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()["model"] == "policy"


@pytest.mark.slow
@pytest.mark.integration
def test_a_folder_remembers_the_model_of_the_hub_that_it_was_rounded_from(
    hub: Hub, run_process: Callable[..., None], tmp_path: Path
) -> None:
    quantize, here = [sys.executable, "-m", "qerl_recipes.cli", "quantize"], hub.environment(tmp_path / "cache")
    for name, flags in (("same", ()), ("other", ("--scales", "mse"))):
        run_process([*quantize, "me/tiny", str(tmp_path / name), *flags], tmp_path / "log", **here)
    assert hub_name(str(tmp_path / "same")) == "me/tiny"
    assert hub_name(str(tmp_path / "other")) == str(tmp_path / "other"), "the hub's model does not give its weights"


def test_lightevals_own_vllm_backend_takes_none_of_our_vllms() -> None:
    """Check what recipes/evaluation.md says of `lighteval vllm`."""
    needed = map(Requirement, importlib.metadata.requires("lighteval") or ())
    (wanted,) = [requirement.specifier for requirement in needed if requirement.name == "vllm"]
    assert not [version for version in TESTED_VLLM if version in wanted]
