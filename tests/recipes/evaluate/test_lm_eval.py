"""Test lm-evaluation-harness, run as the pages print it, against ``qerl evaluate``: both give the same answers and
verdicts.
"""

import dataclasses
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from qerl_recipes.convert.quantize import quantize_checkpoint
from qerl_recipes.evaluate.intervals import several
from qerl_recipes.tasks import running_sum
from qerl_vllm_plugin.options import Options

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "recipes" / "evaluation.md").read_text()
SUMS = 48
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


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the demo's model in NVFP4, an adapter that changes many but not all of its answers, and the page's task."""
    folder = tmp_path_factory.mktemp("sums")
    start = ROOT / "recipes" / "demo" / "starting_model"
    quantize_checkpoint(start, folder / "BASE")
    generator, tensors = torch.Generator().manual_seed(3), {}
    for name, w in load_file(start / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(4, w.shape[1], generator=generator)
            tensors[f"{module}.lora_B.weight"] = 0.02 * torch.randn(w.shape[0], 4, generator=generator)
    (folder / "RUN" / "adapter").mkdir(parents=True)
    save_file(tensors, folder / "RUN" / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    (folder / "RUN" / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in running_sum.held_out(SUMS)]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (block,) = re.findall(r"```yaml\n(# mine.yaml\n.*?)```", PAGE, flags=re.S)
    (folder / "mine.yaml").write_text(block)
    greedy = yaml.safe_load(block)
    greedy |= {"task": "greedy", "repeats": 1, "filter_list": greedy["filter_list"][:1]}
    greedy["generation_kwargs"] |= {"do_sample": False, "temperature": 0.0}
    (folder / "greedy.yaml").write_text(yaml.safe_dump(greedy))
    return folder


@pytest.fixture(scope="module")
def lm_eval(sums: Path) -> Iterator[Callable[..., dict[str, dict[str, Any]]]]:
    """Return lm_eval(words, task, **model arguments), which runs it in ``sums``.

    It gives, for each filter, what was logged of each prompt.
    """
    pytest.importorskip("lm_eval")
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["HF_HOME"] = str(sums / "cache")
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # the page advises this
        version = importlib.metadata.version("vllm-cpu")
        stands_in = sums / "stands_in" / f"vllm-{version}.dist-info"
        stands_in.mkdir(parents=True)
        (stands_in / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(sums / "stands_in"), os.getenv("PYTHONPATH")]))

    def run(words: list[str], task: str, **more: object) -> dict[str, dict[str, Any]]:
        given = {**model_arguments(words), "enforce_eager": True, **more}
        output = sums / f"OUT{len(list(sums.glob('OUT*')))}"
        options = ["--tasks", task, "--include_path", ".", "--batch_size", "auto", "--log_samples"]
        options += ["--output_path", str(output), "--model_args", json.dumps(given)]
        command = [sys.executable, "-m", "lm_eval", "--model", "vllm", *options]
        subprocess.run(command, cwd=sums, env=environment, check=True, timeout=240, stdout=subprocess.DEVNULL)
        (file,) = output.glob(f"*/samples_{task}_*.jsonl")
        found: dict[str, dict[str, Any]] = {}
        for line in map(json.loads, file.read_text().splitlines()):
            found.setdefault(line["filter"], {})[line["doc"]["prompt"]] = line
        return found

    yield run


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_both_printed_ways_judge_as_qerl_evaluate(sums: Path, lm_eval: Any) -> None:
    from qerl_recipes.evaluate.run import evaluate

    # In bfloat16 LoRA slots round differently from layers, so a near tie may give another token.
    options = {"output_dir": sums / "ours", "max_new_tokens": 56, "dtype": "float32", "quiet": True}
    evaluate(str(sums / "BASE"), str(sums / "RUN" / "adapter"), [f"jsonl-exact:{sums}/mine.jsonl"], **options)
    ours: dict[str, dict[str, Any]] = {"base": {}, "adapter": {}}
    for line in map(json.loads, (sums / "ours" / "answers.jsonl").read_text().splitlines()):
        ours[line["model"]][line["prompt"]] = (line["answers"][0], line["right"][0])
    assert len(ours["adapter"]) == SUMS
    assert sum(ours["base"][prompt] != ours["adapter"][prompt] for prompt in ours["base"]) > SUMS // 4
    assert 0 < sum(right for _, right in ours["adapter"].values()) < SUMS
    slots, layers = printed()
    for words in (slots, layers):
        logged = lm_eval(words, "greedy", dtype="float32")["first"]
        assert {p: (line["resps"][0][0], bool(line["exact_match"])) for p, line in logged.items()} == ours["adapter"]
    logged = lm_eval(layers, "greedy", dtype="float32", additional_config={})["first"]
    assert {p: (line["resps"][0][0], bool(line["exact_match"])) for p, line in logged.items()} == ours["base"]


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_samples_are_judged_as_by_lm_eval_and_lighteval(sums: Path, lm_eval: Any) -> None:
    from lighteval.metrics.metrics_sample import MajAtN, PassAtK
    from lighteval.models.model_output import ModelResponse

    from qerl_recipes.evaluate import tasks

    logged = lm_eval(printed()[1], "mine")
    (benchmark,) = tasks.load([f"jsonl-exact:{sums}/mine.jsonl"], num_samples=8)
    right, voted, lightevals = [], [], {"vote": [], **{k: [] for k in (2, 4, 8)}}

    def judge(doc: Any, model_response: Any) -> int:
        return int(benchmark.is_right(doc, model_response.text[0]))

    for doc in benchmark.problems:
        first, vote = logged["first"][doc.query], logged["maj@8"][doc.query]
        texts = first["resps"][0]
        right.append([benchmark.is_right(doc, text) for text in texts])
        elected = benchmark.majority(texts)
        voted.append(elected is not None and right[-1][elected])
        assert (right[-1][0], voted[-1]) == (bool(first["exact_match"]), bool(vote["exact_match"]))
        for k in (2, 4, 8):
            metric = PassAtK(k=k, n=8, sample_scoring_function=judge)
            lightevals[k].append(metric.compute(doc, ModelResponse(text=texts)))
        answers = [text.partition("<answer>")[2].partition("</answer>")[0] for text in texts]
        lightevals["vote"].append(MajAtN(n=8, sample_scoring_function=judge).compute(doc, ModelResponse(text=answers)))
    ours = several(right, voted)
    for k in (2, 4, 8):
        assert ours["pass_at"][str(k)]["value"] == pytest.approx(sum(lightevals[k]) / SUMS)
    assert ours["maj_at"]["8"]["value"] == pytest.approx(sum(lightevals["vote"]) / SUMS)
    assert any(one[0] != vote for one, vote in zip(right, voted, strict=True)), "voting must change some verdicts"
    assert sum(len(set(line["resps"][0])) > 2 for line in logged["first"].values()) > SUMS // 2, "no two seeds alike"
