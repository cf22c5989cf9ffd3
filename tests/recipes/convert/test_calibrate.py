"""Test the texts for calibrating GPTQ: a BF16 model's answers to a recipe's problems, and a file of texts."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from qerl_recipes.convert import calibrate
from qerl_recipes.convert.calibrate import LENGTH, SAMPLES, read, write_own_answers
from qerl_recipes.recipe.configs import parse
from qerl_recipes.tasks import prompts, running_sum
from qerl_recipes.tasks.sources import LOADERS

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ mark }}{% endif %}"


@pytest.fixture
def recipe(write_recipe, make_bf16):
    """Return recipe(**changes), which gives the flags of a recipe on a BF16 model with an NVFP4 arm."""
    return lambda **changes: [
        "--config",
        write_recipe(**{"model_name_or_path": str(make_bf16("qwen2")), "quantization": "qerl_nvfp4", **changes}),
    ]


@pytest.fixture
def written(recipe, tmp_path, light_engines):
    """Return written(samples, **changes), which gives the lines of the file and what was printed."""
    files = iter(tmp_path / f"{i}.jsonl" for i in range(9))

    def write(samples, **changes):
        file = next(files)
        said = write_own_answers(recipe(**changes), file, samples)
        return [json.loads(line) for line in file.read_text().splitlines()], said

    return write


def test_each_line_is_a_training_problem_and_what_bf16_answers(written, recipe, make_bf16):
    change = {"chat_template": TEMPLATE, "chat_template_kwargs": {"mark": "7"}, "temperature": 0.01}
    lines, said = written(6, dtype="float32", max_completion_length=5, **change)
    script, training, _ = parse(recipe(**change))
    tokenizer = running_sum.tokenizer()
    tokenizer.chat_template = TEMPLATE
    rows = prompts.read(script, LOADERS)
    problems = prompts.load(script, tokenizer, rows, training.chat_template_kwargs)[0][:6]["prompt"]
    model = AutoModelForCausalLM.from_pretrained(make_bf16("qwen2"), dtype=torch.float32)
    for line, problem in zip(lines, problems, strict=True):
        asked = prompts.ids(problem, tokenizer, {"mark": "7"})
        ids = line["input_ids"]
        assert ids[: len(asked)] == asked and tokenizer.decode(ids) == line["text"]
        # Sampling is almost greedy, so each token is the unquantized model's likeliest.
        with torch.no_grad():
            likeliest = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        assert ids[len(asked) :] == likeliest[len(asked) - 1 : -1]
        ends = ids[-1] == tokenizer.eos_token_id
        assert len(ids) - len(asked) == 5 or ends, "an answer ends where it ends, with the token that says so"
    cut = sum(line["input_ids"][-1] != tokenizer.eos_token_id for line in lines)
    assert f"6 problems with an answer each, {sum(len(line['input_ids']) for line in lines)} tokens; {cut} ans" in said


def test_answers_are_drawn_as_the_recipe_says(written):
    first, _ = written(4)
    assert written(4)[0] == first
    assert written(1)[0] == first[:1]
    assert written(4, seed=1)[0] != first
    assert written(4, temperature=0.01)[0] != first


@pytest.mark.parametrize(
    ("samples", "changes", "message"),
    [
        (0, {}, "--samples is 0; it must be at least 1"),
        (17, {}, "--samples is 17, and the recipe has 16 training problems; lower it"),
        (4, {"model_name_or_path": None}, "model_name_or_path is missing"),
        (4, {"adapter_name_or_path": "an_adapter"}, "adapter_name_or_path: the model answers without an adapter"),
        (4, {"rollout_engine": "mine"}, "rollout_engine: mine: vLLM answers here"),
        (4, {"tools": ["calculator"]}, "tools, environments, rollout_func: the model answers in one turn and alone"),
        (4, {"vllm_mode": "server"}, "vllm_mode: server: an engine of this process answers"),
        (4, {"temperature": 0.0}, "temperature must be at least"),
        (4, {"generation_kwargs": {"seed": 3}}, "generation_kwargs cannot set seed"),
        (4, {"generation_kwargs": {"max_tokens": 3}}, "generation_kwargs cannot set max_tokens"),
        (4, {"use_peft": False}, "use_peft"),
        (4, {"chat_template": "7+1={# {{ #}"}, "does not contain the problem's text"),
        (4, {"vllm_max_model_length": 13}, "4 of 4 training prompts have more than 1 tokens"),
    ],
)
def test_a_recipe_that_cannot_be_asked_is_refused(samples, changes, message, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "start", None)
    with pytest.raises(ValueError, match=message):
        write_own_answers(recipe(**changes), tmp_path / "texts.jsonl", samples)


def test_a_packed_model_and_an_unwritable_file_are_refused(recipe, make_nvfp4, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "start", None)
    with pytest.raises(ValueError, match="has NVFP4 weights already; name the BF16 model"):
        write_own_answers(recipe(model_name_or_path=str(make_nvfp4("qwen2"))), tmp_path / "texts.jsonl", 4)
    (tmp_path / "there.jsonl").write_text("mine\n")
    with pytest.raises(FileExistsError, match=r"there\.jsonl exists; name another file"):
        write_own_answers(recipe(), tmp_path / "there.jsonl", 4)
    assert (tmp_path / "there.jsonl").read_text() == "mine\n"
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*/no for texts\.jsonl; make it first"):
        write_own_answers(recipe(), tmp_path / "no" / "texts.jsonl", 4)


def test_the_engine_has_a_memory_share_of_its_own(recipe, tmp_path, monkeypatch):
    class Stopped(Exception):
        pass

    def start(engine):
        raise Stopped(engine)

    monkeypatch.setattr(calibrate, "start", start)
    flags = recipe(vllm_gpu_memory_utilization=0.3, vllm_kv_cache_memory_bytes=10**9, dtype="float32")
    with pytest.raises(Stopped) as stopped:
        write_own_answers([*flags, "--vllm_tensor_parallel_size", "2"], tmp_path / "texts.jsonl", 4)
    (engine,) = stopped.value.args
    assert (engine.tensor_parallel_size, engine.gpu_memory_utilization, engine.dtype) == (2, 0.9, "float32")
    assert engine.kv_cache_memory_bytes == 10**9 and engine.max_model_length == 64
    with pytest.raises(Stopped) as stopped:
        write_own_answers(flags, tmp_path / "texts.jsonl", 4, gpu_memory_utilization=0.5)
    assert stopped.value.args[0].gpu_memory_utilization == 0.5


class Words:
    """Stand in for a tokenizer: tokens are numbers, and tokenizing gives one more than the number that decoding
    would.
    """

    def __call__(self, text):
        return {"input_ids": [int(word) + 1 for word in text.split()]}

    def decode(self, ids, clean_up_tokenization_spaces):
        assert clean_up_tokenization_spaces is False
        return " ".join(map(str, ids))


@pytest.fixture
def file(tmp_path):
    """Return file(*lines), which writes them to a file: strings as they are, anything else as JSON."""

    def write(*lines):
        path = tmp_path / "texts.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def test_a_lines_own_tokens_are_used_and_other_texts_tokenized(file):
    rows, used = read(file({"text": "1 2"}, "", {"text": "3 4 5", "input_ids": [3, 4, 5]}), None, Words())
    assert rows == [[2, 3], [3, 4, 5]]
    assert used == {"texts": 2, "of": 2, "tokens": 5, "longest": LENGTH, "cut": 0}


def test_a_line_ends_where_the_file_has_one(file):
    path = file("\ufeff" + json.dumps({"text": "1\u20282\x853"}, ensure_ascii=False), {"text": "4"})
    assert read(path, None, Words())[0] == [[2, 3, 4], [5]]


def test_what_is_too_long_is_cut_and_counted(file):
    long = " ".join(["1"] * (LENGTH + 1))
    rows, used = read(file({"text": long}, {"text": "1"}, {"text": long.removesuffix(" 1")}), None, Words())
    assert list(map(len, rows)) == [LENGTH, 1, LENGTH]
    assert used == {"texts": 3, "of": 3, "tokens": 2 * LENGTH + 1, "longest": LENGTH, "cut": 1}


def test_the_first_texts_are_used_and_no_more_than_asked_for(file):
    path = file(*({"text": str(i)} for i in range(SAMPLES + 4)))
    rows, used = read(path, None, Words())
    assert rows == [[i + 1] for i in range(SAMPLES)] and (used["texts"], used["of"]) == (SAMPLES, SAMPLES + 4)
    assert read(path, SAMPLES + 2, Words())[0][-1] == [SAMPLES + 2]
    assert read(path, 1, Words())[0] == [[1]]
    with pytest.raises(ValueError, match=rf"calibration_samples is {SAMPLES + 5}, and .* has {SAMPLES + 4} texts"):
        read(path, SAMPLES + 5, Words())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{text: 1}", "is no JSON (Expecting property name"),
        ({"prompt": "1"}, 'must have a text under the key "text"; it has None'),
        ({"text": ["1"], "input_ids": [1]}, "must have a text"),
        (["1"], "must be a JSON object"),
        ({"text": "1", "input_ids": [2]}, "input_ids are not the tokens of the text in this model; make them"),
        ({"text": "1", "input_ids": "1"}, "input_ids must be a list of whole numbers"),
        ({"text": "1", "input_ids": [1.0]}, "input_ids must be a list of whole numbers"),
        ({"text": "1", "input_ids": None}, "input_ids must be a list of whole numbers"),
    ],
)
def test_a_line_that_is_no_text_is_named(line, message, file):
    path = file({"text": "1"}, "", line)
    with pytest.raises(ValueError) as raised:
        read(path, None, Words())
    assert f"{path}, line 3" in str(raised.value) and message in str(raised.value)
    for empty in ((), ({"text": ""},)):
        with pytest.raises(ValueError, match="holds no text"):
            read(file(*empty), None, Words())


def test_a_line_that_is_not_utf_8_is_named(file):
    path = file({"text": "1"})
    path.write_bytes(path.read_bytes() + '{"text": "é"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"^{path}, line 2 is not UTF-8; save the file as UTF-8$"):
        read(path, None, Words())
