"""Test the plugin under torch.compile and CUDA graphs."""

import pytest
import torch
from marlin_packing import repack
from qerl_kernels import nvfp4

pytestmark = pytest.mark.gpu

RANK = 16
PROMPTS = [[(7 * i + 3 * j) % 500 + 2 for j in range(40 + i)] for i in range(8)]


ROOM = {
    "LoRA slots": {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": RANK},
    "resident adapter": {"additional_config": {"qerl": {"policy_adapter": {"rank": RANK}}}},
}


@pytest.fixture(scope="module", params=ROOM)
def engine(start_engine, checkpoints, request):
    return start_engine(checkpoints[1], kv_cache_memory_bytes=1 << 30, **ROOM[request.param])


@pytest.fixture(scope="module")
def policy(engine):
    from qerl_vllm_plugin.policy import Policy

    return Policy(engine)


def random_adapter(engine, dtype, device):
    worker = engine.llm_engine.model_executor.driver_worker.worker
    from qerl_vllm_plugin.worker.policy import policy_of

    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, target in policy_of(worker).carrier.targets().items():
        a = torch.randn(RANK, target.in_features, generator=generator) / target.in_features**0.5
        b = torch.randn(target.out_features, RANK, generator=generator) / RANK**0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(device, dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(device, dtype)
    return tensors, {"peft_type": "LORA", "r": RANK, "lora_alpha": 4 * RANK, "target_modules": "all-linear"}


def test_promise_02_logits_agree_with_the_naive_reference(engine, policy, checkpoints, dense, off_by, record):
    """Compare with a dense fp32 model of the dequantized weights, so that only BF16 activations differ."""
    policy.swap(None)
    differences = off_by(engine, dense(checkpoints), PROMPTS, policy.request)
    mean, largest = sum(differences) / len(differences), max(differences)
    record(
        "log-probability difference, engine (BF16 activations) to fp32 reference: mean / max",
        f"{mean:.4f} / {largest:.4f}",
    )
    assert mean < 0.02 and largest < 0.2


def test_every_layer_runs_on_the_fastest_exact_kernel(engine):
    from qerl_vllm_plugin.weights.layouts import Marlin, Tiled

    expected = Tiled if torch.cuda.get_device_capability() == (9, 0) else Marlin
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    layouts = [m.quant_method.layout for m in model.modules() if hasattr(getattr(m, "quant_method", None), "layout")]
    assert len(layouts) >= 16 and all(isinstance(layout, expected) for layout in layouts)


def test_promise_03_noise_is_visible_and_exactly_reversible_under_cuda_graphs(policy, record, answer):
    policy.swap(None)
    clean, state = answer(policy), policy.state(digest=True)
    assert answer(policy) == clean, "the engine itself is not deterministic: nothing can be concluded"
    report = policy.set_noise(5e-4, seed=1, rollout=3)
    assert report.noisy_norms == 8 and report.swallowed == 0.0
    small = answer(policy)
    policy.set_noise(5e-2, seed=1, rollout=3)
    large = answer(policy)
    policy.clear_noise()
    assert small != clean and large != clean and large != small
    assert policy.state(digest=True).norms == state.norms
    assert answer(policy) == clean
    record("noise of sigma 5e-4 under CUDA graphs: visible, and cleared bit for bit", "yes")


def test_promise_04_and_promise_07_a_swap_is_visible_reversible_and_leaves_the_callers_tensors_alone(
    engine, policy, record, answer
):
    policy.swap(None)
    clean, state = answer(policy), policy.state(digest=True)
    # In the engine's own dtype and device, vLLM would alias lora_B and scale it in place.
    tensors, config = random_adapter(engine, torch.bfloat16, "cuda")
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for _ in range(3):
        policy.swap(tensors, config)
    adapted, buffers = answer(policy), policy.state(digest=True).adapter
    assert adapted != clean
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors.items())
    policy.swap(None)
    assert answer(policy) == clean
    assert policy.state(digest=True).adapter == state.adapter
    policy.swap({name: tensor.cpu().float() for name, tensor in tensors.items()}, config)
    assert policy.state(digest=True).adapter == buffers
    # vLLM's LoRA kernel adds partial sums in any order, so only this carrier repeats exactly
    if policy.carrier == "resident":
        assert answer(policy) == adapted
    policy.swap(None)
    record(
        f"adapter ({policy.carrier}) under CUDA graphs: visible, exactly reversible, caller's lora_B untouched", "yes"
    )


def test_the_closed_form_of_marlins_layout_is_the_gpus_repack():
    from vllm import _custom_ops as ops

    for N, K in ((64, 128), (1152, 896), (4864, 896)):
        codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device="cuda")
        words = codes.view(torch.int32).T.contiguous()
        try:
            repacked = ops.gptq_marlin_repack(b_q_weight=words, size_k=K, size_n=N, num_bits=4)
        except TypeError:  # vLLM 0.26 also takes the act-order permutation
            none = torch.empty(0, dtype=torch.int32, device="cuda")
            repacked = ops.gptq_marlin_repack(b_q_weight=words, perm=none, size_k=K, size_n=N, num_bits=4)
        assert torch.equal(repacked.view(K // 16, 2 * N), repack(codes))


def test_a_kernel_can_be_chosen_by_name():
    from qerl_vllm_plugin.weights.layouts import Canonical, Marlin, Tiled, choose

    assert isinstance(choose(torch.bfloat16, "marlin"), Marlin)
    assert isinstance(choose(torch.bfloat16, "dequantize"), Canonical)
    assert isinstance(choose(torch.bfloat16), Tiled) and isinstance(choose(torch.float16), Tiled)
    assert isinstance(choose(torch.float32), Marlin)


def test_a_layer_whose_scales_marlin_would_flush_stays_exact(record):
    from qerl_vllm_plugin.weights.layouts import Canonical, Marlin

    layer = layer_with_scales(smallest=2.0**-9, largest=448.0)
    x = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16)
    w = nvfp4.dequantize(layer.weight_packed.data, layer.weight_scale.data).float() / 50.0
    layout = Marlin().prepare(layer)
    assert isinstance(layout, Canonical)
    torch.testing.assert_close(layout.apply(layer, x, None).float(), x.float() @ w.T, rtol=1e-2, atol=1e-2)


def test_parts_with_unequal_tensor_scales_stay_exact(monkeypatch):
    from qerl_vllm_plugin.weights.layouts import Marlin

    # the engine before has locked it, and vLLM 0.31 puts Marlin's locks there
    monkeypatch.setattr("vllm.v1.worker.workspace._manager", None)
    layer = layer_with_scales(smallest=8.0, largest=448.0)
    layer.logical_widths = [64, 64]
    layer.weight_global_scale.data = torch.tensor([50.0, 400.0], device="cuda")
    layer.bias = torch.nn.Parameter(torch.randn(128, device="cuda", dtype=torch.bfloat16), requires_grad=False)
    bias = layer.bias.data.clone()
    rows = torch.tensor([50.0] * 64 + [400.0] * 64, device="cuda")
    w = nvfp4.dequantize(layer.weight_packed.data, layer.weight_scale.data).float() / rows[:, None]
    x = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16)
    layout = Marlin().prepare(layer)
    assert isinstance(layout, Marlin) and len(layer.marlin_parts) == 2
    expected = x.float() @ w.T + bias.float()
    torch.testing.assert_close(layout.apply(layer, x, layer.bias).float(), expected, rtol=1e-2, atol=1e-1)


def layer_with_scales(smallest, largest):
    """Make a bare layer of 128 x 256 random codes whose block scales lie between two given values."""
    layer = torch.nn.Module()
    layer.weight_packed = torch.nn.Parameter(
        torch.randint(0, 256, (128, 128), dtype=torch.uint8, device="cuda"), requires_grad=False
    )
    exponents = torch.rand(128, 16, device="cuda")
    scales = smallest * (largest / smallest) ** exponents
    scales.view(-1)[0], scales.view(-1)[-1] = smallest, largest
    layer.weight_scale = torch.nn.Parameter(scales.to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_global_scale = torch.nn.Parameter(torch.tensor([50.0], device="cuda"), requires_grad=False)
    layer.logical_widths, layer.qerl_prefix = [128], "a.layer"
    layer.input_size_per_partition, layer.output_size_per_partition = 256, 128
    layer.params_dtype = torch.bfloat16
    return layer
