import shutil

import pytest
import torch
import transformers
from qerl_kernels import naive, nvfp4
from safetensors.torch import load_file, save_file

from qerl_recipes.model import loading as models
from qerl_recipes.model import norms
from qerl_recipes.model.frozen import FrozenNVFP4Linear
from qerl_vllm_plugin import noise
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

IDS = torch.randint(2, 27, (3, 24), generator=torch.Generator().manual_seed(1))
ARCHITECTURES = ["qwen2", "qwen3", "llama", "mistral"]


def dense(bf16_folder, nvfp4_folder, dtype=torch.float32):
    """Build the same model in stock transformers, with dense weights computed from the packed tensors."""
    model = transformers.AutoModelForCausalLM.from_pretrained(bf16_folder, dtype=dtype)
    tensors = load_file(nvfp4_folder / "model.safetensors")
    for name, module in model.named_modules():
        if f"{name}.weight_packed" in tensors:
            codes, scales = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]
            weight = nvfp4.dequantize(codes, scales).float() / tensors[f"{name}.weight_global_scale"]
            module.weight.data = weight.to(dtype)
    return model.eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_promise_02_the_trainer_multiplies_by_the_checkpoints_numbers(architecture, make_bf16, make_nvfp4):
    folder = make_nvfp4(architecture)
    model = models.load(folder, torch.float32)
    expected = dense(make_bf16(architecture), folder)(IDS).logits
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    assert sum(isinstance(module, FrozenNVFP4Linear) for module in model.modules()) == 14
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantizing_while_loading_gives_the_quantizers_bits(dtype, make_bf16, make_nvfp4):
    on_the_way = models.load(make_bf16("qwen2"), dtype, quantization="qerl_nvfp4")
    from_disk = models.load(make_nvfp4("qwen2"), dtype)
    theirs = dict(from_disk.named_buffers())
    for name, buffer in on_the_way.named_buffers():
        assert torch.equal(buffer.reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8)), name
    assert torch.equal(on_the_way(IDS).logits, from_disk(IDS).logits)


@torch.no_grad()
def test_the_bf16_arm_is_transformers_own_model(make_bf16):
    folder = make_bf16("qwen2")
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.equal(models.load(folder)(IDS).logits, stock(IDS).logits)


@pytest.mark.parametrize(("family", "arm"), [("granite", "qerl_nvfp4"), ("phi3", "qerl_nvfp4"), ("granite", "bf16")])
def test_the_trainer_stops_where_the_engine_does_and_drops_nothing(family, arm, make_bf16, tmp_path):
    dropout = {"phi3": {"resid_pdrop": 0.5}, "granite": {"attention_dropout": 0.5}}[family]
    folder = shutil.copytree(make_bf16(family, **dropout), tmp_path / "base")
    transformers.GenerationConfig(eos_token_id=[1, 5]).save_pretrained(folder)
    model = models.load(folder, torch.float32, quantization=arm).train()
    assert model.generation_config.eos_token_id == [1, 5]  # of two, config.json has one
    first, second = model(IDS).logits, model(IDS).logits
    assert (first == second).all()


@torch.no_grad()
def test_fp32_norms_stay_within_the_stated_tolerance_of_stock(make_bf16):
    """Bound mean differences of log-probabilities in fp32.

    The two models are 0.0146 and 0.0174 from the same model in fp32, and 0.0196 to 0.0199 from each other. These ranges
    cover plain, AVX2 and AVX-512 code. Another processor sums in another order, which moves the means by hundredths of
    themselves. The bound leaves a margin of a half.
    """
    folder = make_bf16("qwen2")

    def stock(dtype):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model(IDS).logits.float().log_softmax(-1)

    model = models.load(folder)
    for _, norm in norms.named_norms(model):
        norm.rounded = False
    ours = model(IDS).logits.float().log_softmax(-1)
    exact, rounded = stock(torch.float32), stock(torch.bfloat16)
    assert 0 < (ours - rounded).abs().mean() < 0.03
    assert (ours - exact).abs().mean() < 1.2 * (rounded - exact).abs().mean()  # about as close as stock BF16


@pytest.mark.parametrize(("make", "rounded"), [("make_nvfp4", False), ("make_bf16", True)])
@torch.no_grad()
def test_norms_round_as_the_arms_engine_does(make, rounded, request):
    model = models.load(request.getfixturevalue(make)("qwen2"), torch.bfloat16)
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    for _, norm in norms.named_norms(model):
        once = naive.rms_norm(x, norm.weight, norm.epsilon)
        mean = x.float().pow(2).mean(-1, keepdim=True)
        twice = (x.float() * torch.rsqrt(mean + norm.epsilon)).bfloat16() * norm.weight.bfloat16()
        assert torch.equal(norm(x), twice if rounded else once) and not torch.equal(once, twice)


