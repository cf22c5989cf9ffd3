"""Test the column "train" of the table of model families by training a tiny random model of each.

In float32, where rounding hides nothing, the trainer's log-probabilities must be those that the engine sampled with.
"""

import math
import re
from pathlib import Path

import pytest
import torch

from qerl_recipes.model import loading
from qerl_recipes.model.frozen import FrozenNVFP4Experts
from qerl_recipes.recipe.configs import parse
from qerl_recipes.train.preflight import check
from qerl_vllm_plugin.weights.families import FAMILIES

TOLERANCE = 1e-5  # bounds the mean difference of a step; the largest seen is 1e-6
PAGE = Path(__file__).parents[3] / "qerl_vllm_plugin" / "compatibility.md"
GEMMA = {"query_pre_attn_scalar": 32, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
GRANITE = {"attention_multiplier": 0.17, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 1.5}
CASES: dict[str, dict[str, object]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 256},
    "glm4": {},
    "granite": GRANITE,
    "qwen3_moe": {},
}
AQN = {"sigma_start": 0.2, "sigma_end": 0.2, "num_stages": 1}
PADDED = {"gemma2", "granite", "qwen3_5_text"}  # scaled logits, or a state that spans a packed row
ATTENTION = {"gemma2": "eager"}
ATTENTION_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEARS = {"glm4": [*ATTENTION_LINEARS, "down_proj"], "qwen3_moe": ATTENTION_LINEARS}
NOISE = {family: ["input_layernorm", "pre_feedforward_layernorm"] for family in ("gemma2", "gemma3_text")}
REFUSED = {
    "olmo2": "olmo2 is served but not trained: .*classes",
    "smollm3": "smollm3 is served but not trained: .*classes",
}
# Qwen2 is trained in almost every other test of this folder
FAST = {"gemma3_text", "phi3", "qwen3_moe"}


def cases() -> list[object]:
    return [family if family in FAST else pytest.param(family, marks=pytest.mark.slow) for family in CASES]


def test_every_family_of_the_table_trains_or_is_refused_as_its_column_says():
    assert set(FAMILIES) == {*CASES, *REFUSED, "qwen3_5_text"}
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    head = next(row for row in rows if row[0] == "family")
    said = {row[0]: row[head.index("train")] for row in rows[rows.index(head) + 2 :] if len(row) == len(head)}
    for family in FAMILIES:
        words = re.sub(r"_text$", "", family).replace("3_5", "3.5").replace("_", "-")
        pattern = re.compile(rf"(^|, ){words[:-1]}[ -]?{words[-1]}( text)?(,|$)", re.IGNORECASE)
        (cell,) = [cell for names, cell in said.items() if pattern.search(names)]
        assert cell.startswith("refused" if family in REFUSED else "yes"), family
        assert ("padded" in cell) == (family in PADDED), family


