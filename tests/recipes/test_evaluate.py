"""``qerl evaluate``: base and adapter through lighteval on one engine, and every refusal before the engine starts."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_recipes import checkpoints, evaluate, evaluation_request, evaluation_tasks, lighteval_import, running_sum
from qerl_recipes.intervals import wilson
from qerl_vllm_plugin.checkpoint import CheckpointError

Make = Callable[..., Path]


def save_adapter(folder: Path, seed: int, **state: object) -> Path:
    """A random LoRA of rank 4 on q_proj and down_proj of the tiny Qwen2, large enough to change most answers."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for module, inputs, outputs in (("self_attn.q_proj", 64, 64), ("mlp.down_proj", 96, 64)):
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, inputs, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if state:
        (folder / "qerl_state.json").write_text(json.dumps(state))
    return folder


def answers(output: Path, model: str) -> dict[str, str]:
    lines = [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]
    return {line["prompt"]: line["answers"][0] for line in lines if line["model"] == model}


@pytest.fixture(scope="module")
def runs(make_nvfp4: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two evaluations of adapters that lay at one path, one after the other."""
    base, folder = make_nvfp4("qwen2"), tmp_path_factory.mktemp("evaluate")
    problems = [{"prompt": f"{a}+{b}=", "answer": "0"} for a in range(1, 9) for b in range(1, 9)]
    (folder / "first.jsonl").write_text("\n".join(map(json.dumps, problems)))
    options = {"max_new_tokens": 6, "max_model_length": 64, "quiet": True}
    adapter = save_adapter(folder / "adapter", seed=1)
    evaluate.evaluate(
        str(base), str(adapter), [f"jsonl-exact:{folder}/first.jsonl"], output_dir=folder / "first", **options
    )
    # the second time the right answers are those that the base gave the first time
    given = answers(folder / "first", "base")
    lines = [{"prompt": prompt, "answer": answer} for prompt, answer in given.items()]
    (folder / "second.jsonl").write_text("\n".join(map(json.dumps, lines)))
    save_adapter(adapter, seed=2)
    tasks = [f"jsonl-exact:{folder}/second.jsonl", "running_sum"]
    evaluate.evaluate(str(base), str(adapter), tasks, output_dir=folder / "second", max_samples=40, **options)
    return {"base": base, "folder": folder, "first": folder / "first", "second": folder / "second"}


@pytest.mark.integration
def test_the_bases_own_answers_are_all_right_for_the_base_and_not_for_the_adapter(runs: dict[str, Path]) -> None:
    result = json.loads((runs["second"] / "evaluation.json").read_text())
    arms = result["tasks"][f"jsonl-exact:{runs['folder']}/second.jsonl"]
    assert arms["base"]["accuracy"] == 1.0 and arms["base"]["n"] == 40
    assert arms["base"]["ci95"] == list(wilson(40, 40))
    assert arms["adapter"]["accuracy"] < 1.0
    assert result["tasks"]["running_sum"]["base"]["n"] == 40
    assert result["base_sha256"] == checkpoints.base_hash(runs["base"])
    assert result["sampling"]["temperature"] == 0.0 and result["max_model_length"] == 64


@pytest.mark.integration
def test_another_adapter_at_the_same_path_never_gets_the_first_ones_answers(runs: dict[str, Path]) -> None:
    first, second = answers(runs["first"], "adapter"), answers(runs["second"], "adapter")
    common = first.keys() & second.keys()
    assert len(common) == 40
    assert any(first[prompt] != second[prompt] for prompt in common)
    # the base is the same in both runs: what differs above is the adapter and nothing else
    base = answers(runs["second"], "base")
    assert all(base[prompt] == answer for prompt, answer in answers(runs["first"], "base").items() if prompt in common)
    hashes = [json.loads((runs[run] / "evaluation.json").read_text())["adapter_sha256"] for run in ("first", "second")]
    assert hashes[0] != hashes[1]


@pytest.mark.integration
def test_base_and_adapter_answer_the_same_problems(runs: dict[str, Path]) -> None:
    lines = [json.loads(line) for line in (runs["second"] / "answers.jsonl").read_text().splitlines()]
    asked = {model: [(x["task"], x["problem"]) for x in lines if x["model"] == model] for model in ("base", "adapter")}
    assert asked["base"] == asked["adapter"] and len(asked["base"]) == 80


@pytest.mark.integration
def test_sampled_answers_to_more_prompts_than_are_computed_at_once(make_nvfp4: Make) -> None:
    """A prompt that is computed in parts would set its seeded generator back, which torch's on a CPU cannot do."""
    from vllm import SamplingParams

    llm = evaluate._start(make_nvfp4("qwen2"), "qerl_nvfp4", 8, 64, 1, 0.9)
    try:
        prompts = [{"prompt_token_ids": [3 + i % 7] * 47} for i in range(128)]  # 6016 tokens; vLLM takes 4096 at once
        sampling = [SamplingParams(max_tokens=2, temperature=1.0, seed=i) for i in range(128)]
        assert len(llm.generate(prompts, sampling, use_tqdm=False)) == 128
    finally:
        evaluate.close(llm)


@pytest.mark.integration
def test_promise_3_and_10_the_base_is_evaluated_without_noise_and_without_adapter(
    make_nvfp4: Make, tmp_path: Path
) -> None:
    from vllm import SamplingParams

    from qerl_vllm_plugin.policy import Policy

    llm = evaluate._start(make_nvfp4("qwen2"), "qerl_nvfp4", 8, 64, 1, 0.9)
    try:
        prompts = [{"prompt_token_ids": [first, 12, 5]} for first in range(3, 13)]

        def generate(request: object) -> list[list[int]]:
            outputs = llm.generate(
                prompts, SamplingParams(temperature=0, max_tokens=8), lora_request=request, use_tqdm=False
            )
            return [list(output.outputs[0].token_ids) for output in outputs]

        clean = generate(None)
        policy = Policy(llm)
        policy.swap_folder(save_adapter(tmp_path / "adapter", 1))
        policy.set_noise(0.5, seed=1, rollout=1)
        assert generate(policy.request) != clean
        request = evaluate._install(llm, None)
        assert Policy(llm).state().sigma == 0
        assert generate(request) == clean
    finally:
        evaluate.close(llm)


def started(*args: object, **kwargs: object) -> None:
    raise AssertionError("the engine was started")


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_start", started)


REFUSALS = {
    "unknown-task": ({"tasks": ["gsm9k"]}, "there is no task 'gsm9k'; choose from gsm8k"),
    "no-task": ({"tasks": []}, "name at least one task"),
    "task-twice": ({"tasks": ["running_sum", "running_sum"]}, "named twice"),
    "missing-file": ({"tasks": ["jsonl:nowhere.jsonl"]}, "there is no file nowhere.jsonl"),
    "greedy-samples": ({"num_samples": 4}, "temperature 0 gives the same answer"),
    "negative-temperature": ({"temperature": -1.0}, "temperature is -1.0"),
    "nan-temperature": ({"temperature": float("nan")}, "temperature is nan"),
    "top-p": ({"top_p": 0.0}, "top_p is 0.0"),
    "max-samples": ({"max_samples": 0}, "max_samples is 0"),
    "arm": ({"quantization": "fp8"}, "quantization is 'fp8'"),
    "nf4-of-nvfp4": ({"quantization": "nf4"}, "starts from the BF16 checkpoint"),
    "missing-adapter": ({"adapter": "/nowhere"}, "/nowhere is no adapter"),
    "missing-base": ({"base": "/nowhere"}, "there is no such folder"),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=list(REFUSALS))
def test_refused_before_the_engine_starts(
    change: dict, message: str, make_nvfp4: Make, no_engine: None, tmp_path: Path
) -> None:
    arguments = {
        "base": str(make_nvfp4("qwen2")),
        "adapter": None,
        "tasks": ["running_sum"],
        "output_dir": tmp_path / "o",
    }
    with pytest.raises(ValueError, match=message):
        evaluate.evaluate(**{**arguments, **change})
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("base", "task"),
    [pytest.param("/nowhere", "running_sum", marks=pytest.mark.slow), (None, "gsm9k")],
    ids=["base", "task"],
)
def test_a_mistyped_name_is_refused_before_vllm_and_lighteval_are_imported(
    base: str | None, task: str, make_nvfp4: Make, tmp_path: Path
) -> None:
    arguments = ["qerl", "evaluate", base or str(make_nvfp4("qwen2")), "--tasks", task, "--output-dir", str(tmp_path)]
    program = (
        f"import sys; sys.argv = {arguments!r}\n"
        "from qerl_recipes import cli\n"
        "try: cli.main()\n"
        "finally: print({'vllm', 'lighteval'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (2, "set()"), done.stderr


def test_an_adapter_for_another_base_is_refused(make_nvfp4: Make, no_engine: None, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", 1, base="other/model", base_hash="0" * 64)
    with pytest.raises(ValueError, match="trained on another base \\(other/model\\)"):
        evaluate.evaluate(str(make_nvfp4("qwen2")), str(adapter), ["running_sum"], output_dir=tmp_path)
    own = checkpoints.base_hash(make_nvfp4("qwen2"))
    adapter = save_adapter(tmp_path / "own", 1, base="this", base_hash=own)
    assert evaluate.check_adapter(adapter, own) == 8  # rank 4 in vLLM's next size


@pytest.mark.parametrize("content", ["{", "{}", '{"r": "four"}', '{"r": 0}', '{"r": 1000}'])
def test_a_damaged_adapter_config_is_refused(content: str, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", 1)
    (adapter / "adapter_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"damaged|whole number|at most rank 512"):
        evaluate.check_adapter(adapter, "")


def test_a_truncated_base_is_refused(make_nvfp4: Make, no_engine: None, tmp_path: Path) -> None:
    base = shutil.copytree(make_nvfp4("qwen2"), tmp_path / "base")
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        evaluate.evaluate(str(base), None, ["running_sum"], output_dir=tmp_path)


def test_several_samples_a_problem_are_counted_as_the_clusters_they_are() -> None:
    independent = evaluate.summary([0.5] * 50 + [0.25, 0.75] * 25, 4)
    identical = evaluate.summary([0.0, 1.0] * 50, 4)  # four equal answers to each: no more than one of each
    low, high = identical["ci95"]
    assert (low, high) == pytest.approx(wilson(50, 100), abs=2e-3)
    assert independent["ci95"][1] - independent["ci95"][0] < high - low
    assert evaluate.summary([1.0] * 30, 4)["ci95"] == list(wilson(30, 30))  # not 120 trials
    assert evaluate.summary([1.0, 0.0, 1.0])["ci95"] == list(wilson(2, 3))


def test_running_sum_is_judged_on_the_whole_completion() -> None:
    benchmark = evaluation_tasks.load(["running_sum"])[0]
    assert len(benchmark.problems) == running_sum.HELD_OUT
    assert {doc.query for doc in benchmark.problems} == {p.prompt for p in running_sum.held_out()}
    doc = benchmark.problems[0]
    gold = doc.get_golds()[0]
    right = [f"<answer>{gold}</answer>", f"<think>1+1=2</think><answer>{gold}</answer>"]
    wrong = [f"<answer>{gold}</answer> ", f"x<answer>{gold}</answer>", gold, f"<answer>{int(gold) + 1}</answer>"]
    assert [judged(benchmark, doc, text) for text in right + wrong] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("task", "answer", "text", "right"),
    [
        ("jsonl", "1/2", "so the answer is $\\boxed{0.5}$", 1.0),
        ("jsonl", "1/2", "so the answer is $\\boxed{0.6}$", 0.0),
        ("jsonl", "9", "<think>\n3+6=9\n</think>\n<answer>9</answer>", 1.0),
        ("jsonl", "9", "<answer>\nThe answer is $9$.\n</answer>", 1.0),
        ("jsonl", "9", "<think>so $\\boxed{9}$</think><answer>8</answer>", 0.0),
        ("jsonl", "9", "<answer>9</answer> no, <answer>8</answer>", 0.0),
        ("jsonl-exact", "1/2", "<think>1/2</think><answer> 1/2 </answer>", 1.0),
        ("jsonl-exact", "1/2", "<answer>1/2</answer><answer>1/3</answer>", 0.0),
        ("jsonl-exact", "1/2", " 1/2\n", 1.0),
        ("jsonl-exact", "1/2", "0.5", 0.0),
    ],
)
def test_a_local_file_is_judged_as_mathematics_or_as_text(
    task: str, answer: str, text: str, right: float, tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "?", "answer": answer}))
    benchmark = evaluation_tasks.load([f"{task}:{tmp_path}/x.jsonl"])[0]
    assert judged(benchmark, benchmark.problems[0], text) == right


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": "x"}', '{"prompt": ["x"], "answer": "y"}', ""])
def test_a_local_file_of_another_shape_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"x\.jsonl(, line 1|.*holds no problems)"):
        evaluation_request.check([f"jsonl:{tmp_path}/x.jsonl"])


