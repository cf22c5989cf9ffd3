"""Test how rounding adds up in a model as deep as a real one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from qerl_kernels import nvfp4

pytestmark = pytest.mark.gpu

LAYERS = 32
PROMPTS = [[(13 * i + 7 * j) % 500 + 2 for j in range(60)] for i in range(4)]


@pytest.fixture(scope="module")
def deep(make_checkpoints: Callable[..., tuple[Path, Path]]) -> tuple[Path, Path]:
    """Make BF16 and NVFP4 folders of a deep model.

    As in a trained model, each layer adds little to the residual stream.
    """
    return make_checkpoints(
        1,
        written=0.2,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )


def test_thirty_two_layers_agree_with_the_naive_reference_and_with_the_trainer(
    deep: tuple[Path, Path], start_engine: Callable[..., Any], record: Callable[[str, Any], None]
) -> None:
    """Compare the engine with a dense fp32 model of the dequantized weights, and with the model as `qerl train` loads
    it.
    """
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    from qerl_recipes.model import loading as models

    reference = AutoModelForCausalLM.from_pretrained(deep[0], dtype=torch.float32).cuda().eval()
    packed = load_file(next(deep[1].glob("*.safetensors")), device="cuda")
    with torch.no_grad():
        for name, module in reference.named_modules():
            if f"{name}.weight_packed" in packed:
                parts = (packed[f"{name}.{part}"] for part in ("weight_packed", "weight_scale", "weight_global_scale"))
                codes, scales, divisor = parts
                module.weight.copy_(nvfp4.dequantize(codes, scales).float() / divisor)
    trainer = models.load(deep[1]).cuda()
    room = {"qerl": {"policy_adapter": {"rank": 16}}}
    engine = start_engine(
        deep[1], gpu_memory_utilization=0.15, max_model_len=256, max_num_seqs=8, additional_config=room
    )
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    to_reference, to_trainer = [], []
    for ids, output in zip(PROMPTS, outputs, strict=True):
        tokens = torch.tensor([ids], device="cuda")
        with torch.no_grad():
            exact = reference(tokens).logits[0].log_softmax(-1)
            learned = trainer(tokens).logits[0].float().log_softmax(-1)
        for position in range(1, len(ids)):
            token = ids[position]
            sampled = output.prompt_logprobs[position][token].logprob
            to_reference.append(abs(sampled - float(exact[position - 1, token])))
            to_trainer.append(abs(sampled - float(learned[position - 1, token])))
    means = [sum(differences) / len(differences) for differences in (to_reference, to_trainer)]
    record("32 layers, log-probability difference of the engine to the fp32 reference: mean", f"{means[0]:.4f}")
    record("32 layers, the same to the trainer's model: mean", f"{means[1]:.4f}")
    assert means[0] < 0.02 and means[1] < 0.025  # measured: 0.011 and 0.016 (kernels/results/README.md)
