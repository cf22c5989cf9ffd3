"""The seeds of completions, and what a recipe's keys are called where they are sampled."""

from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.recipe.generation import sampling_parameters
from qerl_recipes.rollout.sampling import Seeds, completion_seed


def test_every_completion_has_a_seed_of_its_own():
    keys = [
        (seed, phase, rollout, call, prompt, sample)
        for seed in range(2)
        for phase in ("train", "evaluation")
        for rollout in range(3)
        for call in range(3)
        for prompt in range(4)
        for sample in range(4)
    ]
    assert len({completion_seed(*key) for key in keys}) == len(keys)
    assert completion_seed(0, "train", 1, 0, 2, 3) == 5496574601150059232  # sha256sum of 0:train:1:0:2:3


def test_the_seeds_of_a_batch_name_run_rollout_call_prompt_and_sample():
    seeds = Seeds(5)
    seeds.open("train", 3)
    assert seeds.draw(0, 4, 2) == [completion_seed(5, "train", 3, 0, p, s) for p, s in ((0, 0), (0, 1), (1, 0), (1, 1))]
    # the second of two processes, in the next round of dynamic sampling; a group may lie on both
    assert seeds.draw(3, 3, 2) == [completion_seed(5, "train", 3, 1, p, s) for p, s in ((1, 1), (2, 0), (2, 1))]
    seeds.open("evaluation", 0)
    assert seeds.draw(0, 1, 2) == [completion_seed(5, "evaluation", 0, 0, 0, 0)]


def test_every_sampling_key_of_a_recipe_has_its_name_in_vllm(tmp_path):
    keys = {"temperature": 0.7, "top_p": 0.9, "top_k": 8, "min_p": 0.02, "repetition_penalty": 1.1}
    common = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "max_completion_length": 9}
    found = sampling_parameters(GRPOConfig(**common, **keys))
    assert found == {**keys, "max_tokens": 9, "logprobs": 0}
    of_vllm = {"stop": ["x"], "min_tokens": 2}
    found = sampling_parameters(
        GRPOConfig(**common, **keys, generation_kwargs=of_vllm, vllm_structured_outputs_regex="a+")
    )
    assert found == {**keys, "max_tokens": 9, "logprobs": 0, **of_vllm, "structured_outputs": {"regex": "a+"}}
    assert sampling_parameters(GRPOConfig(**common))["min_p"] == 0.0
