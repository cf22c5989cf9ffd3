"""``qerl evaluate``: base and adapter through lighteval on one engine, and every refusal before the engine starts."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_recipes import cli
from qerl_recipes.evaluate import run as evaluate
from qerl_recipes.evaluate.figures import unpacked
from qerl_recipes.evaluate.intervals import wilson
from qerl_recipes.evaluate.report import write as write_report
from qerl_recipes.evaluate.request import Evaluation
from qerl_recipes.evaluate.run import EngineSettings
from qerl_recipes.files import adapter as adapter_folder
from qerl_recipes.files import run_state as checkpoints
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

Make = Callable[..., Path]


def answers(output: Path, model: str) -> dict[str, str]:
    lines = [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]
    return {line["prompt"]: line["answers"][0] for line in lines if line["model"] == model}


@pytest.fixture(scope="module")
def runs(make_nvfp4: Make, tmp_path_factory: pytest.TempPathFactory, save_adapter: Make) -> dict[str, Path]:
    """Two evaluations of adapters that lay at one path, one after the other."""
    base, folder = make_nvfp4("qwen2"), tmp_path_factory.mktemp("evaluate")
    problems = [{"prompt": f"{a}+{b}=", "answer": "0"} for a in range(1, 9) for b in range(1, 9)]
    (folder / "first.jsonl").write_text("\n".join(map(json.dumps, problems)))
    options = {"max_new_tokens": 6, "max_model_length": 64, "quiet": True}
    adapter = save_adapter(folder / "adapter", seed=1)
    with pytest.warns(
        UserWarning, match=r"first\.jsonl: .* were cut at max_new_tokens=6; accuracy counts what they had"
    ):
        evaluate.evaluate(
            str(base), str(adapter), [f"jsonl-exact:{folder}/first.jsonl"], output_dir=folder / "first", **options
        )
    # the second time the right answers are those that the base gave the first time
    given = answers(folder / "first", "base")
    lines = [{"prompt": prompt, "answer": answer} for prompt, answer in given.items() if answer.strip()]
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
    lines = [json.loads(line) for line in (runs["second"] / "answers.jsonl").read_text().splitlines()]
    for task, of in result["tasks"].items():
        for model in ("base", "adapter"):
            right = [line["right"] for line in lines if (line["task"], line["model"]) == (task, model)]
            assert unpacked(of[model]["by_problem"]["right"], 40, 1).tolist() == right
    assert result["tasks"]["running_sum"]["base"]["n"] == 40
    assert result["base_sha256"] == checkpoints.base_hash(runs["base"])
    assert result["sampling"]["temperature"] == 0.0 and result["max_model_length"] == 64


@pytest.mark.integration
def test_beside_an_accuracy_stands_the_share_of_the_answers_that_ended(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    result = json.loads((runs["first"] / "evaluation.json").read_text())
    ((task, arms),) = result["tasks"].items()
    lines = [json.loads(line) for line in (runs["first"] / "answers.jsonl").read_text().splitlines()]
    for model in ("base", "adapter"):
        cut = [line["cut"][0] for line in lines if line["model"] == model]
        assert arms[model]["cut"] == sum(cut) / 64 and arms[model]["ended"] == 1 - sum(cut) / 64
        assert unpacked(arms[model]["by_problem"]["ended"], 64, 1)[:, 0].tolist() == [not one for one in cut]
    # a random model seldom ends its turn, so other shares are written by hand
    many = {"pass_at": {"2": {"value": 0.5, "ci95": [0.4, 0.6]}}, "maj_at": {}}
    of = {"base": {**arms["base"], **many, "ended": 0.75}, "adapter": {**arms["adapter"], **many, "ended": 1.0}}
    evaluate.Console().print(evaluate.table({**result, "tasks": {task: of}}))
    printed = capsys.readouterr().out.splitlines()
    assert "ended" in printed[2]
    assert ["75% / 100%" in line for line in printed if "first.jsonl" in line or "pass@2" in line] == [True, True]


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
def test_the_adapter_alone_gives_the_answers_that_it_gives_beside_the_base(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory: list[object] = []
    start = evaluate.start
    monkeypatch.setattr(evaluate, "start", lambda engine: (memory.append(engine), start(engine))[1])
    tasks = [f"jsonl-exact:{runs['folder']}/second.jsonl"]
    options = {"max_new_tokens": 6, "max_model_length": 64, "quiet": True, "max_samples": 40}
    adapter = str(runs["folder"] / "adapter")
    cache = {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.5}
    result = evaluate.evaluate(
        str(runs["base"]), adapter, tasks, output_dir=tmp_path, adapter_only=True, **cache, **options
    )
    before = json.loads((runs["second"] / "evaluation.json").read_text())["tasks"][tasks[0]]
    assert result["tasks"][tasks[0]] == {"adapter": before["adapter"]} and len(memory) == 1
    assert {key: getattr(memory[0], key) for key in cache} == cache
    beside = answers(runs["second"], "adapter")
    assert answers(tmp_path, "adapter").items() <= beside.items() and not answers(tmp_path, "base")


@pytest.mark.integration
def test_several_evaluations_on_one_engine_answer_as_on_engines_of_their_own(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_adapter: Make
) -> None:
    engines: list[EngineSettings] = []
    start = evaluate.start
    monkeypatch.setattr(evaluate, "start", lambda engine: (engines.append(engine), start(engine))[1])
    task = [f"jsonl-exact:{runs['folder']}/second.jsonl"]
    common = {"base": str(runs["base"]), "adapter": runs["folder"] / "adapter", "tasks": task, "quiet": True}
    common |= {"max_new_tokens": 6, "max_model_length": 64, "max_samples": 12}
    sampled = {"temperature": 1.0, "num_samples": 3, "adapter_only": True}
    other_run = {"adapter": save_adapter(runs["folder"] / "other", seed=3), "adapter_only": True}
    kinds: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": sampled, "other": other_run, "again": {}}

    def asked(where: str) -> list[Evaluation]:
        where_to = {name: {"output_dir": tmp_path / where / name} for name in kinds}
        return [Evaluation(**{**common, **options, **where_to[name]}) for name, options in kinds.items()]

    together = evaluate.evaluate_each(asked("one"))
    assert len(engines) == 1
    several = [json.loads(line) for line in (tmp_path / "one/sampled/answers.jsonl").read_text().splitlines()]
    kept = together[1]["tasks"][task[0]]["adapter"]["by_problem"]
    assert unpacked(kept["right"], 12, 3).tolist() == [line["right"] for line in several]
    assert unpacked(kept["ended"], 12, 3).tolist() == [[not cut for cut in line["cut"]] for line in several]
    apart = [evaluate.evaluate_each([one])[0] for one in asked("own")]
    assert len(engines) == 5 and len(together) == 4
    for name, one, own in zip(kinds, together, apart, strict=True):
        assert {**one, "date": ""} == {**own, "date": ""} == {**json.loads(_result(tmp_path, "one", name)), "date": ""}
        written = [(tmp_path / where / name / "answers.jsonl").read_bytes() for where in ("one", "own")]
        assert written[0] == written[1]
    assert list(together[1]["tasks"][task[0]]) == ["adapter"]
    assert [one["sampling"]["seed"] for one in together] == [None, 0, None, None]  # what is greedy draws with none
    given = {name: answers(tmp_path / "one" / name, "adapter") for name in ("greedy", "other", "again")}
    assert given["greedy"] == given["again"] != given["other"]
    # another engine where one is asked for, and one of its own where no change of policy would come between
    other = [*asked("x")[:1], asked("y")[0].model_copy(update={"max_model_length": 48})]
    base = [one.model_copy(update={"adapter": None}) for one in (asked("z")[0], asked("z")[3])]
    evaluate.evaluate_each([*other, *base])
    assert len(engines) == 9


@pytest.mark.integration
def test_another_evaluation_is_not_written_over_and_the_same_is_made_again(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_adapter: Make
) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    asked = {
        "base": str(runs["base"]),
        "adapter": runs["folder"] / "adapter",
        "tasks": [f"jsonl-exact:{tmp_path}/x.jsonl"],
    }
    asked |= {"output_dir": tmp_path / "out", "max_new_tokens": 6, "max_model_length": 64, "quiet": True}
    asked |= {"generation_kwargs": {"logit_bias": {9: 1.0}}}
    first = evaluate.evaluate(**asked)
    before = [(tmp_path / "out" / name).read_bytes() for name in ("evaluation.json", "answers.jsonl")]
    assert {**evaluate.evaluate(**asked), "date": ""} == {**first, "date": ""}
    monkeypatch.setattr(evaluate, "start", started)
    before = [(tmp_path / "out" / name).read_bytes() for name in ("evaluation.json", "answers.jsonl")]
    other = save_adapter(tmp_path / "other", seed=5)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"tasks": ["running_sum"]}, "its tasks is .* and here it is .'running_sum'.; name another output_dir, or rem"),
        ({"adapter": other}, "its adapter_sha256 is"),
        ({"adapter_only": True}, "its models is .'base', 'adapter'., and here it is .'adapter'."),
        ({"adapter": None}, "its models is"),
        ({"max_samples": 1}, "its max_samples is None, and here it is 1"),
        ({"max_new_tokens": 5}, "its max_new_tokens is 6, and here it is 5"),
        ({"max_model_length": 48}, "its max_model_length is 64, and here it is 48"),
        ({"temperature": 0.5}, r"its temperature is 0\.0, and here it is 0\.5"),
        ({"system_prompt": "1"}, "its system_prompt is"),
        ({"generation_kwargs": None}, "its generation_kwargs is"),
        ({"dtype": "float32"}, "its dtype is bfloat16, and here it is float32"),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            evaluate.evaluate(**{**asked, **change})
    (tmp_path / "x.jsonl").write_text('{"prompt": "2=", "answer": "1"}\n')
    with pytest.raises(ValueError, match="its problems_sha256 is"):
        evaluate.evaluate(**asked)
    assert before == [(tmp_path / "out" / name).read_bytes() for name in ("evaluation.json", "answers.jsonl")]
    (tmp_path / "out" / "evaluation.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"evaluation\.json is no evaluation that can be read; name another output_dir"
    ):
        evaluate.evaluate(**asked)


def _result(folder: Path, *names: str) -> str:
    return folder.joinpath(*names, "evaluation.json").read_text()


def test_all_of_several_evaluations_are_refused_before_the_first_begins(
    make_nvfp4: Make, no_engine: None, tmp_path: Path
) -> None:
    good = {"base": str(make_nvfp4("qwen2")), "adapter": None, "tasks": ["running_sum"], "output_dir": tmp_path / "o"}
    with pytest.raises(ValueError, match=r"temperature is -1\.0"):
        evaluate.evaluate_each([Evaluation(**good), Evaluation(**good, temperature=-1.0)])
    assert not (tmp_path / "o").exists()
    for change, message in (({"temprature": 1.0}, "temprature"), ({"max_new_tokens": 4.5}, "max_new_tokens")):
        with pytest.raises(ValueError, match=message):
            Evaluation(**good, **change)


@pytest.mark.integration
def test_base_and_adapter_answer_the_same_problems(runs: dict[str, Path]) -> None:
    lines = [json.loads(line) for line in (runs["second"] / "answers.jsonl").read_text().splitlines()]
    asked = {model: [(x["task"], x["problem"]) for x in lines if x["model"] == model] for model in ("base", "adapter")}
    assert asked["base"] == asked["adapter"] and len(asked["base"]) == 80


@pytest.mark.parametrize("own", [None, "1"])
def test_the_engine_of_an_evaluation_has_no_process_of_its_own_unless_asked_for(
    own: str | None, make_nvfp4: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    seen: list[str | None] = []
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    monkeypatch.setattr(vllm, "LLM", lambda **options: seen.append(os.environ.get(name)))
    monkeypatch.delenv(name)
    if own is not None:
        monkeypatch.setenv(name, own)
    evaluate.start(EngineSettings(make_nvfp4("qwen2"), "qerl_nvfp4", 8, "bfloat16", 64))
    assert seen == [own or "0"]
    monkeypatch.setenv(name, "0")  # what the other tests run with


def started(*args: object, **kwargs: object) -> None:
    raise AssertionError("the engine was started")


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "start", started)


REFUSALS = {
    "negative-fewshot": ({"num_fewshot": -1}, "num_fewshot is -1"),
    "fewshot": ({"num_fewshot": 2}, "task running_sum has no solved problems besides those that are asked"),
    "template": ({"chat_template": "nowhere.jinja"}, "neither Jinja text nor a file"),
    "template-options": ({"chat_template_kwargs": "[1]"}, "is no JSON object such as"),
    "blind-template": ({"chat_template": "7+1={# {{ #}"}, "messages of user does not contain the problem's text"),
    "no-template": (
        {"use_chat_template": True},
        "use_chat_template was asked for, but this model's tokenizer has none",
    ),
    "generation": ({"generation_kwargs": "[1]"}, "generation_kwargs: .* is no JSON object such as"),
    "generation-fixed": ({"generation_kwargs": {"max_tokens": 4}}, "generation_kwargs cannot set max_tokens: temp"),
    "generation-unknown": ({"generation_kwargs": {"stopp": 4}}, "takes no such SamplingParams: .*stopp"),
    "generation-bias": ({"generation_kwargs": {"logit_bias": {"x": 1}}}, "logit_bias has the key 'x', which is no"),
    "dtype": ({"dtype": "float64"}, "dtype is 'float64'; it is bfloat16, float16 or float32"),
    "unknown-task": ({"tasks": ["gsm9k"]}, "there is no task 'gsm9k'; choose from gsm8k"),
    "no-task": ({"tasks": []}, "name at least one task"),
    "task-twice": ({"tasks": ["running_sum", "running_sum"]}, "named twice"),
    "missing-file": ({"tasks": ["jsonl:nowhere.jsonl"]}, "there is no file nowhere.jsonl"),
    "empty-prompt": ({"tasks": ["jsonl-exact:FOLDER/x.jsonl"]}, r"x\.jsonl, line 2: prompt must be a text, and answer"),
    "greedy-samples": ({"num_samples": 4}, "temperature 0 gives the same answer"),
    "greedy-top-p": ({"top_p": 0.95}, r"top_p is 0\.95, but temperature 0 \(greedy\) draws nothing; set temperature"),
    "greedy-seed": ({"seed": 0}, r"seed is 0, but temperature 0 \(greedy\) draws nothing; set temperature"),
    "template-and-none": (
        {"use_chat_template": False, "chat_template": "{{ messages }}"},
        "chat_template would be ignored: no chat template is used .*--no-chat-template.*; remove one of the two",
    ),
    "template-options-and-none": (
        {"use_chat_template": False, "chat_template_kwargs": '{"short": true}'},
        "chat_template_kwargs would be ignored: no chat template is used",
    ),
    "negative-temperature": ({"temperature": -1.0}, "temperature is -1.0"),
    "nan-temperature": ({"temperature": float("nan")}, "temperature is nan"),
    "top-p": ({"top_p": 0.0}, "top_p is 0.0"),
    "max-samples": ({"max_samples": 0}, "max_samples is 0"),
    "adapter-only": ({"adapter_only": True}, "adapter_only leaves the base out, and there is no adapter"),
    "arm": ({"quantization": "fp8", "max_samples": 1}, "quantization is 'fp8'"),
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
    (tmp_path / "x.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n{"prompt": " ", "answer": "1"}\n')
    if "tasks" in change:
        change = {"tasks": [task.replace("FOLDER", str(tmp_path)) for task in change["tasks"]]}
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


def test_an_adapter_for_another_base_is_refused(
    make_nvfp4: Make, no_engine: None, tmp_path: Path, save_adapter: Make
) -> None:
    adapter = save_adapter(tmp_path / "adapter", 1, base="other/model", base_hash="0" * 64)
    with pytest.raises(ValueError, match="trained on another base \\(other/model\\)"):
        evaluate.evaluate(str(make_nvfp4("qwen2")), str(adapter), ["running_sum"], output_dir=tmp_path)
    own = checkpoints.base_hash(make_nvfp4("qwen2"))
    adapter = save_adapter(tmp_path / "own", 1, base="this", base_hash=own)
    adapter_folder.open_adapter(adapter).check_base(own)


@pytest.mark.parametrize(
    ("config", "name", "value", "message"),
    [
        ({}, "lora_A.weight", torch.nan, r"q_proj\.lora_A\.weight holds NaN or infinite values"),
        ({}, "lora_embedding_A", 1.0, r"q_proj\.lora_embedding_A is not of a linear layer"),
        ({"use_dora": True}, "lora_A.weight", 1.0, "the adapter uses use_dora=True"),
    ],
    ids=["nan", "embedding", "dora"],
)
def test_an_adapter_that_cannot_be_served_is_refused_before_the_base_is_judged(
    config: dict,
    name: str,
    value: float,
    message: str,
    make_nvfp4: Make,
    no_engine: None,
    tmp_path: Path,
    save_adapter: Make,
) -> None:
    adapter = save_adapter(tmp_path / "adapter", 1)
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors[f"base_model.model.model.layers.0.self_attn.q_proj.{name}"] = torch.full((4, 64), value)
    save_file(tensors, adapter / "adapter_model.safetensors")
    saved = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**saved, **config}))
    with pytest.raises(ValueError, match=message):
        evaluate.evaluate(str(make_nvfp4("qwen2")), str(adapter), ["running_sum"], output_dir=tmp_path / "o")


@pytest.mark.parametrize("content", ["{", "{}", '{"r": "four"}', '{"r": 0}', '{"r": 1000}'])
def test_a_damaged_adapter_config_is_refused(content: str, tmp_path: Path, save_adapter: Make) -> None:
    adapter = save_adapter(tmp_path / "adapter", 1)
    (adapter / "adapter_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"damaged|whole number|at most rank 512"):
        adapter_folder.engine_rank(adapter_folder.open_adapter(adapter).rank)


def test_an_nvfp4_base_is_not_what_a_bf16_adapter_was_trained_on(
    make_nvfp4: Make, save_adapter: Make, no_engine: None, tmp_path: Path
) -> None:
    base = make_nvfp4("qwen2")
    adapter = save_adapter(tmp_path / "a", 1, base_hash=checkpoints.base_hash(base), quantization="bf16")
    with pytest.raises(
        ValueError, match=r"quantization=bf16 \(what .*/a was trained on\) starts from the BF16 checkpoint"
    ):
        evaluate.evaluate(str(base), str(adapter), ["running_sum"], output_dir=tmp_path / "o")
    with pytest.raises(AssertionError, match="the engine was started"):
        evaluate.evaluate(
            str(base), str(adapter), ["running_sum"], output_dir=tmp_path / "o", quantization="qerl_nvfp4"
        )


TEMPLATE = "{% for m in messages %}{{ m['content'] }};{% endfor %}{{ '8' if more else '7' }}="


@pytest.mark.integration
def test_a_run_of_another_arm_is_judged_on_its_own_weights_with_the_prompts_of_its_training(
    make_bf16: Make, write_recipe: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    from qerl_recipes.train import run as train

    base = make_bf16("qwen2")
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}+3", "answer": "0"}) for i in range(8)))
    recipe = write_recipe(
        model_name_or_path=str(base),
        quantization="bf16",
        dataset_name=str(tmp_path / "x.jsonl"),
        dataset_size=None,
        reward_funcs=["format"],
        max_steps=1,
        system_prompt="4+4",
        chat_template=TEMPLATE,
        chat_template_kwargs={"more": True},
        generation_kwargs={"stop": ["3"], "logit_bias": {"8": 100.0}},
        vllm_structured_outputs_regex="23333",
    )
    built, build = [], train.build
    monkeypatch.setattr(train, "build", lambda *arguments: built.append(build(*arguments)) or built[-1])
    try:
        train.main(["--config", recipe])
    finally:
        built.pop().vllm_generation.close()
    _, command, report = capfd.readouterr().out.strip().splitlines()[-3:]
    words = shlex.split(command)
    assert shlex.split(report) == ["qerl", "report", str(tmp_path / "run")]
    assert words[:2] == ["qerl", "evaluate"] and words[words.index("--tasks") + 1] == f"jsonl:{tmp_path}/x.jsonl"
    cli.app(words[1:], standalone_mode=False)
    printed = capfd.readouterr().out
    assert "as in training: bf16 weights, system_prompt, max_new_tokens 12, chat_template, chat_template_kwargs" in (
        " ".join(printed.split())
    )
    assert "{'regex': '23333'}" in " ".join(printed.split())
    result = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())
    assert (result["quantization"], result["trained_on"]) == ("bf16", "bf16")
    assert result["of_training"] == [f"jsonl:{tmp_path}/x.jsonl"]
    assert "these are no unseen problems" in " ".join(printed.split())
    lines = [json.loads(line) for line in (tmp_path / "run/evaluation/answers.jsonl").read_text().splitlines()]
    assert {answer for line in lines for answer in line["answers"]} == {"23"}  # by the regex, to the stop
    assert "not as in training: temperature 0, there 1" in " ".join(printed.split())
    assert {line["prompt"] for line in lines} == {f"4+4;{i}+3;8=" for i in range(8)}
    assert len(lines) == 16
    page = write_report(tmp_path / "run").read_text()
    assert "From <code>evaluation/evaluation.json</code>" in page and "judged with" not in page
    other = {"system_prompt": None, "chat_template": "x", "chat_template_kwargs": None, "generation_kwargs": None}
    unlike = {"quantization": "nf4", "dtype": "float32", "base_sha256": "0", "num_fewshot": 1}
    unlike["sampling"] = {**result["sampling"], **other}
    (tmp_path / "run/evaluation/evaluation.json").write_text(json.dumps({**result, **unlike}))
    page = write_report(tmp_path / "run").read_text().partition("judged with")[2].partition("</table>")[0]
    assert page.count("<tr>") == len(unlike) - 1 + len(other)  # under the names that both files have for them


def test_a_truncated_base_is_refused(make_nvfp4: Make, no_engine: None, tmp_path: Path) -> None:
    base = shutil.copytree(make_nvfp4("qwen2"), tmp_path / "base")
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        evaluate.evaluate(str(base), None, ["running_sum"], output_dir=tmp_path)


def test_the_adapters_hash_covers_its_norms(tmp_path: Path, save_adapter: Make) -> None:
    adapter = save_adapter(tmp_path / "adapter", 1)
    before = adapter_folder.open_adapter(adapter).sha256()
    save_file({"model.norm.weight": torch.ones(64)}, adapter / "norms.safetensors")
    assert adapter_folder.open_adapter(adapter).sha256() != before
    assert load_file(adapter / "norms.safetensors")
