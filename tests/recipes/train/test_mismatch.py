"""Test the breakdown of the mismatch between a run's engine and its trainer.

The parts must add up, and an error must show only in its own row.
"""

import json
import shutil
from pathlib import Path

import calling
import pytest
import torch
from digit_rewards import digits

from qerl_recipes.files.adapter import open_adapter
from qerl_recipes.files.run_state import base_hash, recorded
from qerl_recipes.recipe.configs import parse
from qerl_recipes.rollout.interface import Snapshot
from qerl_recipes.tasks import prompts, running_sum
from qerl_recipes.train import mismatch, run
from qerl_recipes.train.mismatch import STAGES, Sizes

SETTINGS = {"noise_mode": "both", "sigma_start": 5e-2, "sigma_end": 5e-2, "num_stages": 1}


@pytest.fixture(scope="module")
def trained(make_module_trainer, make_nvfp4, tmp_path_factory):
    """Save an adapter that is small enough for log-probabilities to follow it linearly, and return its folder."""
    trainer = make_module_trainer(make_nvfp4("qwen2"), dtype=torch.float32, **SETTINGS)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trainer.model.named_parameters():
        if ".lora_B." in name:
            parameter.data = 0.02 * torch.randn(parameter.shape, generator=generator)
    folder = tmp_path_factory.mktemp("trained") / "adapter"
    trainer.save_adapter(folder)
    return folder


@pytest.fixture
def measure(trained, make_module_trainer, make_nvfp4, monkeypatch):
    """Return measure(scale=1, **settings), which returns the Mismatch of the trained adapter.

    The engine gets the adapter with B multiplied by ``scale``.
    """

    def run(scale=1.0, adapter=trained, **settings):
        trainer = make_module_trainer(
            make_nvfp4("qwen2"), reward=digits, dtype=torch.float32, **{**SETTINGS, **settings}
        )
        right = trainer.snapshot

        def wrong():
            found = right()
            scaled = {name: t * scale if ".lora_B." in name else t for name, t in found.tensors.items()}
            return Snapshot(scaled, found.config, found.norms)

        monkeypatch.setattr(trainer, "snapshot", wrong)
        return mismatch.measure(trainer, open_adapter(adapter), 8)

    return run


def rows(found):
    return {part.name: part for part in found.parts}


def test_sizes_of_known_differences():
    found = Sizes.of(torch.tensor([0.5, -0.5, 0.0, 1.0]))
    assert found.mean == pytest.approx(0.5) and found.largest == 1.0 and 0.97 < found.p99 < 1.0


def test_the_ratio_and_its_error_are_those_of_many_draws():
    generator = torch.Generator().manual_seed(0)
    true, lengths = torch.randn(400, generator=generator), [20, 0, 30] * 8

    def rounded(values):
        """Add noise that grows with the true value, as rounding errors do."""
        return values + (0.1 + 0.2 * true.abs()) * torch.randn(400, generator=generator)

    draws = [(rounded(1.01 * true), rounded(true)) for _ in range(300)]
    found = torch.tensor([mismatch._ratio(y, x, lengths) for y, x in draws], dtype=torch.float64)
    assert float(found[:, 0].mean()) == pytest.approx(1.01, abs=3e-3)
    assert float(found[:, 1].mean()) == pytest.approx(float(found[:, 0].std()), rel=0.15)
    plain = torch.stack([(x * y).sum() / (x * x).sum() for y, x in draws])
    assert float(plain.mean()) < 0.95  # control: a plain fit takes the trainer's side for exact
    assert mismatch._ratio(true, torch.zeros(400), lengths) == ()
    alone = mismatch._ratio(1.01 * true, true, [0, 400])
    assert alone[0] == pytest.approx(1.01) and alone[1] != alone[1]  # one completion gives no error


def test_the_ratios_error_counts_completions_not_tokens():
    """Check that the ratio's error is computed over completions.

    The true effect is large at few tokens, and rounding moves a whole completion one way. Counting tokens would make
    the error seem less than half as large.
    """
    generator = torch.Generator().manual_seed(0)
    count, length = 24, 40
    found = []
    for _ in range(300):
        true = 0.3 * torch.randn(count, 1, generator=generator) * torch.ones(count, length)
        x, y = (true + 0.1 * torch.randn(count, 1, generator=generator) for _ in "xy")
        found.append(mismatch._ratio(y.flatten(), x.flatten(), [length] * count))
        by_tokens = mismatch._ratio(y.flatten(), x.flatten(), [1] * count * length)
    ratios, errors = torch.tensor(found, dtype=torch.float64).unbind(1)
    assert float(errors.mean()) == pytest.approx(float(ratios.std()), rel=0.25)
    assert by_tokens[1] < 0.5 * found[-1][1]