def test_promise_03_noise_in_the_trainer_is_set_and_leaves_the_weights_alone(make_nvfp4):
    model = models.load(make_nvfp4("qwen2"))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        clean = model(IDS).logits
        assert norms.set_noise(model, 0.05, 3, 7) == 4
        noisy = model(IDS).logits
        norms.set_noise(model, 0.5, 3, 8)
        norms.set_noise(model, 0.05, 3, 7)
        assert torch.equal(model(IDS).logits, noisy)
        assert not torch.equal(clean, noisy)
        norms.clear_noise(model)
        assert torch.equal(model(IDS).logits, clean)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_the_trainers_noisy_weight_has_the_engines_bits(make_nvfp4):
    model = models.load(make_nvfp4("qwen3"))
    norms.set_noise(model, 5e-4, 3, 7)
    for name, norm in norms.named_norms(model):
        effective = norm.weight if norm.noise is None else norm.weight + norm.noise
        targeted = noise.is_target(name)
        expected = noise.all_noisy({name: norm.weight.detach()}, 5e-4, 3, 7)[name] if targeted else norm.weight
        assert torch.equal(effective, expected), name
        assert torch.equal(effective, norm.weight) != targeted, name


@pytest.mark.parametrize("sigma", [-1e-3, float("nan"), float("inf")])
def test_a_sigma_that_is_no_standard_deviation_is_refused(sigma, make_nvfp4):
    with pytest.raises(ValueError, match="sigma"):
        norms.set_noise(models.load(make_nvfp4("qwen2")), sigma, 0, 0)


@pytest.mark.parametrize("targets", [["q_norm"], ["input_layernorm", "q_norm"]], ids=["alone", "among_others"])
def test_a_target_without_a_norm_is_refused(targets, make_nvfp4):
    model = models.load(make_nvfp4("qwen2"))
    norms.set_noise(model, 0.1, 0, 0)
    before = {name: norm.noise for name, norm in norms.named_norms(model)}
    message = r"\['q_norm'\] match none of this model's 5 norms; it has \['input_layernorm', 'norm', 'post_attention_"
    with pytest.raises(ValueError, match=message):
        norms.set_noise(model, 0.2, 0, 1, targets)
    assert all(norm.noise is before[name] for name, norm in norms.named_norms(model))
    with pytest.raises(ValueError, match=message):
        norms.make_trainable(model, targets)
    assert norms.trained_norms(norms.named_norms(model)) is None


def test_no_noise_target_at_all_is_refused(make_nvfp4):
    with pytest.raises(ValueError, match="match none of this model's 5 norms"):
        norms.set_noise(models.load(make_nvfp4("qwen2")), 0.1, 0, 0, [])


def test_trained_norms_come_back_from_disk(make_nvfp4, tmp_path):
    model = models.load(make_nvfp4("qwen2"))
    assert norms.trained_norms(norms.named_norms(model)) is None
    assert norms.make_trainable(model) == 4
    norms.set_noise(model, 0.1, 0, 0)
    model(IDS).logits.float().logsumexp(-1).sum().backward()
    trained = norms.trained_norms(norms.named_norms(model))
    for name, norm in norms.named_norms(model):
        assert (norm.weight.grad is not None) == (name in trained)
    for weight in trained.values():
        weight.add_(0.25)
    norms.save_norms(trained, tmp_path)
    fresh = models.load(make_nvfp4("qwen2"))
    assert norms.load_norms(fresh, tmp_path) == 4
    assert all(torch.equal(norm.weight, trained[name]) for name, norm in norms.named_norms(fresh) if name in trained)


def test_a_mixture_of_another_family_is_refused_by_name(tmp_path):
    transformers.Qwen2MoeConfig(num_experts=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"qwen2_moe with num_(local_)?experts=4 is a mixture of experts whose"):
        models.load(tmp_path)


def test_the_bf16_arm_refuses_a_quantized_checkpoint(make_nvfp4):
    with pytest.raises(ValueError, match="starts from the BF16 checkpoint"):
        models.load(make_nvfp4("qwen2"), quantization="bf16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can load NF4")
def test_the_nf4_arm_needs_a_gpu_and_says_so(make_bf16):
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        models.load(make_bf16("qwen2"), quantization="nf4")


def test_a_damaged_checkpoint_is_refused_before_building(make_nvfp4, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(make_nvfp4("qwen2"), folder)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(30_000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        models.load(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_nvfp4_cannot_hold_is_refused_by_name(bad, make_bf16, tmp_path):
    """Check NaN and infinite weights, which rounding would turn into ordinary numbers."""
    folder = tmp_path / "bad"
    shutil.copytree(make_bf16("qwen2"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 5] = bad
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_proj\.weight holds NaN or infinite values"):
        models.load(folder, quantization="qerl_nvfp4")
