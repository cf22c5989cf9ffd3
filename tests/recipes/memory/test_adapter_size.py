"""The plan counts the adapter that PEFT makes, whichever of its keys choose the linears."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from qerl_recipes.machine.gpu import GB, Gpu
from qerl_recipes.memory import adapter_size, plan, weight_bytes
from qerl_recipes.memory.model_size import ModelSize, measure
from qerl_recipes.recipe import shapes
from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.train.preflight import check

RECIPE = Path(__file__).parents[3] / "recipes" / "demo" / "grpo" / "nvfp4_lora_aqn.yaml"
RANK = 4
SELECTIONS: dict[str, dict[str, Any]] = {
    "all_linear": {"target_modules": "all-linear"},
    "names": {"target_modules": ["q_proj", "down_proj"]},
    "one_layer": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
    "layers": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2]},
    "a_pattern_of_layers": {
        "target_modules": ["k_proj"],
        "layers_to_transform": [1],
        "layers_pattern": ["blocks", "layers"],
    },
    "no_layers_named": {"target_modules": ["k_proj"], "layers_to_transform": []},
    "excluded_names": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": ["layers.1.self_attn.o_proj"]},
    "excluded_pattern": {"target_modules": "all-linear", "exclude_modules": r".*\.(0|2)\..*"},
    "pattern": {"target_modules": r".*layers\.[12]\.mlp\.(gate|up)_proj"},
}


def size_and_config() -> tuple[ModelSize, Any]:
    values = {**shapes.config_json("tiny"), "num_hidden_layers": 3, "layer_types": None}
    return measure(values), AutoConfig.for_model(**values)


def recipe(*flags: str) -> Any:
    return parse(["--config", str(RECIPE), "--use_cpu", "true", "--bf16", "false", *flags])


def saved(folder: Path, **values: Any) -> str:
    """The folder of an adapter, as far as anything reads it before the model loads."""
    LoraConfig(r=RANK, **values).save_pretrained(folder)
    (folder / "adapter_model.safetensors").touch()
    return str(folder)


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
def test_the_adapter_that_is_counted_is_the_one_that_peft_makes(selection: dict[str, Any], tmp_path: Path) -> None:
    size, config = size_and_config()
    policy = get_peft_model(
        AutoModelForCausalLM.from_config(config), LoraConfig(r=RANK, task_type="CAUSAL_LM", **selection)
    )
    theirs = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    blocks = [sum(hasattr(m, "lora_A") for m in block.modules()) for block in policy.get_base_model().model.layers]
    script, _, model = recipe("--adapter_name_or_path", saved(tmp_path, **selection))
    rank, linears = adapter_size.trained(script, model, size)
    assert rank == RANK and weight_bytes.adapter_elements(linears, rank) == theirs > 0
    assert adapter_size.most_in_a_block(linears) == max(blocks)


def test_activations_are_those_of_the_block_with_the_most_adapted_linears(tmp_path: Path) -> None:
    """The first block has none here, and the last as many as without layers_to_transform."""
    _, config = size_and_config()

    def activations(name: str, **selection: Any) -> int:
        flags = ("--adapter_name_or_path", saved(tmp_path / name, target_modules=["q_proj", "up_proj"], **selection))
        settings = recipe(*flags, "--gradient_checkpointing", "false")
        planned = plan.make(*settings, gpu=Gpu(80 * GB, is_hopper=True), config=config.to_dict())
        return next(part.training for part in planned.parts if part.name == "activations")

    everywhere = activations("everywhere")
    assert activations("last", layers_to_transform=[2]) == everywhere
    assert activations("one", exclude_modules=["up_proj"]) < everywhere


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern=.* is not supported; use one rank for all modules"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.* is not supported"),
        ({"use_dora": True}, "use_dora=True, which is not supported; train without DoRA"),
    ],
    ids=["ranks", "whole_modules", "dora"],
)
def test_an_adapter_that_no_engine_takes_is_refused_before_anything_loads(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = recipe("--adapter_name_or_path", saved(tmp_path, target_modules=["q_proj"], **values))
    with pytest.raises(ConfigError, match=f"adapter_name_or_path: .*adapter_config.json: the adapter uses {message}"):
        check(*settings)
    with pytest.raises(ValueError, match=message):
        adapter_size.trained(settings[0], settings[2], size_and_config()[0])


@pytest.mark.parametrize(
    "selection",
    [{"target_modules": ["q_projj"]}, {"target_modules": ["q_proj"], "layers_to_transform": [3]}],
    ids=["no_such_linear", "no_such_layer"],
)
def test_an_adapter_on_no_layer_of_this_model_is_refused_by_its_folder(
    selection: dict[str, Any], tmp_path: Path
) -> None:
    script, _, model = recipe("--adapter_name_or_path", saved(tmp_path, **selection))
    with pytest.raises(ValueError, match=rf"adapter_name_or_path {tmp_path}: target_modules .*no linear layer of this"):
        adapter_size.trained(script, model, size_and_config()[0])
