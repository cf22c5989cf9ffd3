"""Test ``qerl evaluate``: base and adapter run through lighteval on one engine, and refusals come before the engine
starts.
"""

import json
import shlex
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
from qerl_recipes.files.run_state import base_hash

pytestmark = pytest.mark.usefixtures("light_engines")
Make = Callable[..., Path]


def lines_of(folder: Path, model: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of answers.jsonl, of one policy or of all."""
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return [line for line in lines if model in (None, line["model"])]


def answers(folder: Path, model: str) -> dict[str, str]:
    return {line["prompt"]: line["answers"][0] for line in lines_of(folder, model)}


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "evaluation.json").read_text())


OPTIONS = {"max_new_tokens": 6, "max_model_length": 64, "quiet": True}


@pytest.fixture(scope="module")
def runs(make_nvfp4: Make, tmp_path_factory: pytest.TempPathFactory, save_adapter: Make) -> dict[str, Path]:
    """Evaluate two adapters, one after the other, that lay at the same path."""
    base, folder = make_nvfp4("qwen2"), tmp_path_factory.mktemp("evaluate")
    problems = [{"prompt": f"{a}+{b}=", "answer": "0"} for a in range(1, 9) for b in range(1, 9)]
    (folder / "first.jsonl").write_text("\n".join(map(json.dumps, problems)))
    adapter = save_adapter(folder / "adapter", seed=1)
    with pytest.warns(UserWarning, match=r"first\.jsonl: .* were cut at max_new_tokens=6; accuracy counts what they"):
        evaluate.evaluate(
            str(base), str(adapter), [f"jsonl-exact:{folder}/first.jsonl"], output_dir=folder / "first", **OPTIONS
        )
    # The second evaluation's right answers are those that the base gave in the first.
    given = answers(folder / "first", "base")
    lines = [{"prompt": prompt, "answer": answer} for prompt, answer in given.items() if answer.strip()]
    (folder / "second.jsonl").write_text("\n".join(map(json.dumps, lines)))
    save_adapter(adapter, seed=2)
    tasks = [f"jsonl-exact:{folder}/second.jsonl", "running_sum"]
    evaluate.evaluate(str(base), str(adapter), tasks, output_dir=folder / "second", max_samples=40, **OPTIONS)
    return {"base": base, "folder": folder, "first": folder / "first", "second": folder / "second"}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[EngineSettings]:
    """Record the settings of every engine that a test starts."""
    started: list[EngineSettings] = []
    start = evaluate.start
    monkeypatch.setattr(evaluate, "start", lambda engine: (started.append(engine), start(engine))[1])
    return started


@pytest.mark.integration
def test_the_figures_are_those_of_the_answers(runs: dict[str, Path]) -> None:
    result = result_of(runs["second"])
    arms = result["tasks"][f"jsonl-exact:{runs['folder']}/second.jsonl"]
    assert arms["base"]["accuracy"] == 1.0 and arms["base"]["n"] == 40
    assert arms["base"]["ci95"] == list(wilson(40, 40))
    assert arms["adapter"]["accuracy"] < 1.0
    lines = lines_of(runs["second"])
    for task, of in result["tasks"].items():
        for model in ("base", "adapter"):
            right = [line["right"] for line in lines if (line["task"], line["model"]) == (task, model)]
            assert unpacked(of[model]["by_problem"]["right"], 40, 1).tolist() == right
    asked = {model: [(x["task"], x["problem"]) for x in lines if x["model"] == model] for model in ("base", "adapter")}
    assert asked["base"] == asked["adapter"] and len(asked["base"]) == 80
    assert result["base_sha256"] == base_hash(runs["base"])
    assert result["sampling"]["temperature"] == 0.0 and result["max_model_length"] == 64


@pytest.mark.integration
def test_beside_an_accuracy_stands_the_share_that_ended(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    result = result_of(runs["first"])
    ((task, arms),) = result["tasks"].items()
    for model in ("base", "adapter"):
        cut = [line["cut"][0] for line in lines_of(runs["first"], model)]
        assert arms[model]["cut"] == sum(cut) / 64 and arms[model]["ended"] == 1 - sum(cut) / 64
        assert unpacked(arms[model]["by_problem"]["ended"], 64, 1)[:, 0].tolist() == [not one for one in cut]
    # A random model seldom ends its turn, so other shares are written by hand.
    many = {"pass_at": {"2": {"value": 0.5, "ci95": [0.4, 0.6]}}, "maj_at": {}}
    of = {"base": {**arms["base"], **many, "ended": 0.75}, "adapter": {**arms["adapter"], **many, "ended": 1.0}}
    evaluate.Console().print(evaluate.table({**result, "tasks": {task: of}}))
    printed = capsys.readouterr().out.splitlines()
    assert "ended" in printed[2]
    assert ["75% / 100%" in line for line in printed if "first.jsonl" in line or "pass@2" in line] == [True, True]


@pytest.mark.integration
def test_an_adapter_never_gets_the_answers_of_its_predecessor(runs: dict[str, Path]) -> None:
    first, second = answers(runs["first"], "adapter"), answers(runs["second"], "adapter")
    common = first.keys() & second.keys()
    assert len(common) == 40
    assert any(first[prompt] != second[prompt] for prompt in common)
    # The base answers alike in both runs, so only the adapter can cause the difference above.
    base = answers(runs["second"], "base")
    assert all(base[prompt] == answer for prompt, answer in answers(runs["first"], "base").items() if prompt in common)
    assert result_of(runs["first"])["adapter_sha256"] != result_of(runs["second"])["adapter_sha256"]


@pytest.mark.integration
def test_an_adapter_that_does_not_fit_is_refused_before_the_base_is_judged(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_adapter: Make
) -> None:
    from qerl_recipes.evaluate import answers

    adapter = save_adapter(tmp_path / "narrow", seed=1)
    tensors = load_file(weights := adapter / "adapter_model.safetensors")
    save_file({name: tensor[:, :32].clone() for name, tensor in tensors.items()}, weights)
    monkeypatch.setattr(answers, "ask", lambda *_: pytest.fail("the base was judged"))
    with pytest.raises(ValueError, match=r"lora_A\.weight has shape \(4, 32\), this model and rank 4 need"):
        evaluate.evaluate(str(runs["base"]), str(adapter), ["running_sum"], output_dir=tmp_path / "out", **OPTIONS)


@pytest.mark.integration
def test_the_adapter_alone_answers_as_beside_the_base(
    runs: dict[str, Path], tmp_path: Path, engines: list[EngineSettings]
) -> None:
    tasks = [f"jsonl-exact:{runs['folder']}/second.jsonl"]
    cache = {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.5}
    options = {**OPTIONS, **cache, "max_samples": 40, "adapter_only": True, "output_dir": tmp_path}
    result = evaluate.evaluate(str(runs["base"]), str(runs["folder"] / "adapter"), tasks, **options)
    before = result_of(runs["second"])["tasks"][tasks[0]]
    assert result["tasks"][tasks[0]] == {"adapter": before["adapter"]} and len(engines) == 1
    assert {key: getattr(engines[0], key) for key in cache} == cache
    beside = answers(runs["second"], "adapter")
    assert answers(tmp_path, "adapter").items() <= beside.items() and not answers(tmp_path, "base")


@pytest.mark.integration
def test_evaluations_on_one_engine_answer_as_on_their_own(
    runs: dict[str, Path], tmp_path: Path, engines: list[EngineSettings], save_adapter: Make
) -> None:
    task = [f"jsonl-exact:{runs['folder']}/second.jsonl"]
    common = {"base": str(runs["base"]), "adapter": runs["folder"] / "adapter", "tasks": task, "max_samples": 12}
    other_run = {"adapter": save_adapter(runs["folder"] / "other", seed=3), "adapter_only": True}
    sampled = {"temperature": 1.0, "num_samples": 3, "adapter_only": True}
    kinds: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": sampled, "other": other_run, "again": {}}

    def asked(where: str) -> list[Evaluation]:
        return [
            Evaluation(**{**OPTIONS, **common, **options, "output_dir": tmp_path / where / name})
            for name, options in kinds.items()
        ]

    together = evaluate.evaluate_each(asked("one"))
    assert len(engines) == 1
    several = lines_of(tmp_path / "one" / "sampled")
    kept = together[1]["tasks"][task[0]]["adapter"]["by_problem"]
    assert unpacked(kept["right"], 12, 3).tolist() == [line["right"] for line in several]
    assert unpacked(kept["ended"], 12, 3).tolist() == [[not cut for cut in line["cut"]] for line in several]
    apart = [evaluate.evaluate_each([one])[0] for one in asked("own")]
    assert len(engines) == 5 and len(together) == 4
    for name, one, own in zip(kinds, together, apart, strict=True):
        assert {**one, "date": ""} == {**own, "date": ""} == {**result_of(tmp_path / "one" / name), "date": ""}
        written = [(tmp_path / where / name / "answers.jsonl").read_bytes() for where in ("one", "own")]
        assert written[0] == written[1]
    assert list(together[1]["tasks"][task[0]]) == ["adapter"]
    assert [one["sampling"]["seed"] for one in together] == [None, 0, None, None]  # greedy decoding uses no seed
    given = {name: answers(tmp_path / "one" / name, "adapter") for name in ("greedy", "other", "again")}
    assert given["greedy"] == given["again"] != given["other"]
    # A new engine starts where another is asked for, and where no change of policy would separate two evaluations.
    other = [*asked("x")[:1], asked("y")[0].model_copy(update={"max_model_length": 48})]
    base = [one.model_copy(update={"adapter": None}) for one in (asked("z")[0], asked("z")[3])]
    evaluate.evaluate_each([*other, *base])
    assert len(engines) == 9


@pytest.mark.integration
def test_noise_changes_the_answers_it_is_asked_for_and_no_others(
    runs: dict[str, Path], tmp_path: Path, make_bf16: Make, engines: list[EngineSettings], save_adapter: Make
) -> None:
    task = [f"jsonl-exact:{runs['folder']}/second.jsonl"]
    common = {**OPTIONS, "tasks": task, "max_samples": 12}
    kinds: dict[str, dict[str, Any]] = {"clean": {}, "noisy": {"noise_sigma": 0.5}, "other": {"noise_sigma": 0.5}}
    kinds |= {"again": {"noise_sigma": 0.5}, "clear": {}}
    kinds["other"]["noise_seed"] = 1
    trained = {"base": str(runs["base"]), "adapter": runs["folder"] / "adapter"}
    asked = [Evaluation(**common, **trained, **of, output_dir=tmp_path / name) for name, of in kinds.items()]
    own = save_adapter(tmp_path / "trained", 1, recipe={"noise_targets": ["input_layernorm"]})
    asked.append(asked[1].model_copy(update={"adapter": own, "output_dir": tmp_path / "own"}))
    results = evaluate.evaluate_each(asked)
    assert len(engines) == 1
    targets = [results[i]["noise_targets"] for i in (1, 5)]
    assert targets == [["input_layernorm", "post_attention_layernorm"], ["input_layernorm"]]
    assert answers(tmp_path / "own", "base") != answers(tmp_path / "noisy", "base")
    assert [(of["noise_sigma"], of["noise_seed"]) for of in results[:3]] == [(0.0, 0), (0.5, 0), (0.5, 1)]
    for policy in ("base", "adapter"):
        given = {name: answers(tmp_path / name, policy) for name in kinds}
        assert given["clean"] == given["clear"] and given["noisy"] == given["again"]
        assert given["clean"] != given["noisy"] != given["other"] != given["clean"]
    alone = {"base": str(make_bf16("qwen2")), "quantization": "bf16"}
    evaluate.evaluate_each(
        [Evaluation(**common, **alone, noise_sigma=s, output_dir=tmp_path / f"bf16-{s}") for s in (0.0, 0.5)]
    )
    assert answers(tmp_path / "bf16-0.0", "base") != answers(tmp_path / "bf16-0.5", "base")


@pytest.mark.integration
def test_another_evaluation_is_not_written_over(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_adapter: Make
) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    asked = {"base": str(runs["base"]), "adapter": runs["folder"] / "adapter"}
    asked |= {"tasks": [f"jsonl-exact:{tmp_path}/x.jsonl"], **OPTIONS}
    asked |= {"output_dir": tmp_path / "out", "generation_kwargs": {"logit_bias": {9: 1.0}}}
    first = evaluate.evaluate(**asked)
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


def started(*args: object, **kwargs: object) -> None:
    raise AssertionError("the engine was started")


@pytest.fixture
def refused(make_nvfp4: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return refused(message, **options), which checks that evaluating a base is refused before an engine starts."""
    monkeypatch.setattr(evaluate, "start", started)

    def check(message: str, **options: Any) -> None:
        asked = {"base": str(make_nvfp4("qwen2")), "adapter": None, "tasks": ["running_sum"]}
        with pytest.raises(ValueError, match=message):
            evaluate.evaluate(**{**asked, "output_dir": tmp_path / "o", **options})
        assert not (tmp_path / "o").exists()

    return check


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, r"temperature is -1\.0"),  # test_request.py tests the other refusals of this kind
        ({"chat_template": "7+1={# {{ #}"}, "messages of user does not contain the problem's text"),
        ({"use_chat_template": True}, "use_chat_template was asked for, but this model's tokenizer has none"),
        ({"generation_kwargs": {"stopp": 4}}, "takes no such SamplingParams: .*stopp"),
        ({"generation_kwargs": {"logit_bias": {"x": 1}}}, "logit_bias has the key 'x', which is no"),
        ({"dtype": "float64"}, "dtype is 'float64'; it is bfloat16, float16 or float32"),
        ({"quantization": "fp8", "max_samples": 1}, "quantization is 'fp8'"),
        ({"quantization": "nf4"}, "starts from the BF16 checkpoint"),
        ({"adapter": "/nowhere"}, "/nowhere is no adapter"),
        ({"base": "/nowhere"}, "there is no such folder"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused_before_the_engine_starts(options: dict[str, Any], message: str, refused: Any) -> None:
    refused(message, **options)


def test_all_evaluations_are_refused_before_the_first_begins(
    make_nvfp4: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"base": str(make_nvfp4("qwen2")), "tasks": ["running_sum"], "output_dir": tmp_path / "o"}
    with pytest.raises(ValueError, match=r"top_p is 0\.5"):
        evaluate.evaluate_each([Evaluation(**good), Evaluation(**good, top_p=0.5)])
    (tmp_path / "x.jsonl").write_text('{"prompt": "1=", "answer": "one"}\n')
    unreadable = {**good, "adapter": None, "tasks": [f"jsonl-number:{tmp_path}/x.jsonl"]}
    monkeypatch.setattr(evaluate, "start", started)
    with pytest.raises(ValueError, match="so that whatever is said would be wrong"):
        evaluate.evaluate_each([Evaluation(**good), Evaluation(**unreadable)])
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("config", "name", "value", "message"),
    [
        ({}, "lora_A.weight", torch.nan, r"q_proj\.lora_A\.weight holds NaN or infinite values"),
        ({}, "lora_embedding_A", 1.0, r"q_proj\.lora_embedding_A is not of a linear layer"),
        ({"use_dora": True}, "lora_A.weight", 1.0, "the adapter uses use_dora=True"),
        ({"r": 0}, "lora_A.weight", 1.0, "whole number"),
        ({"r": 1000}, "lora_A.weight", 1.0, "at most rank 512"),
    ],
    ids=["nan", "embedding", "dora", "no-rank", "rank"],
)
def test_an_adapter_that_cannot_be_served_is_refused(
    config: dict[str, Any], name: str, value: float, message: str, refused: Any, tmp_path: Path, save_adapter: Make
) -> None:
    adapter = save_adapter(tmp_path / "adapter", 1)
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors[f"base_model.model.model.layers.0.self_attn.q_proj.{name}"] = torch.full((4, 64), value)
    save_file(tensors, adapter / "adapter_model.safetensors")
    saved = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**saved, **config}))
    refused(message, adapter=str(adapter))


