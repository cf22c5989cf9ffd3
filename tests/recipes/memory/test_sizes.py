"""Test the bytes behind a memory plan against published counts, GPU measurements, and real tensors."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from qerl_recipes.convert.quantize import quantization_config, quantize_checkpoint
from qerl_recipes.files.base_model import read_config
from qerl_recipes.machine.gpu import GB, Gpu
from qerl_recipes.memory import plan, sizes
from qerl_recipes.memory.sizes import ModelSize, measure, optimizer_state
from qerl_recipes.recipe import shapes
from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.train.preflight import check

GIB = 2**30
DEMO = Path(__file__).parents[3] / "recipes/demo"
RANK = 4


def size_of(name: str) -> ModelSize:
    return measure(read_config(name))


@pytest.mark.parametrize(
    ("name", "parameters", "without_embeddings"),
    [("Qwen/Qwen2.5-0.5B-Instruct", 0.49, 0.36), ("Qwen/Qwen3-8B", 8.2, 6.95), ("Qwen/Qwen3-30B-A3B", 30.5, 29.9)],
)
def test_parameters_are_those_of_the_model_cards(name: str, parameters: float, without_embeddings: float) -> None:
    size = size_of(name)
    assert size.parameters / 1e9 == pytest.approx(parameters, rel=0.01)
    assert (size.parameters - size.embeddings) / 1e9 == pytest.approx(without_embeddings, rel=0.01)


def test_the_engines_weights_are_those_measured_on_an_h200() -> None:
    """Compare 7B with a resident adapter of rank 32, 7B in BF16, and 32B in NVFP4.

    arXiv 2510.11696, Table 8, gives 20.7 GB for the last.
    """
    size, large = size_of("Qwen/Qwen2.5-7B-Instruct"), size_of("Qwen/Qwen2.5-32B-Instruct")
    packed = sizes.engine_weights(size, "qerl_nvfp4") + sizes.resident_adapter(size, 32)
    assert packed / GIB == pytest.approx(5.69, abs=0.006)
    assert sizes.engine_weights(size, "bf16") / GIB == pytest.approx(14.19, abs=0.006)
    assert sizes.engine_weights(large, "qerl_nvfp4") / 1e9 == pytest.approx(20.7, abs=0.05)
    assert sizes.trainer_weights(large, "nf4", shared=False) / 1e9 == pytest.approx(20.7, abs=0.05)


def test_experts_are_counted_in_engine_and_trainer() -> None:
    """Qwen3-30B-A3B: 48 x 128 experts of 3 x 2048 x 768 weights at 4.5 bits are 16.3 GB of each copy."""
    size = size_of("Qwen/Qwen3-30B-A3B")
    packed = 48 * 128 * (3 * 2048 * 768 * 9 // 16 + 3 * 4)
    assert len(size.experts) == 48 and 16.3e9 < packed < 16.4e9
    without = dataclasses.replace(size, experts=())
    for weights in (
        lambda size: sizes.engine_weights(size, "qerl_nvfp4"),
        lambda size: sizes.trainer_weights(size, "qerl_nvfp4", shared=True),
        lambda size: sizes.trainer_weights(size, "qerl_nvfp4", shared=False),
    ):
        assert weights(size) - weights(without) == packed
    dense = sizes.engine_weights(size, "bf16") - sizes.engine_weights(without, "bf16")
    assert dense == 2 * 48 * 128 * 3 * 2048 * 768


@pytest.mark.parametrize("kept_whole", [None, "model.layers.0.mlp.down_proj"])
def test_a_layer_kept_in_bf16_is_counted_so(kept_whole: str | None) -> None:
    config = shapes.config_json("0.5B")
    ignore = ["lm_head"] + ([kept_whole] if kept_whole else [])
    size = measure({**config, "quantization_config": quantization_config(ignore)})
    packed = [linear for linear in size.linears if linear.quantized]
    assert len(packed) == 7 * 24 - (kept_whole is not None)
    more = 4864 * 896 * (2 * 16 - 9) // 16 if kept_whole else 0  # 16 bits a weight, not 4.5
    whole = measure({**config, "quantization_config": quantization_config(["lm_head"])})
    difference = sizes.engine_weights(size, "qerl_nvfp4") - sizes.engine_weights(whole, "qerl_nvfp4")
    assert difference == (more - 4 * (896 + 1) if kept_whole else 0)  # no scale for each row and no divisor


def unique_bytes(tensors: Any) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.numel()}.values())


def test_a_plan_is_the_sum_of_real_tensors(make_trainer: Any, tmp_path: Path) -> None:
    """Count each tensor of the engine, trainer and adapter of the demo's model, without the scales of the cache."""
    base = tmp_path / "nvfp4"
    quantize_checkpoint(DEMO / "starting_model", base)
    trainer, size = make_trainer(base, rank=32), measure(read_config(base))
    runner = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    engine = runner.get_model()
    named = [*engine.named_parameters(), *engine.named_buffers()]
    adapter = sum(tensor.nbytes for name, tensor in named if name.endswith((".policy_a", ".policy_b")))
    assert sizes.resident_adapter(size, 32) == adapter
    weights = [tensor for name, tensor in named if ".policy_" not in name and ".attn._" not in name]
    assert sizes.engine_weights(size, "qerl_nvfp4") == unique_bytes(weights)
    model = trainer.model
    frozen = [t for n, t in [*model.named_parameters(), *model.named_buffers()] if ".lora_" not in n]
    assert sizes.trainer_weights(size, "qerl_nvfp4", shared=False) == unique_bytes(frozen)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert 4 * sizes.adapter_elements(size.linears, 32) == trained


