"""Test what an engine is asked and how: prompts, seeds, sampling and length limits. One engine serves all tests
here.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from qerl_recipes.evaluate import figures
from qerl_recipes.evaluate import run as evaluate
from qerl_recipes.evaluate.answers import Judged, _judged, _Prompt, ask
from qerl_recipes.evaluate.request import Sampling
from qerl_recipes.tasks import running_sum

Make = Callable[..., Path]
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("light_engines")]
REASONS = ("stop", "length", "stop")  # why answers end
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}={{ '9' if short else '8' }}{% endif %}"
)


@pytest.fixture(scope="module")
def engine(make_nvfp4: Make) -> Iterator[Any]:
    llm = evaluate.start(evaluate.EngineSettings(make_nvfp4("qwen2"), "qerl_nvfp4", 8, "bfloat16", 64))
    yield llm
    evaluate.close(llm)


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two problems of the same text, so that only seeds can make their answers differ, and eight others."""
    file = tmp_path_factory.mktemp("answers") / "x.jsonl"
    file.write_text(
        "\n".join(f'{{"prompt": "{p}", "answer": "0"}}' for p in ("1+2", "1+2", *(f"{i}+3" for i in range(8))))
    )
    return file


def answers(engine: Any, file: Path, num_samples: int = 1, **settings: Any) -> list[Judged]:
    from qerl_recipes.evaluate import tasks as evaluation_tasks

    with contextlib.chdir(file.parent):  # seeds depend on the task's name, which contains a local file's path
        benchmarks = evaluation_tasks.load(["jsonl-exact:x.jsonl"], num_samples=num_samples)
    sampling = Sampling(**{"max_new_tokens": 6, **settings})
    return ask(engine, None, benchmarks, sampling, "base")["jsonl-exact:x.jsonl"]


def test_template_and_system_prompt_make_the_prompt(engine: Any, problems: Path) -> None:
    plain = answers(engine, problems)
    assert {p.prompt for p in plain} == {"1+2", *(f"{i}+3" for i in range(8))}
    asked = answers(engine, problems, chat_template=TEMPLATE, system_prompt="7", chat_template_kwargs={"short": True})
    assert [p.prompt for p in asked] == [f"s=7;u={p.prompt};=9" for p in plain]
    assert [p.answers for p in asked] != [p.answers for p in plain], "the prompt did not reach the engine"
    other = answers(engine, problems, chat_template=TEMPLATE, system_prompt="")  # an empty system prompt counts as none
    assert [p.prompt for p in other] == [f"u={p.prompt};=8" for p in plain]
    assert [p.prompt for p in answers(engine, problems, system_prompt="7")] == [f"7\n\n{p.prompt}" for p in plain]
    off = answers(engine, problems, chat_template=TEMPLATE, use_chat_template=False)
    assert [p.answers for p in off] == [p.answers for p in plain]