@pytest.mark.parametrize("family", cases())
def test_promise_06_engine_and_trainer_agree_in_every_family_that_is_trained(
    family, make_trainer, make_nvfp4, read_metrics
):
    trainer = make_trainer(
        make_nvfp4(family, **CASES[family]),
        dtype=torch.float32,
        attention=ATTENTION.get(family),
        targets=LINEARS.get(family, "all-linear"),
        noise_mode="both",
        noise_targets=NOISE.get(family, ["input_layernorm", "post_attention_layernorm"]),
        max_steps=2,
        **AQN,
    )
    assert bool(trainer.loss_settings.pack_tokens) == (family not in PADDED)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    linears = [m for m in trainer.model.get_base_model().model.modules() if hasattr(m, "weight_packed")]
    experts = [m for m in trainer.model.get_base_model().model.modules() if isinstance(m, FrozenNVFP4Experts)]
    assert len(experts) == (2 if family == "qwen3_moe" else 0)
    assert len(trainer.snapshot().tensors) == 2 * (len(linears) - 2 * (family == "glm4"))  # without gate_up_proj
    trainer.train()
    changed = {name for name, tensor in trainer.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and all(".lora_" in name for name in changed)
    records = read_metrics(trainer)
    assert [record["noisy_norms"] for record in records] == [0, 4]
    assert max(record["logp_diff_mean"] for record in records) < TOLERANCE
    assert all(math.isfinite(record["loss"]) for record in records) and records[-1]["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("torchvision")
def test_a_hybrid_of_linear_attention_is_trained_in_padded_batches(make_trainer, make_nvfp4, read_metrics):
    """Train in BF16, the only dtype of which vLLM has a linear attention kernel on a CPU."""
    with pytest.warns(UserWarning, match="the state of the linear attention would go on from one sequence"):
        trainer = make_trainer(make_nvfp4("qwen3_5_text"), noise_mode="both", max_steps=4, **AQN)
    assert not trainer.loss_settings.pack_tokens
    adapted = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in trainer.snapshot().tensors}
    assert {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "down_proj"} <= adapted
    trainer.train()
    records = read_metrics(trainer)
    assert [record["noisy_norms"] for record in records] == [0, 0, 4, 4]
    assert max(record["logp_diff_mean"] for record in records) < 0.05
    assert records[-1]["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "granite"])
def test_in_bf16_they_differ_by_rounding(family, make_trainer, make_nvfp4, read_metrics):
    trainer = make_trainer(make_nvfp4(family, **CASES[family]), max_steps=2)
    trainer.train()
    assert max(record["logp_diff_mean"] for record in read_metrics(trainer)) < 0.05


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_is_not_trained_is_refused_before_anything_is_built(family, make_bf16, write_recipe):
    folder = make_bf16(family, **({"no_rope_layers": [1, 0]} if family == "smollm3" else {}))
    with pytest.raises(ValueError, match=f"model_name_or_path: .*{REFUSED[family]}"):
        check(*parse(["--config", write_recipe(model_name_or_path=str(folder))]))
    with pytest.raises(ValueError, match=REFUSED[family]):
        loading.load(folder, quantization="qerl_nvfp4")


@pytest.mark.parametrize(
    ("family", "sizes", "said"),
    [
        ("starcoder2", {"num_attention_heads": 2}, "a starcoder2, a family that was never compared"),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "a gpt_oss: its experts lie in one tensor"),
    ],
)
def test_a_family_that_was_never_compared_is_refused(family, sizes, said, make_bf16, write_recipe):
    folder = make_bf16(family, **sizes)
    with pytest.raises(ValueError, match=said):
        check(*parse(["--config", write_recipe(model_name_or_path=str(folder))]))


def test_an_attention_that_leaves_the_soft_cap_out_is_refused(make_bf16, write_recipe):
    folder = make_bf16("gemma2", **GEMMA)
    message = r"attn_implementation: sdpa leaves out attn_logit_softcapping \(50\) of gemma2"
    recipe = write_recipe(model_name_or_path=str(folder))
    for more in ([], ["--attn_implementation", "sdpa"]):
        with pytest.raises(ValueError, match=message):
            check(*parse(["--config", recipe, *more]))
    with pytest.raises(ValueError, match=message):
        loading.load(folder, quantization="bf16")
    check(*parse(["--config", recipe, "--attn_implementation", "eager"]))


def test_keys_that_a_family_cannot_honour_are_refused_with_those_that_it_can(make_bf16, write_recipe):
    recipe = write_recipe(model_name_or_path=str(make_bf16("glm4")))
    with pytest.raises(
        ValueError, match=r"lora_target_modules: gate_up_proj of glm4 is two linears .*use \[q_proj, k_proj"
    ):
        check(*parse(["--config", recipe]))
    check(*parse(["--config", recipe, "--lora_target_modules", *LINEARS["glm4"]]))
    recipe = write_recipe(model_name_or_path=str(make_bf16("gemma3_text", **GEMMA)), sigma_start=1e-2)
    message = r"noise_targets: post_attention_layernorm .* use \[input_layernorm, pre_feedforward_layernorm\]"
    with pytest.raises(ValueError, match=message):
        check(*parse(["--config", recipe]))
    check(*parse(["--config", recipe, "--noise_targets", *NOISE["gemma3_text"]]))