def test_an_error_of_the_adapters_scale_is_in_its_row(measure, monkeypatch):
    ratio, seen = mismatch._ratio, []
    monkeypatch.setattr(mismatch, "_ratio", lambda y, x, of: seen.append((len(y), len(of), sum(of))) or ratio(y, x, of))
    found = measure()
    assert seen == [(found.tokens, 8, found.tokens)] * 2, "by completions"
    cold, right, wrong = rows(measure(temperature=0.7)), rows(found), rows(measure(1.01))
    assert tuple(right) == STAGES
    # Where nothing is wrong, every row is fp32 rounding, and both sides apply adapter and noise alike.
    assert all(part.stage.largest < 1e-3 for part in [*right.values(), *cold.values()])
    assert right["adapter"].ratio == pytest.approx(1, abs=1e-4)
    assert right["noise"].ratio == pytest.approx(1, abs=1e-4)
    assert wrong["weights"].stage.mean < 1e-4 and wrong["weights"] == right["weights"]
    assert wrong["adapter"].added.mean > 20 * max(right["adapter"].added.mean, wrong["sampling"].added.mean)
    assert wrong["adapter"].added.mean > 2 * wrong["noise"].added.mean  # noise acts differently on a wrong policy
    assert wrong["adapter"].ratio == pytest.approx(1.01, abs=2e-3)
    assert wrong["sampling"].stage.mean > 10 * right["sampling"].stage.mean


def test_noise_and_a_cut_distribution_are_in_their_rows(measure, monkeypatch):
    of, deltas = Sizes.of, []
    monkeypatch.setattr(Sizes, "of", staticmethod(lambda delta: deltas.append(delta) or of(delta)))
    paper = measure(noise_mode="engine", top_p=0.8)
    found = rows(paper)
    assert paper.sigma == 5e-2 and paper.cut == ("top_p: 0.8",)
    assert found["weights"].stage.largest < 1e-3 and found["adapter"].added.largest < 1e-3
    assert found["noise"].added.mean > 1e-2 and found["noise"].ratio is None
    # The engine renormalizes what top_p leaves of the distribution, which is at least 0.8.
    assert 0.01 < found["sampling"].added.mean < -torch.tensor(0.8).log().item()
    assert deltas[-1].max() < 1e-3, "log p of the trainer minus that of the engine: what is left is likelier there"


def test_trained_norms_are_the_adapters_noise_the_recipes(measure, make_module_trainer, make_nvfp4, tmp_path):
    """Check that trained norms come from the adapter, and noise from the recipe's settings.

    If either came from elsewhere, engine and trainer would differ by more than rounding.
    """
    settings = {"train_norms": True, "noise_seed": 9, "noise_targets": ["input_layernorm"]}
    trainer = make_module_trainer(make_nvfp4("qwen2"), dtype=torch.float32, **SETTINGS, **settings)
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad and "norm" in name:
            parameter.data *= 1.3
    trainer.save_adapter(tmp_path / "adapter")
    found = measure(adapter=tmp_path / "adapter", **settings)
    assert all(part.stage.largest < 1e-3 for part in found.parts)


def test_a_completion_that_fills_the_engine_loses_a_token(measure):
    prompts = list(running_sum.training_set(16, 0)["prompt"])
    longest = max(len(ids) for ids in running_sum.tokenizer()(prompts)["input_ids"])
    found = measure(vllm_max_model_length=longest + 2)
    assert found.tokens and all(part.stage.largest < 1e-3 for part in found.parts)


