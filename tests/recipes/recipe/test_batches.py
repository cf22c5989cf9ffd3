"""Test which batches, rollouts and rows follow from the few numbers that a recipe names."""

import pytest

from qerl_recipes.recipe import configs
from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.file import ConfigError

# what a recipe says of its batches -> (per_device_train_batch_size, gradient_accumulation_steps, steps_per_generation,
# generation_batch_size, tokens of a row)
BATCHES = {
    "": (8, 1, 1, 8, -1),
    "generation_batch_size: 64\n": (64, 1, 1, 64, -1),
    "generation_batch_size: 64\nsteps_per_generation: 4\npack_tokens: 99\n": (16, 1, 4, 64, 99),
    "steps_per_generation: 4\n": (8, 1, 4, 32, -1),
    "per_device_train_batch_size: 16\ngradient_accumulation_steps: 4\n": (16, 4, 4, 64, 16384),
    "per_device_train_batch_size: 16\ngeneration_batch_size: 16\npack_tokens: -1\n": (16, 1, 1, 16, 16384),
    "gradient_accumulation_steps: 4\ngeneration_batch_size: 32\n": (8, 4, 4, 32, 16384),
    "generation_batch_size: 64\ntop_entropy_quantile: 0.5\n": (64, 1, 1, 64, 16384),
}


@pytest.mark.parametrize("text", BATCHES, ids=lambda text: text.replace("\n", " ").strip() or "nothing")
def test_batches_follow_from_what_a_recipe_names(text, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"output_dir: unused\n{text}")
    _, training, _ = parse(["--config", str(path)])
    found = (training.per_device_train_batch_size, training.gradient_accumulation_steps, training.steps_per_generation)
    assert (*found, training.generation_batch_size, training.pack_tokens) == BATCHES[text]
    assert training.splits_by_tokens == (training.pack_tokens in (-1, 99))


def test_a_rollout_is_shared_by_all_processes(monkeypatch):
    monkeypatch.setattr(configs.GRPOConfig, "world_size", 4)
    flags = ["--output_dir", "unused", "--generation_batch_size", "64", "--steps_per_generation", "2"]
    _, training, _ = parse(flags)
    assert (training.per_device_train_batch_size, training.generation_batch_size) == (8, 64)


def test_half_of_what_trl_needs_is_told_what_it_means():
    flags = ["--output_dir", "unused", "--generation_batch_size", "64", "--per_device_train_batch_size", "4"]
    with pytest.warns(UserWarning, match="gradient_accumulation_steps is not set, .* has 4 of the 64 completions"):
        parse(flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "generation_batch_size: 60\nnum_generations: 8\n",
            "generation_batch_size: 60 is not whole groups of num_generations: 8; use 56 or another multiple of 8",
        ),
        (
            "generation_batch_size: 64\nsteps_per_generation: 3\n",
            "steps_per_generation: 3 does not divide the 64 completions that each process has",
        ),
        ("per_device_train_batch_size: 3\n", "use per_device_train_batch_size: 8, or a multiple of 8 processes"),
        (
            "per_device_train_batch_size: 16\ngradient_accumulation_steps: 4\nnum_generations: 14\n",
            "a rollout of 64 completions (per_device_train_batch_size 16 x steps_per_generation 4 x processes 1) is "
            "not whole groups of num_generations: 14; use per_device_train_batch_size: 14, or a multiple of 7 proc",
        ),
    ],
)
def test_batches_that_do_not_divide_are_refused(text, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse(["--config", str(path)])
    assert message in str(error.value)