def test_what_would_be_ignored_of_a_template_is_refused(engine: Any, problems: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer has none; give --chat_template"):
        answers(engine, problems, use_chat_template=True)
    with pytest.raises(ValueError, match=r"chat_template_kwargs .* would be ignored"):
        answers(engine, problems, chat_template_kwargs={"short": True})


def test_every_answer_has_a_seed_of_its_own(engine: Any, problems: Path, evaluation_tasks: Any) -> None:
    drawn = answers(engine, problems, num_samples=6, temperature=1.0)
    assert len(drawn) == 10 and all(len(p.answers) == 6 for p in drawn)
    assert all(len(set(p.answers)) > 1 for p in drawn), "the samples of a problem are one sample"
    twins = [p.answers for p in drawn if p.prompt == "1+2"]
    assert len(twins) == 2 and twins[0] != twins[1], "two problems share their seeds"
    assert [p.answers for p in answers(engine, problems, num_samples=6, temperature=1.0)] == [p.answers for p in drawn]
    number = evaluation_tasks.load([f"jsonl-number:{problems}"], num_samples=6)
    (other,) = ask(engine, None, number, Sampling(max_new_tokens=6, temperature=1.0), "base").values()
    assert [p.answers for p in other] != [p.answers for p in drawn], "two tasks share their seeds"
    assert [p.answers for p in answers(engine, problems, num_samples=6, temperature=1.0, seed=1)] != [
        p.answers for p in drawn
    ]


def test_temperature_and_top_p_are_honoured(engine: Any, problems: Path) -> None:
    greedy = [p.answers for p in answers(engine, problems)]

    def agreeing(**settings: float) -> int:
        drawn = [p.answers for p in answers(engine, problems, **settings)]
        return sum(a == b for a, b in zip(drawn, greedy, strict=True))

    assert agreeing() == 10
    assert agreeing(temperature=1.0) <= 4
    # BF16 logits sometimes tie, and a draw between equal ones need not match greedy decoding.
    assert agreeing(temperature=1.0, top_p=1e-6) >= 8
    assert agreeing(temperature=1e-4) >= 8


def test_an_answer_ends_at_the_limit_or_the_end_of_the_room(engine: Any, problems: Path) -> None:
    assert all(len(p.answers[0]) < 40 for p in answers(engine, problems))
    (longest,) = [p for p in answers(engine, problems, max_new_tokens=6) if p.prompt == "7+3"]
    assert longest.room == 61  # of 64 tokens
    assert longest.cut == [True], "a random model does not end its turn"
    assert answers(engine, problems, max_new_tokens=10_000)[0].cut == [True]  # the model's length is 64 tokens in all
    with pytest.raises(ValueError, match=r"tokens and max_model_length is 64: there is no room"):
        answers(engine, problems, system_prompt="1" * 64)


@pytest.fixture
def computed(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the engine's own outputs, as it generates them."""
    found: list[Any] = []
    generate = engine.generate

    def keep(*arguments: Any, **options: Any) -> list[Any]:
        outputs = generate(*arguments, **options)
        found[:] = outputs
        return outputs

    monkeypatch.setattr(engine, "generate", keep)
    return found


def test_a_tasks_own_length_holds_unless_one_is_asked_for(
    engine: Any, problems: Path, computed: list[Any], evaluation_tasks: Any
) -> None:
    def longest(**settings: Any) -> tuple[int, int]:
        """Return the longest answer, and the longest prompt with its answer."""
        ask(engine, None, [benchmark], Sampling(**settings), "base")
        lengths = [(len(output.prompt_token_ids), len(output.outputs[0].token_ids)) for output in computed]
        return max(answer for _, answer in lengths), max(map(sum, lengths))

    (benchmark,) = evaluation_tasks.load([f"jsonl-exact:{problems}"])
    assert longest()[1] == 64  # generation fills max_model_length to the last token
    for doc in benchmark.problems:
        doc.generation_size = 3
    assert [longest()[0], longest(max_new_tokens=5)[0], longest(max_new_tokens=2)[0]] == [3, 5, 2]


def test_stop_words_end_an_answer_unless_a_template_does(
    engine: Any, problems: Path, monkeypatch: pytest.MonkeyPatch, evaluation_tasks: Any
) -> None:
    def texts(**settings: Any) -> list[Judged]:
        return ask(engine, None, [benchmark], Sampling(max_new_tokens=6, **settings), "base")[benchmark.name]

    (benchmark,) = evaluation_tasks.load([f"jsonl-exact:{problems}"])
    free, templated = texts(), texts(chat_template=TEMPLATE)
    letters = Counter(letter for p in (*free, *templated) for letter in set(p.answers[0][:5]))
    word = letters.most_common(1)[0][0]
    assert any(word in p.answers[0] for p in free) and any(word in p.answers[0] for p in templated)
    for doc in benchmark.problems:
        doc.stop_sequences = [word]
    stopped = texts()
    assert [p.answers[0] for p in stopped] == [p.answers[0].partition(word)[0] for p in free]
    assert [p.cut[0] for p in stopped] == [word not in p.answers[0] for p in free]
    assert [p.answers for p in texts(chat_template=TEMPLATE)] == [p.answers for p in templated]
    tokenizer = running_sum.tokenizer()
    monkeypatch.setattr(engine, "get_tokenizer", lambda: tokenizer)
    given = texts(chat_template=TEMPLATE)
    tokenizer.chat_template = TEMPLATE  # the tokenizer's own template
    assert [p.answers for p in texts()] == [p.answers for p in given]
    assert any(word in p.answers[0] for p in given)


def test_a_template_writes_the_first_token_itself(
    engine: Any, problems: Path, computed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a template such as Llama's, which writes the first token, gets no second one.

    Otherwise the prompt would differ from that of training.
    """
    tokenizer = running_sum.tokenizer()
    first = tokenizer.convert_ids_to_tokens(9)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 9)])
    monkeypatch.setattr(engine, "get_tokenizer", lambda: tokenizer)
    (plain, *_) = answers(engine, problems)
    assert computed[0].prompt_token_ids == [9, *running_sum.tokenizer()(plain.prompt)["input_ids"]]
    (asked, *_) = answers(engine, problems, chat_template=TEMPLATE)
    assert computed[0].prompt_token_ids == running_sum.tokenizer()(asked.prompt)["input_ids"]


def test_the_samples_of_a_problem_keep_their_order(engine: Any, problems: Path) -> None:
    alone = answers(engine, problems, temperature=1.0)
    many = answers(engine, problems, num_samples=3, temperature=1.0)
    same = [one.answers[0] == several.answers[0] for one, several in zip(alone, many, strict=True)]
    assert sum(same) >= 8  # batches of other sizes sometimes round differently


def test_the_share_that_ended_is_of_all_answers() -> None:
    problem = Judged(
        "1", "1+1=", "2", ["2", "3", "2", "2"], [True, False, True, True], [True] + [False] * 3, True, 0.75, 9
    )
    found = figures.summarize([problem] * 6, num_samples=4)
    assert (found["n"], found["accuracy"], found["ended"], found["cut"]) == (6, 0.75, 0.75, 0.25)
    assert found["room_of_cut"] == [9, 9]


@pytest.mark.parametrize(
    ("texts", "vote", "share"),
    [
        (["0"], True, 1.0),
        (["", "0"], True, 0.5),  # an empty answer does not vote
        (["0", "1", "1"], False, 1 / 3),
        (["", " "], False, 0.0),
    ],
)
def test_a_problem_has_its_share_and_its_vote(
    texts: list[str], vote: bool, share: float, problems: Path, evaluation_tasks: Any
) -> None:
    (benchmark,) = evaluation_tasks.load([f"jsonl-exact:{problems}"])
    outputs = [SimpleNamespace(text=text, finish_reason=reason) for text, reason in zip(texts, REASONS, strict=False)]
    found = _judged(benchmark, _Prompt(benchmark.problems[0], "1+2", []), 64, outputs)
    assert (found.vote, found.share, found.right) == (vote, pytest.approx(share), [text == "0" for text in texts])
    assert found.cut == [False, True, False][: len(texts)]


def test_promise_03_and_promise_10_the_base_is_evaluated_alone(engine: Any, save_adapter: Make, tmp_path: Path) -> None:
    from vllm import SamplingParams

    from qerl_recipes.files.adapter import open_adapter
    from qerl_vllm_plugin.policy import Policy

    prompts = [{"prompt_token_ids": [first, 12, 5]} for first in range(3, 13)]

    def generate(request: object) -> list[list[int]]:
        outputs = engine.generate(
            prompts, SamplingParams(temperature=0, max_tokens=8), lora_request=request, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    clean = generate(None)
    policy = Policy(engine)
    policy.set_noise(0.5, seed=1, rollout=1)
    request = evaluate.install(engine, open_adapter(save_adapter(tmp_path / "adapter", 1)))
    assert Policy(engine).state().sigma == 0
    assert generate(request) != clean
    Policy(engine).set_noise(0.5, seed=1, rollout=1)
    assert generate(policy.request) != clean
    request = evaluate.install(engine, None)
    assert Policy(engine).state().sigma == 0
    assert generate(request) == clean


def test_an_adapter_in_lora_slots_answers_too(
    make_bf16: Make, save_adapter: Make, problems: Path, tmp_path: Path, evaluation_tasks: Any
) -> None:
    """Evaluate an adapter in LoRA slots.

    This test comes last here, because closing its engine also closes vLLM's process groups.
    """
    from qerl_recipes.files.adapter import open_adapter

    llm = evaluate.start(evaluate.EngineSettings(make_bf16("qwen2"), "bf16", 8, "bfloat16", 64))
    try:
        (benchmark,) = evaluation_tasks.load([f"jsonl-exact:{problems}"])
        found = []
        for saved in (None, open_adapter(save_adapter(tmp_path / "adapter", 1))):
            request = evaluate.install(llm, saved)
            (asked,) = ask(llm, request, [benchmark], Sampling(max_new_tokens=6), "it").values()
            found.append([p.answers for p in asked])
    finally:
        evaluate.close(llm)
    assert found[0] != found[1]
