"""Provide packed checkpoints from a few independent lines of code, a Hugging Face reference, and engines."""

import functools
import json
import logging
import math
import shutil
import ssl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

# E2M1: a sign bit and an index into these values; written again here so that the tests are independent
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": None,
        }
    },
}
PROMPTS = [[5, 9, 17, 33, 60, 21, 8, 14, 2, 40, 41, 3], [11, 11, 30, 4, 55, 62, 7], [3, 50]]


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """Let httpx read the machine's certificates once. It reads them for every client and call, for 65 ms each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture
def client_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """client_of(server, token=TOKEN) returns an HTTP client of the routes of ``server``, which are in this process."""
    import httpx
    from fastapi import FastAPI
    from policy_requests import TOKEN
    from waiting import PATIENCE

    from qerl_vllm_plugin.server import routes
    from qerl_vllm_plugin.server.token import HEADER, read_token

    monkeypatch.setenv("QERL_ADMIN_TOKEN", TOKEN)

    def make(server: Any, token: str = TOKEN) -> httpx.AsyncClient:
        app = FastAPI()
        app.state.qerl = server
        routes.attach(app, read_token())
        assert not [path for path in app.openapi()["paths"] if "qerl" in path]
        options = {"transport": httpx.ASGITransport(app), "base_url": "http://x/v1/qerl/", "timeout": PATIENCE}
        return httpx.AsyncClient(**options, headers={HEADER: token})

    return make


@pytest.fixture(scope="session")
def write_packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """write_packed(bf16_folder, shared=True) packs a checkpoint and returns its folder.

    With ``shared`` the parts of a fused layer have one divisor, as `qerl quantize` writes them. Without it each part
    has its own, and these differ by powers of ten.
    """
    from qerl_kernels import nvfp4
    from safetensors.torch import load_file, save_file

    def write(source: Path, *, shared: bool = True) -> Path:
        tensors = load_file(source / "model.safetensors")
        packed: dict[str, torch.Tensor] = {}
        for name, w in tensors.items():
            module = name.removesuffix(".weight")
            last = module.rsplit(".", 1)[-1]
            if w.dim() != 2 or last in ("embed_tokens", "lm_head"):
                packed[name] = w
                continue
            if not shared:
                w = w * {"k_proj": 10, "v_proj": 0.1, "up_proj": 3}.get(last, 1)
            group = FUSED.get(last)
            siblings = [
                tensors[f"{module.rsplit('.', 1)[0]}.{other}.weight"]
                for other, its_group in FUSED.items()
                if shared and group and its_group == group
            ] or [w]
            amax = torch.stack([tensor.abs().amax() for tensor in siblings]).amax()
            result = nvfp4.quantize(w, nvfp4.divisor_from_amax(amax))
            packed[f"{module}.weight_packed"] = result.codes
            packed[f"{module}.weight_scale"] = result.block_scales
            packed[f"{module}.weight_global_scale"] = result.divisor.reshape(1)
        folder = tmp_path_factory.mktemp("packed")
        save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
        for file in source.iterdir():
            if file.suffix == ".json" or file.name.startswith("tokenizer"):
                (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = SCHEME
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def dequantize(codes: torch.Tensor, scales: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Return the float64 weight that three stored tensors encode, computed code by code."""
    low, high = codes & 0xF, codes >> 4
    index = torch.stack([low, high], dim=-1).flatten(1)
    values = torch.tensor(E2M1, dtype=torch.float64)[(index & 7).long()] * torch.where(index & 8 > 0, -1.0, 1.0)
    return values * scales.double().repeat_interleave(16, dim=1) / divisor.double()


@pytest.fixture(scope="session")
def weights_of() -> Callable[[Path], dict[str, torch.Tensor]]:
    """weights_of(packed_folder) returns float64 tensors under their names in the BF16 checkpoint."""
    from safetensors.torch import load_file

    def read(folder: Path) -> dict[str, torch.Tensor]:
        stored = load_file(folder / "model.safetensors")
        weights = {}
        for name, tensor in stored.items():
            module = name.removesuffix(".weight_packed")
            if name.endswith(".weight_packed"):
                parts = [stored[f"{module}.{part}"] for part in ("weight_scale", "weight_global_scale")]
                weights[f"{module}.weight"] = dequantize(tensor, *parts)
            elif not name.endswith(("weight_scale", "weight_global_scale")):
                weights[name] = tensor.double()
        return weights

    return read


