"""Test model families and formats on a GPU: vLLM's NVFP4 experts, fp32 norms of 1 + w, and folders made by other tools.

The reference is transformers in fp32 on the dequantized weights, so only BF16 activations differ. The models are small
and random. In a mixture of experts, a few tokens go to another expert where two are about equal.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from qerl_kernels import nvfp4

pytestmark = pytest.mark.gpu

TOLERANCE = (
    0.05  # nats, for the mean difference of a log-probability; the same models have 0.01 to 0.02 on a CPU in BF16
)
RANK = 8
PROMPTS = [[(7 * i + 3 * j) % 60 + 2 for j in range(40 + i)] for i in range(8)]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    # The mixture comes after Gemma. vLLM 0.26 runs the two by different code. After a mixture has made its graphs, its
    # code forbids graphs to the whole process until it makes some again.
    "gemma3_text": {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64},
    "qwen3_moe": {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 512},
    "qwen3": {"head_dim": 64},
}
FIXTURES = Path(__file__).parents[1] / "fixtures"
FORMATS = {
    "modelopt": FIXTURES / "modelopt" / "qwen2-nvfp4",
    "modelopt, mixed with FP8": FIXTURES / "modelopt" / "qwen3-mixed",
    "modelopt, FP8 cache": FIXTURES / "modelopt" / "qwen3-w4a16-kv",
    "compressed-tensors W4A4": FIXTURES / "llmcompressor_w4a4" / "qwen2-w4a4",
}
SMALL = {"gpu_memory_utilization": 0.06, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def make_family(tmp_path_factory):
    """Return make_family(name), which writes BF16 and NVFP4 folders of a random model with random norms."""
    import transformers

    from qerl_recipes.convert.quantize import quantize_checkpoint
    from qerl_recipes.tasks.running_sum import tokenizer

    made: dict[str, tuple[Path, Path]] = {}

    def make(family):
        if family not in made:
            torch.manual_seed(7)
            config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
            model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    noise = torch.randn(parameter.shape)
                    middle = 0 if family == "gemma3_text" else 1  # the mean of a stored norm weight
                    is_norm = "norm" in name
                    parameter.copy_(middle + 0.3 * noise if is_norm else noise / parameter.shape[-1] ** 0.5)
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder / "bf16")
            tokenizer().save_pretrained(folder / "bf16")
            quantize_checkpoint(folder / "bf16", folder / "nvfp4", device="cuda")
            made[family] = folder / "bf16", folder / "nvfp4"
        return made[family]

    return make


def dequantized(folder):
    """Dequantize a packed checkpoint to fp32 under transformers' names, with two stacked expert tensors per layer."""
    from safetensors.torch import load_file

    stored = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    weights = {}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight_packed")
        if name.endswith(".weight_packed"):
            w = nvfp4.dequantize(tensor, stored[f"{module}.weight_scale"]).float()
            weights[f"{module}.weight"] = w / stored[f"{module}.weight_global_scale"].float()
        elif not name.endswith(("weight_scale", "weight_global_scale")):
            weights[name] = tensor.float()
    for layer in {name.split(".experts.")[0] for name in weights if ".experts." in name}:
        count = sum(name.startswith(f"{layer}.experts.") and name.endswith("down_proj.weight") for name in weights)
        parts = {
            part: [weights.pop(f"{layer}.experts.{e}.{part}.weight") for e in range(count)]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        weights[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        weights[f"{layer}.experts.down_proj"] = torch.stack(parts["down_proj"])
    return weights


def reference(folder, weights=None):
    """Compute log-probabilities of ``PROMPTS`` by transformers in fp32, with ``weights`` or with the BF16 checkpoint's
    own.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if weights is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, **options)
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        model.tie_weights()
    model.cuda().eval()
    found = []
    with torch.no_grad():
        for ids in PROMPTS:
            logits = model(torch.tensor([ids], device="cuda")).logits[0, :-1].float()
            chosen = torch.tensor(ids[1:], device="cuda")[:, None]
            found.append(logits.log_softmax(-1).gather(1, chosen)[:, 0])
    return torch.cat(found).cpu()


def served(llm, request=None):
    """Compute the same log-probabilities with an engine."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    answers = llm.generate(prompts, sampling, lora_request=request, use_tqdm=False)
    found = []
    for ids, answer in zip(PROMPTS, answers, strict=True):
        found += [line[token].logprob for token, line in zip(ids[1:], answer.prompt_logprobs[1:], strict=True)]
    return torch.tensor(found)


def mean(a, b):
    return float((a - b).abs().mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_promise_02_a_family_answers_as_transformers_on_its_weights(family, start_engine, make_family, record):
    from qerl_vllm_plugin.policy import Policy

    source, folder = make_family(family)
    weights = dequantized(folder)
    want = reference(folder, weights)
    resident = {"qerl": {"policy_adapter": {"rank": RANK}}}
    # Compile, as in serving, models with norms of 1 + w or vLLM's experts. Run the other two eagerly to save time.
    is_eager = family in ("phi3", "qwen3")
    llm = start_engine(folder, **SMALL, additional_config=resident, enforce_eager=is_eager)
    found = served(llm)
    record(f"{family}: mean |log p - transformers fp32|, NVFP4", f"{mean(found, want):.4f}")
    assert mean(found, want) < TOLERANCE
    assert mean(found, reference(source)) > 2 * mean(found, want)

    targets = ("qkv_proj",) if family == "phi3" else ATTENTION
    generator, tensors = torch.Generator().manual_seed(5), {}
    for name in [name for name in weights if name.removesuffix(".weight").endswith(targets)]:
        N, K = weights[name].shape
        a, b = (torch.randn(*shape, generator=generator) for shape in ((RANK, K), (N, RANK)))
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a / K**0.5, 0.3 * b / RANK**0.5
        weights[name] += 2 * tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
    policy = Policy(llm)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(targets)}
    policy.swap(tensors, config)
    adapted, want_adapted = served(llm), reference(folder, weights)
    record(f"{family}: the same with the adapter", f"{mean(adapted, want_adapted):.4f}")
    assert mean(adapted, want_adapted) < TOLERANCE < mean(adapted, found)

    policy.swap(None)
    norms = ("input_layernorm", "pre_feedforward_layernorm" if family == "gemma3_text" else "post_attention_layernorm")
    assert policy.set_noise(0.1, seed=1, rollout=1, targets=norms).noisy_norms == 4
    assert mean(served(llm), found) > 0.5 * TOLERANCE
    policy.clear_noise()
    assert llm.reset_prefix_cache()
    assert mean(served(llm), found) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_folders_of_other_tools_answer_as_transformers_on_their_weights(name, start_engine, record, tmp_path):
    from qerl_recipes.convert.quantize import quantize_checkpoint

    quantize_checkpoint(FORMATS[name], tmp_path / "weights")
    want = reference(tmp_path / "weights", dequantized(tmp_path / "weights"))
    asked = {"qerl": {"weight_only": True}}
    has_cache = "cache" in name  # the others have scales of one, or none, and run with a BF16 cache
    options = {"enforce_eager": True, "max_model_len": 128, "kv_cache_dtype": "auto" if has_cache else "bfloat16"}
    found = served(start_engine(FORMATS[name], **SMALL, additional_config=asked, **options))
    record(f"{name}: mean |log p - transformers fp32|", f"{mean(found, want):.4f}")
    assert mean(found, want) < TOLERANCE * (4 if has_cache else 1)


def test_promise_06_a_mixture_is_trained_on_the_experts_that_are_served(three_grpo_steps, make_family, record):
    _, folder = make_family("qwen3_moe")
    mismatch = three_grpo_steps("nvfp4_lora.yaml", model_name_or_path=folder, lora_target_modules="q_proj")
    record("qwen3_moe: mean |log p| difference of engine and trainer, three GRPO steps", f"{mismatch:.4f}")
    assert mismatch < TOLERANCE


def test_an_fp8_cache_is_measured(start_engine, make_family, record):
    _, folder = make_family("qwen3")
    want = reference(folder, dequantized(folder))
    found = {}
    for dtype in ("auto", "fp8"):
        llm = start_engine(folder, **SMALL, enforce_eager=True, kv_cache_dtype=dtype)
        found[dtype] = mean(served(llm), want)
        record(f"qwen3: mean |log p - transformers fp32|, --kv-cache-dtype {dtype}", f"{found[dtype]:.4f}")
    assert found["auto"] < TOLERANCE and found["fp8"] < 4 * TOLERANCE


def test_promise_02_experts_whose_gate_and_up_have_tensor_scales_of_their_own(
    start_engine, make_family, record, tmp_path
):
    import shutil

    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(make_family("qwen3_moe")[1], tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    for number, name in enumerate(name for name in tensors if name.endswith("up_proj.weight_global_scale")):
        tensors[name] *= (0.6, 3.7)[number % 2]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    want = reference(folder, dequantized(folder))
    found = mean(served(start_engine(folder, **SMALL, enforce_eager=True)), want)
    record("qwen3_moe, unequal tensor scales: mean |log p - transformers fp32|", f"{found:.4f}")
    assert found < TOLERANCE


def test_an_adapter_on_experts_in_vllm_s_slots(start_engine, make_family, record, tmp_path):
    """Load the adapter by vLLM's own --enable-lora, which Marlin experts support; the resident adapter does not reach
    experts.
    """
    import json

    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    _, folder = make_family("qwen3_moe")
    weights = dequantized(folder)
    generator, tensors = torch.Generator().manual_seed(5), {}
    for layer in range(2):
        for leaf, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            stacked = weights[f"model.layers.{layer}.mlp.experts.{leaf}"]
            for expert in range(len(stacked)):
                for part, w in zip(parts, stacked[expert].chunk(len(parts)), strict=True):
                    a, b = (torch.randn(*s, generator=generator) for s in ((RANK, w.shape[1]), (w.shape[0], RANK)))
                    a, b = a / w.shape[1] ** 0.5, 0.3 * b / RANK**0.5
                    module = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{part}"
                    tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a, b
                    w += 2 * b @ a
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    modules = ["gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": modules, "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    slots = {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK, "lora_target_modules": [*modules, "experts"]}
    llm = start_engine(folder, **SMALL, **slots, enforce_eager=True)
    base = served(llm)
    found = served(llm, LoRARequest("experts", 7, str(tmp_path)))
    difference = mean(found, reference(folder, weights))
    record("qwen3_moe: an adapter on experts in LoRA slots, mean |log p - transformers fp32|", f"{difference:.4f}")
    assert difference < TOLERANCE < mean(found, base)