def test_an_unknown_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json in a folder of that name"):
        read_config(tmp_path / "nothing")
    with pytest.raises(ValueError, match="cannot build a causal language model of type 'no_such_type'"):
        measure({"model_type": "no_such_type"})


SELECTIONS: dict[str, dict[str, Any]] = {
    "all_linear": {"target_modules": "all-linear"},
    "names": {"target_modules": ["q_proj", "down_proj"]},
    "one_layer": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
    "a_pattern_of_layers": {
        "target_modules": ["k_proj"],
        "layers_to_transform": [1],
        "layers_pattern": ["blocks", "layers"],
    },
    "excluded_names": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": ["layers.1.self_attn.o_proj"]},
    "excluded_pattern": {"target_modules": "all-linear", "exclude_modules": r".*\.(0|2)\..*"},
    "pattern": {"target_modules": r".*layers\.[12]\.mlp\.(gate|up)_proj"},
}


def size_and_config() -> tuple[ModelSize, Any]:
    values = {**shapes.config_json("tiny"), "num_hidden_layers": 3, "layer_types": None}
    return measure(values), AutoConfig.for_model(**values)


def recipe(*flags: str) -> Any:
    return parse(["--config", str(DEMO / "grpo/nvfp4_lora_aqn.yaml"), "--use_cpu", "true", "--bf16", "false", *flags])


def saved(folder: Path, **values: Any) -> str:
    """Save those parts of an adapter that are read before the model loads, and return its folder."""
    LoraConfig(r=RANK, **values).save_pretrained(folder)
    (folder / "adapter_model.safetensors").touch()
    return str(folder)


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
def test_the_counted_adapter_is_the_one_that_peft_makes(selection: dict[str, Any], tmp_path: Path) -> None:
    size, config = size_and_config()
    policy = get_peft_model(
        AutoModelForCausalLM.from_config(config), LoraConfig(r=RANK, task_type="CAUSAL_LM", **selection)
    )
    theirs = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    blocks = [sum(hasattr(m, "lora_A") for m in block.modules()) for block in policy.get_base_model().model.layers]
    script, _, model = recipe("--adapter_name_or_path", saved(tmp_path, **selection))
    rank, linears = sizes.trained_adapter(script, model, size)
    assert rank == RANK and sizes.adapter_elements(linears, rank) == theirs > 0
    assert sizes.most_in_a_block(linears) == max(blocks)


def test_activations_are_those_of_the_most_adapted_block(tmp_path: Path) -> None:
    """Check adapters that leave out the first block.

    The last block has as many layers adapted as without layers_to_transform.
    """
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
def test_an_adapter_that_no_engine_takes_is_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    settings = recipe("--adapter_name_or_path", saved(tmp_path, target_modules=["q_proj"], **values))
    with pytest.raises(ConfigError, match=f"adapter_name_or_path: .*adapter_config.json: the adapter uses {message}"):
        check(*settings)
    with pytest.raises(ValueError, match=message):
        sizes.trained_adapter(settings[0], settings[2], size_and_config()[0])


@pytest.mark.parametrize(
    "selection",
    [{"target_modules": ["q_projj"]}, {"target_modules": ["q_proj"], "layers_to_transform": [3]}],
    ids=["no_such_linear", "no_such_layer"],
)
def test_an_adapter_on_no_layer_is_refused_by_its_folder(selection: dict[str, Any], tmp_path: Path) -> None:
    script, _, model = recipe("--adapter_name_or_path", saved(tmp_path, **selection))
    with pytest.raises(ValueError, match=rf"adapter_name_or_path {tmp_path}: target_modules .*no linear layer of this"):
        sizes.trained_adapter(script, model, size_and_config()[0])


def allocated(state: object) -> int:
    """Return the bytes of all tensors except single numbers, such as step counters."""
    if isinstance(state, torch.Tensor):
        return state.nbytes if state.numel() > 1 else 0
    return sum(map(allocated, state.values())) if isinstance(state, dict) else 0


@pytest.mark.parametrize("name", ["adamw_torch", "adafactor", "sgd"])
def test_an_optimizers_state_is_what_it_allocates(name: str, tmp_path) -> None:
    """Check an adapter of rank 32 on a layer, and a norm."""
    shapes = [(32, 192), (96, 32), (192,)]
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(shape)) for shape in shapes)
    arguments = TrainingArguments(output_dir=str(tmp_path), optim=name, use_cpu=True, report_to=[])
    optimizer = Trainer(model=model, args=arguments).create_optimizer()
    torch.stack([parameter.square().sum() for parameter in model]).sum().backward()
    optimizer.step()
    assert optimizer_state(name, shapes) == sum(map(allocated, optimizer.state.values()))


@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("paged_adamw_8bit", 2.0),
        ("lion_32bit", 4.0),
        ("ademamix", 12.0),
        ("schedule_free_adamw", 8.0),
        ("adamw_torch_4bit", 1.0),
    ],
)
def test_an_optimizers_moments_and_their_bytes(name: str, each: float) -> None:
    assert optimizer_state(name, [(32, 1024), (96, 32)]) == each * 32 * (1024 + 96)