@pytest.fixture(scope="session")
def reference(
    weights_of: Callable[[Path], dict[str, torch.Tensor]], building: Callable[[object], AbstractContextManager[None]]
) -> Callable[[Path], torch.nn.Module]:
    """reference(folder) returns the Hugging Face model of a packed or BF16 checkpoint, in float32 throughout.

    In float32 the rounding of the norms is negligible, so a float32 engine must agree to about 1e-4.
    """
    import transformers

    def build(folder: Path) -> torch.nn.Module:
        config = transformers.AutoConfig.from_pretrained(folder)
        config.quantization_config = None
        del config.quantization_config
        how = {"dtype": torch.float32, "attn_implementation": "eager"}
        with building(config):
            model = transformers.AutoModelForCausalLM.from_config(config, **how)
        weights = _stack_experts({name: w.float() for name, w in weights_of(folder).items()})
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        model.tie_weights()
        return model.eval()

    return build


def _stack_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the experts as transformers 5 does: two tensors a layer, gate_up_proj (E, 2N, K) and down_proj (E, K,
    N)."""
    stacked = {name: w for name, w in weights.items() if ".experts." not in name}
    layers = {name.split(".experts.")[0] for name in weights if ".experts." in name}
    for layer in layers:
        count = sum(name.startswith(f"{layer}.experts.") and name.endswith("down_proj.weight") for name in weights)
        parts = {
            part: [weights[f"{layer}.experts.{e}.{part}.weight"] for e in range(count)]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        gate_up = [torch.cat(pair) for pair in zip(parts["gate_proj"], parts["up_proj"], strict=True)]
        stacked[f"{layer}.experts.gate_up_proj"] = torch.stack(gate_up)
        stacked[f"{layer}.experts.down_proj"] = torch.stack(parts["down_proj"])
    return stacked


@torch.no_grad()
def hf_logprobs(model: torch.nn.Module, prompts: list[list[int]] = PROMPTS) -> torch.Tensor:
    """Return the log-probability of every prompt token but the first, with all prompts concatenated: (tokens,)."""
    found = []
    for ids in prompts:
        logits = model(torch.tensor([ids])).logits[0].float()
        found.append(torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(found)


def engine_logprobs(llm: Any, request: Any = None, prompts: list[list[int]] = PROMPTS) -> torch.Tensor:
    """Return the same log-probabilities from the engine. It computes the prompt anew, since prompt_logprobs bypass the
    prefix cache."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(inputs, sampling, use_tqdm=False, lora_request=request)
    values = []
    for ids, output in zip(prompts, outputs, strict=True):
        values += [output.prompt_logprobs[i][ids[i]].logprob for i in range(1, len(ids))]
    assert all(math.isfinite(value) for value in values)
    return torch.tensor(values)


def ask(llm: Any, ids: list[int], request: Any = None, **sampling: Any) -> Any:
    """Return vLLM's output for one prompt, sampled greedily unless ``sampling`` says otherwise."""
    from vllm import SamplingParams

    parameters = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
    return llm.generate([{"prompt_token_ids": ids}], parameters, use_tqdm=False, lora_request=request)[0]


def engine_worker(llm: Any) -> Any:
    """Return the worker inside an engine that runs in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker


def engine_model(llm: Any) -> torch.nn.Module:
    """Return the model inside an engine that runs in this process."""
    return engine_worker(llm).model_runner.get_model()


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest absolute difference."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


@pytest.fixture(scope="session")
def measure() -> Any:
    """Give the functions above to test files, which cannot import one another."""
    import types

    return types.SimpleNamespace(
        hf=hf_logprobs,
        engine=engine_logprobs,
        ask=ask,
        difference=difference,
        model=engine_model,
        worker=engine_worker,
        prompts=PROMPTS,
    )


@pytest.fixture(scope="module")
def boot(engine_options: dict[str, object]) -> Iterator[Callable[..., Any]]:
    """boot(folder, **options) starts an engine in this process, which is shut down at the end of the module."""
    from vllm import LLM
    from vllm.distributed import destroy_model_parallel

    engines = []

    def start(folder: Path, **options: object) -> Any:
        options = {"quantization": "qerl_nvfp4", "num_gpu_blocks_override": 64, **engine_options, **options}
        engines.append(LLM(model=str(folder), **options))
        return engines[-1]

    yield start
    for llm in engines:
        llm.llm_engine.engine_core.shutdown()
    engines.clear()
    # an engine that failed to start leaves its process groups behind, which may not fit the next engine
    destroy_model_parallel()


# the two places where an engine can hold the policy adapter; float32 allows tight comparisons
CARRIERS: dict[str, dict[str, Any]] = {
    "lora": {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 8, "dtype": "float32"},
    "resident": {"additional_config": {"qerl": {"policy_adapter": {"rank": 8}}}, "dtype": "float32"},
}


@pytest.fixture(scope="module", params=CARRIERS)
def carrier_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the options of an engine with a policy adapter of rank <= 8, once for each carrier."""
    return CARRIERS[request.param]


