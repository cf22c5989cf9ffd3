"""Define fixtures of the GPU tests, and print the table of their figures at the end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

RECIPES = Path(__file__).parents[2] / "recipes/demo/grpo"
ROWS: list[dict[str, Any]] = []


@pytest.fixture(scope="session")
def record():
    """Return record(what, figure), which adds one row to the table."""

    def add(what, figure):
        ROWS.append({"what": what, "figure": figure})

    return add


def pytest_terminal_summary(terminalreporter):
    if not ROWS:
        return
    terminalreporter.section("measured on this GPU")
    for row in ROWS:
        terminalreporter.write_line(f"{row['what']:<86} {row['figure']}")
    if path := os.environ.get("QERL_GPU_RESULTS"):
        Path(path).write_text(json.dumps(ROWS, indent=1))


@pytest.fixture(scope="module")
def hopper():
    """Skip the test unless it runs on a Hopper GPU."""
    from qerl_kernels import linear_tiles

    if not torch.cuda.is_available() or not linear_tiles.supported(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture(scope="session")
def start_engine():
    """Return start_engine(folder, **options), which starts a vllm.LLM under qerl_nvfp4.

    It is small unless the options say otherwise. One with ``kv_cache_memory_bytes`` may share its GPU with other tests:
    vLLM then measures no memory, in which it would count what others take and free meanwhile.
    """
    from vllm import LLM

    def start(folder, **options):
        usual = {
            "quantization": "qerl_nvfp4",
            "dtype": "bfloat16",
            "gpu_memory_utilization": 0.2,
            "max_model_len": 512,
            "max_num_seqs": 16,
            "disable_log_stats": True,
        }
        return LLM(str(folder), **{**usual, **options})

    return start


@pytest.fixture(scope="session")
def make_checkpoints(tmp_path_factory):
    """Return make_checkpoints(seed, written=1.0, **config), which makes BF16 and NVFP4 folders of a random Qwen2 with
    random norms.

    ``written`` scales the linears that write into the residual stream.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from qerl_recipes.convert.quantize import quantize_checkpoint
    from qerl_recipes.tasks.running_sum import tokenizer

    def make(seed, written=1.0, **config):
        torch.manual_seed(seed)
        fixed = {
            "vocab_size": 512,
            "num_key_value_heads": 2,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        model = Qwen2ForCausalLM(Qwen2Config(**fixed, **config)).to(torch.bfloat16)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape)
                if "norm" in name:
                    parameter.copy_(1 + 0.2 * noise)
                elif name.endswith("bias"):
                    parameter.copy_(0.1 * noise)
                else:
                    scale = written if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                    parameter.copy_(scale * noise / parameter.shape[-1] ** 0.5)
        folder = tmp_path_factory.mktemp("gpu")
        model.save_pretrained(folder / "bf16")
        tokenizer().save_pretrained(folder / "bf16")
        quantize_checkpoint(folder / "bf16", folder / "nvfp4", device="cuda")
        return folder / "bf16", folder / "nvfp4"

    return make


@pytest.fixture(scope="session")
def checkpoints(make_checkpoints):
    """Make BF16 and NVFP4 folders of a random Qwen2 with Qwen2.5-0.5B's layer sizes and 4 layers."""
    return make_checkpoints(
        0,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=4,
        num_attention_heads=14,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="session")
def deep(make_checkpoints):
    """Make BF16 and NVFP4 folders of a model with 32 layers.

    As in a trained model, each layer adds little to the residual stream.
    """
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 32, "num_attention_heads": 8}
    return make_checkpoints(1, written=0.2, tie_word_embeddings=False, **sizes)


@pytest.fixture(scope="session")
def dense():
    """Return dense(folders), the model in fp32 with the dequantized weights of the packed folder."""
    from qerl_kernels import nvfp4
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    @torch.no_grad()
    def build(folders):
        model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).cuda().eval()
        packed = load_file(next(folders[1].glob("*.safetensors")), device="cuda")
        for name, module in model.named_modules():
            if f"{name}.weight_packed" in packed:
                parts = (packed[f"{name}.{part}"] for part in ("weight_packed", "weight_scale", "weight_global_scale"))
                codes, scales, divisor = parts
                module.weight.copy_(nvfp4.dequantize(codes, scales).float() / divisor)
        return model

    return build


@pytest.fixture(scope="session")
def off_by():
    """Return off_by(engine, model, prompts, request=None).

    It gives the difference of the engine's log-probability from the model's, for each token of each prompt but the
    first.
    """
    from vllm import SamplingParams

    def measure(engine, model, prompts, request=None):
        inputs, found = [{"prompt_token_ids": ids} for ids in prompts], []
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = engine.generate(inputs, sampling, lora_request=request, use_tqdm=False)
        for ids, output in zip(prompts, outputs, strict=True):
            with torch.no_grad():
                theirs = model(torch.tensor([ids], device="cuda")).logits[0].float().log_softmax(-1)
            ours = (output.prompt_logprobs[at][ids[at]].logprob for at in range(1, len(ids)))
            found += [abs(value - float(theirs[at, ids[at + 1]])) for at, value in enumerate(ours)]
        return found

    return measure


@pytest.fixture(scope="session")
def answer():
    """Return answer(policy), which gives greedy tokens and their log-probability for each of eight prompts.

    They are decoded in batches and so through CUDA graphs. The prefix cache is emptied first, since a half-cached
    prompt is computed in another shape and rounds differently.
    """
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 500 + 2 for j in range(40 + i)]} for i in range(8)]
    sampling = SamplingParams(max_tokens=16, temperature=0, logprobs=0, ignore_eos=True)

    def ask(policy):
        assert policy._llm.reset_prefix_cache()
        outputs = policy._llm.generate(prompts, sampling, lora_request=policy.request, use_tqdm=False)
        return [(tuple(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob) for o in outputs]

    return ask


@pytest.fixture
def three_grpo_steps(tmp_path):
    """Return train(recipe, **overrides), which trains through the command line and gives the mean log-probability
    mismatch.

    ``recipe`` names one of the demo's recipes.
    """

    def train(recipe, **overrides):
        settings = {
            "use_cpu": "false",
            "bf16": "true",
            "max_steps": 3,
            "per_device_train_batch_size": 32,
            "skip_zero_advantage": "false",  # random weights earn no reward, so every group would be skipped
            "vllm_gpu_memory_utilization": 0.2,
            "save_strategy": "no",
            "output_dir": tmp_path / "run",
            **overrides,
        }
        line = [sys.executable, "-m", "qerl_recipes.cli", "train", "--config", str(RECIPES / recipe)]
        line += [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        done = subprocess.run(line, capture_output=True, text=True, env=os.environ, timeout=280)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        steps = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in steps] == [1, 2, 3]
        assert all(row["logp_diff_mean"] > 0 for row in steps)
        return sum(row["logp_diff_mean"] for row in steps) / 3

    return train