def judged(benchmark: evaluation_tasks.Benchmark, doc: object, *texts: str) -> float:
    from qerl_recipes.lighteval_import import ModelResponse

    return benchmark.task.metrics[0].sample_level_fn.compute(doc, ModelResponse(text=list(texts)))


@pytest.mark.parametrize(
    ("name", "row", "right", "wrong"),
    [
        ("gsm8k", {"question": "2+3?", "answer": "2+3=5\n#### 5"}, "The answer is 5", "The answer is 6"),
        ("math_500", {"problem": "2+3?", "solution": "it is $\\boxed{5}$"}, "ANSWER: 5", "ANSWER: 6"),
        ("aime24", {"problem": "2+3?", "answer": "5"}, "is: $\\boxed{5}$. I hope", "is: $\\boxed{6}$. I hope"),
        ("aime25", {"problem": "2+3?", "answer": "5"}, "is: $\\boxed{5}$. I hope", "is: $\\boxed{6}$. I hope"),
        ("amc23", {"question": "2+3?", "answer": "5.0"}, "is: $\\boxed{5}$. I hope", "is: $\\boxed{6}$. I hope"),
    ],
)
def test_hub_tasks_ask_and_judge_as_lighteval_does(
    name: str, row: dict, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(tasks: dict) -> None:  # the hub's rows, of the hub's schema
        for task in tasks.values():
            task.dataset = {split: [dict(row)] for split in task.config.hf_avail_splits}

    monkeypatch.setattr(evaluation_tasks.LightevalTask, "load_datasets", staticmethod(rows))
    benchmark = evaluation_tasks.load([name], num_samples=4)[0]
    doc = benchmark.problems[0]
    assert "2+3?" in doc.query and doc.num_samples == 4
    assert judged(benchmark, doc, right, wrong, wrong, wrong) == 0.25


def test_a_hub_task_without_a_hub_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(tasks: dict) -> None:
        raise OSError("no network")

    monkeypatch.setattr(evaluation_tasks.LightevalTask, "load_datasets", staticmethod(offline))
    with pytest.raises(ConnectionError, match="task gsm8k: the data set openai/gsm8k could not be fetched"):
        evaluation_tasks.load(["gsm8k"])


def test_an_interrupted_write_leaves_the_result_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evaluation.json").write_text("old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluate.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        evaluate._write(tmp_path / "evaluation.json", "new")
    assert (tmp_path / "evaluation.json").read_text() == "old"


def test_the_adapters_hash_covers_its_norms(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", 1)
    before = evaluate.adapter_hash(adapter)
    save_file({"model.norm.weight": torch.ones(64)}, adapter / "norms.safetensors")
    assert evaluate.adapter_hash(adapter) != before
    assert load_file(adapter / "norms.safetensors")


def test_importing_lighteval_leaves_gradients_on() -> None:
    assert torch.is_grad_enabled()
    lighteval_import.task_module("gsm8k")
    assert torch.is_grad_enabled()
    assert (2 * torch.ones(1, requires_grad=True)).requires_grad