@pytest.fixture(scope="session")
def carriers() -> dict[str, dict[str, Any]]:
    """Return the options of all carriers by their names."""
    return CARRIERS


@pytest.fixture(scope="module")
def folder(make_nvfp4: Callable[..., Path]) -> Path:
    """Return the packed checkpoint that a test file's engine serves. A file with another checkpoint overrides
    ``folder``."""
    return make_nvfp4("qwen2")


@pytest.fixture(scope="module")
def checkpoint_norms(weights_of: Callable[[Path], dict[str, torch.Tensor]], folder: Path) -> dict[str, torch.Tensor]:
    """Return the norms of ``folder`` in fp32."""
    return {name: w.float() for name, w in weights_of(folder).items() if "norm" in name}


@pytest.fixture(scope="module")
def hf(reference: Callable[[Path], torch.nn.Module], folder: Path) -> torch.nn.Module:
    """Return the Hugging Face reference of ``folder``."""
    return reference(folder)


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, boot: Callable[..., Any], folder: Path, carrier_options: dict[str, Any]
) -> Any:
    """Start an engine with a policy adapter, once for each carrier. A test file's ENGINE may add options."""
    return boot(folder, **{**carrier_options, **getattr(request.module, "ENGINE", {})})


@pytest.fixture
def policy(engine: Any) -> Any:
    """Return the policy of ``engine``, reset to no adapter and no noise."""
    from qerl_vllm_plugin.policy import Policy

    policy = Policy(engine)
    policy.swap(None)
    policy.clear_noise()
    return policy


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """edited(folder, change=None, **config) returns a copy that a test may damage.

    ``change(tensors)`` changes its tensors in place. ``config`` holds keys of its config.json; None removes a key.
    """
    from safetensors.torch import load_file, save_file

    def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object] | None = None, **config: object) -> Path:
        copy = shutil.copytree(folder, tmp_path / f"edited-{len(list(tmp_path.glob('edited-*')))}")
        if change is not None:
            tensors = load_file(copy / "model.safetensors")
            change(tensors)
            save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        values = json.loads((copy / "config.json").read_text()) | config
        values = {key: value for key, value in values.items() if value is not None or key not in config}
        (copy / "config.json").write_text(json.dumps(values))
        return copy

    return edit


@pytest.fixture
def warnings_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[logging.Logger], list[str]]:
    """warnings_of(logger) returns a list that collects its later warnings, from ``warning`` and ``warning_once``."""

    def collect(logger: logging.Logger) -> list[str]:
        texts: list[str] = []
        for name in ("warning", "warning_once"):
            monkeypatch.setattr(logger, name, lambda text, *values, **_: texts.append(text % values))
        return texts

    return collect


@pytest.fixture(scope="session")
def make_adapter() -> Callable[..., tuple[dict[str, torch.Tensor], dict[str, Any], torch.nn.Module]]:
    """make_adapter(hf_model, seed=1, size=0.3, **lora_config) returns tensors, config and the PEFT model.

    Both A and B are random: PEFT's initial adapter (B = 0) would change nothing.
    """
    import copy

    import peft

    def make(model: torch.nn.Module, *, seed: int = 1, size: float = 0.3, **changes: object) -> Any:
        options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **changes}
        wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", **options))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_" in name:
                    parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
        tensors = {name: t.detach().clone() for name, t in peft.get_peft_model_state_dict(wrapped).items()}
        return tensors, wrapped.peft_config["default"].to_dict(), wrapped.eval()

    return make
