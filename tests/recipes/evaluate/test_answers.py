"""What is asked of an engine and how: prompts, seeds, sampling, limits of length. One engine serves all tests here."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qerl_recipes.evaluate import run as evaluate
from qerl_recipes.evaluate import tasks as evaluation_tasks
from qerl_recipes.evaluate.answers import Judged, ask
from qerl_recipes.evaluate.request import Sampling
from qerl_recipes.evaluate.settled import EngineSettings

Make = Callable[..., Path]
pytestmark = pytest.mark.integration
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}={{ '9' if short else '8' }}{% endif %}"
)


@pytest.fixture(scope="module")
def engine(make_nvfp4: Make) -> Iterator[Any]:
    llm = evaluate._start(EngineSettings(make_nvfp4("qwen2"), "qerl_nvfp4", 8, 64, 1, 0.9, None, "bfloat16"))
    yield llm
    evaluate.close(llm)


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two problems of the same text, so that nothing but their seeds can tell their answers apart, and eight others."""
    file = tmp_path_factory.mktemp("answers") / "x.jsonl"
    file.write_text(
        "\n".join(f'{{"prompt": "{p}", "answer": "0"}}' for p in ("1+2", "1+2", *(f"{i}+3" for i in range(8))))
    )
    return file


def answers(engine: Any, file: Path, num_samples: int = 1, **settings: Any) -> list[Judged]:
    with contextlib.chdir(file.parent):  # seeds depend on a task's name, and so on the path of a local file
        benchmarks = evaluation_tasks.load(["jsonl-exact:x.jsonl"], num_samples=num_samples)
    sampling = Sampling(**{"max_new_tokens": 6, **settings})
    return ask(engine, None, benchmarks, sampling, "base")["jsonl-exact:x.jsonl"]


def test_template_its_options_and_the_system_prompt_make_the_prompt(engine: Any, problems: Path) -> None:
    plain = answers(engine, problems)
    assert {p.prompt for p in plain} == {"1+2", *(f"{i}+3" for i in range(8))}
    asked = answers(engine, problems, chat_template=TEMPLATE, system_prompt="7", chat_template_kwargs={"short": True})
    assert [p.prompt for p in asked] == [f"s=7;u={p.prompt};=9" for p in plain]
    assert [p.answers for p in asked] != [p.answers for p in plain], "the prompt did not reach the engine"
    other = answers(engine, problems, chat_template=TEMPLATE)
    assert [p.prompt for p in other] == [f"u={p.prompt};=8" for p in plain]
    assert [p.prompt for p in answers(engine, problems, system_prompt="7")] == [f"7\n\n{p.prompt}" for p in plain]
    off = answers(engine, problems, chat_template=TEMPLATE, use_chat_template=False)
    assert [p.answers for p in off] == [p.answers for p in plain]


def test_what_would_be_ignored_of_a_template_is_refused(engine: Any, problems: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer has none; give --chat_template"):
        answers(engine, problems, use_chat_template=True)
    with pytest.raises(ValueError, match=r"chat_template_kwargs .* would be ignored"):
        answers(engine, problems, chat_template_kwargs={"short": True})


def test_every_answer_to_every_problem_has_a_seed_of_its_own(engine: Any, problems: Path) -> None:
    drawn = answers(engine, problems, num_samples=6, temperature=1.0)
    assert len(drawn) == 10 and all(len(p.answers) == 6 for p in drawn)
    assert all(len(set(p.answers)) > 1 for p in drawn), "the samples of a problem are one sample"
    twins = [p.answers for p in drawn if p.prompt == "1+2"]
    assert len(twins) == 2 and twins[0] != twins[1], "two problems share their seeds"
    assert [p.answers for p in answers(engine, problems, num_samples=6, temperature=1.0)] == [p.answers for p in drawn]
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
    # BF16 logits tie now and then, and a draw between equals is not the greedy one's
    assert agreeing(temperature=1.0, top_p=1e-6) >= 8
    assert agreeing(temperature=1e-4) >= 8


def test_an_answer_ends_at_the_limit_or_where_the_model_has_no_more_room(engine: Any, problems: Path) -> None:
    assert all(len(p.answers[0]) < 40 for p in answers(engine, problems))
    (longest,) = [p for p in answers(engine, problems, max_new_tokens=6) if p.prompt == "7+3"]
    assert longest.cut == [True], "a random model does not end its turn"
    assert answers(engine, problems, max_new_tokens=10_000)[0].cut == [True]  # 64 tokens in all
    with pytest.raises(ValueError, match=r"tokens and max_model_length is 64: there is no room"):
        answers(engine, problems, system_prompt="1" * 64)


def test_sampled_answers_to_more_prompts_than_are_computed_at_once(engine: Any) -> None:
    """A prompt that is computed in parts would set its seeded generator back, which torch's on a CPU cannot do."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [3 + i % 7] * 47} for i in range(128)]  # 6016 tokens; vLLM takes 4096 at once
    sampling = [SamplingParams(max_tokens=2, temperature=1.0, seed=i) for i in range(128)]
    assert len(engine.generate(prompts, sampling, use_tqdm=False)) == 128


def test_promise_03_and_promise_10_the_base_is_evaluated_without_noise_and_without_adapter(
    engine: Any, save_adapter: Make, tmp_path: Path
) -> None:
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
    request = evaluate._install(engine, open_adapter(save_adapter(tmp_path / "adapter", 1)))
    assert Policy(engine).state().sigma == 0
    assert generate(request) != clean
    Policy(engine).set_noise(0.5, seed=1, rollout=1)
    assert generate(policy.request) != clean
    request = evaluate._install(engine, None)
    assert Policy(engine).state().sigma == 0
    assert generate(request) == clean