def test_the_command_reads_the_recipe_of_a_run(write_recipe, capfd):
    from qerl_recipes.train.run import main

    recipe = write_recipe(max_steps=1, dtype="float32", temperature=0.7, min_p=0.02)
    main(["--config", recipe])
    folder = Path(recipe).parent / "run"
    before = sorted(folder.rglob("*"))
    assert mismatch.run(folder, ["--share_weights", "false"], problems=99) == 0  # the training set has 16
    printed = capfd.readouterr().out
    assert "temperature 0.7" in printed and "min_p: 0.02" in printed and "none in this run" in printed
    assert "The training set has 16 problems, fewer than the 99 asked for" in " ".join(printed.split())
    assert sorted(folder.rglob("*")) == before  # nothing is written
    flags = ["--share_weights", "false", "--noise_mode", "engine_is", "--sigma_start", "0.03"]
    _, training, _ = mismatch._recipe(open_adapter(folder), flags, Path(recipe).parent)
    assert (training.noise_mode, training.sigma_start, training.temperature) == ("engine_is", 0.03, 0.7)
    with pytest.raises(ValueError, match="bf16: vLLM's LoRA slots on a CPU"):
        mismatch.run(folder, ["--quantization", "bf16"])
    for flags, message in (
        (["--vllm_mode", "server"], "vllm_mode: server: the parts are switched off in an engine of this process"),
        (["--rollout_engine", "verl:Engine"], "rollout_engine: verl:Engine: only vllm's parts"),
    ):
        with pytest.raises(ValueError, match=message):
            mismatch.run(folder, flags)
    with pytest.raises(ValueError, match="problems is 0; it must be at least 1"):
        mismatch.run(folder, problems=0)
    state = folder / "adapter" / "qerl_state.json"
    content = json.loads(state.read_text())
    elsewhere = {"vllm_mode": "server", "vllm_server_base_url": "http://there:1", "adapter_name_or_path": "before"}
    state.write_text(json.dumps({**content, "recipe": {**content["recipe"], **elsewhere}}))
    script, training, _ = mismatch._recipe(open_adapter(folder), [], Path(recipe).parent)
    assert training.vllm_mode == "colocate" and "before" not in f"{script} {training}"
    state.write_text(
        json.dumps({key: value for key, value in json.loads(state.read_text()).items() if key != "recipe"})
    )
    with pytest.raises(ValueError, match="does not say by which recipe"):
        mismatch.run(folder)


@pytest.mark.parametrize("kind", ["environments", "environment without data"])
def test_prompts_are_those_that_the_policy_sees(kind, write_recipe, make_nvfp4, tmp_path, monkeypatch, capfd):
    from qerl_recipes.rollout.engine import VLLMRollouts

    keys = calling.recipe_keys(make_nvfp4("qwen2"), tmp_path)
    keys |= {"tools": ["calling.double"], "environments": "calling.Walk"}
    if kind == "environments":
        data = Path(keys["dataset_name"])
        rows = [json.loads(line) for line in data.read_text().splitlines()]
        data.write_text("".join(json.dumps({**row, "environment": "walk"}) + "\n" for row in rows))
        keys["environments"] = {"walk": "calling.Walk"}
    if kind == "environment without data":
        keys |= {"dataset_name": None, "reward_funcs": []}
    asked, complete = [], VLLMRollouts._complete

    def noted(engine, requests, *others):
        asked.append({tuple(request.prompt) for request in requests})
        return complete(engine, requests, *others)

    monkeypatch.setattr(VLLMRollouts, "_complete", noted)
    # transformers would read it as Qwen2's own, which does not know its tokens
    monkeypatch.setattr(prompts, "tokenizer", lambda *given, **more: calling.tokenizer())
    recipe = write_recipe(**{"reward_funcs": ["digit_rewards.digits"], **keys}, max_steps=1, dtype="float32")
    run.main(["--config", recipe])
    assert mismatch.run(Path(recipe).parent / "run", ["--share_weights", "false"], problems=16) == 0
    of_run, measured = asked
    assert of_run <= measured and all(calling.VOCABULARY.index("<tools>") in ids for ids in measured)
    assert "These are the first turns of episodes" in " ".join(capfd.readouterr().out.split())


def test_a_changed_base_is_refused_before_loading(trained, write_recipe, make_nvfp4, tmp_path, monkeypatch):
    base = shutil.copytree(make_nvfp4("qwen2"), tmp_path / "base")
    recipe = recorded(*parse(["--config", write_recipe(model_name_or_path=str(base))]))
    folder = shutil.copytree(trained, tmp_path / "adapter")
    state = json.loads((folder / "qerl_state.json").read_text())
    state |= {"base": str(base), "base_hash": base_hash(base), "recipe": recipe}
    (folder / "qerl_state.json").write_text(json.dumps(state))

    def build(*parts):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(run, "build", build)
    with pytest.raises(AssertionError, match="the model was loaded"):
        mismatch.run(folder)
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(
        ValueError, match=rf"adapter was trained on another base \({base}\); name that one, as it was then"
    ):
        mismatch.run(folder)