def test_an_adapter_of_another_base_or_format_is_refused(
    make_nvfp4: Make, refused: Any, tmp_path: Path, save_adapter: Make
) -> None:
    other = save_adapter(tmp_path / "other", 1, base="other/model", base_hash="0" * 64)
    refused(r"trained on another base \(other/model\)", adapter=str(other))
    bf16 = save_adapter(tmp_path / "a", 1, base_hash=base_hash(make_nvfp4("qwen2")), quantization="bf16")
    refused(r"quantization=bf16 \(what .*/a was trained on\) starts from the BF16 checkpoint", adapter=str(bf16))
    with pytest.raises(AssertionError, match="the engine was started"):
        refused("", adapter=str(bf16), quantization="qerl_nvfp4")


def test_nf4_is_refused_without_a_gpu(make_bf16: Make) -> None:
    with pytest.raises(ValueError, match=r"nf4.* needs a CUDA GPU; on this machine use qerl_nvfp4"):
        evaluate.start(EngineSettings(make_bf16("qwen2"), "nf4", 8, "bfloat16", 64))


TEMPLATE = "{% for m in messages %}{{ m['content'] }};{% endfor %}{{ '8' if more else '7' }}="


@pytest.mark.integration
def test_a_run_is_judged_on_its_weights_with_its_prompts(
    make_bf16: Make, write_recipe: Make, train_main: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
    train_main("--config", recipe)
    _, command, report = capfd.readouterr().out.strip().splitlines()[-3:]
    words = shlex.split(command)
    assert shlex.split(report) == ["qerl", "report", str(tmp_path / "run")]
    assert words[:2] == ["qerl", "evaluate"] and words[words.index("--tasks") + 1] == f"jsonl:{tmp_path}/x.jsonl"
    cli.app(words[1:], standalone_mode=False)
    printed = " ".join(capfd.readouterr().out.split())
    assert "as in training: bf16 weights, system_prompt, max_new_tokens 12, chat_template, chat_template_kw" in printed
    assert "{'regex': '23333'}" in printed
    result = result_of(tmp_path / "run/evaluation")
    assert (result["quantization"], result["trained_on"]) == ("bf16", "bf16")
    assert result["of_training"] == [f"jsonl:{tmp_path}/x.jsonl"]
    assert "these are no unseen problems" in printed
    lines = lines_of(tmp_path / "run/evaluation")
    # the regex allows only this, up to the stop
    assert {answer for line in lines for answer in line["answers"]} == {"23"}
    assert "not as in training: temperature 0, there 1" in printed
    assert {line["prompt"] for line in lines} == {f"4+4;{i}+3;8=" for i in range(8)}
    assert len(lines) == 16
    page = write_report(tmp_path / "run").read_text()
    assert "From <code>evaluation/evaluation.json</code>" in page and "not made as the run" not in page
