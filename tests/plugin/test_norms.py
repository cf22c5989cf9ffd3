"""Test which computation a norm uses on each kind of device: the plugin's under qerl_nvfp4, and vLLM's own
elsewhere."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from qerl_vllm_plugin import norms
from qerl_vllm_plugin.norms import QerlGemmaRMSNorm, QerlRMSNorm


@pytest.fixture(params=[(QerlRMSNorm, RMSNorm), (QerlGemmaRMSNorm, GemmaRMSNorm)], ids=["w", "1 + w"])
def kinds(request):
    return request.param


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("name", ["forward_native", "forward_cuda", "forward_xpu"])
def test_our_norm_is_fp32_everywhere_and_vllms_is_left_alone(kinds, name, ours, monkeypatch):
    own, stock = kinds
    monkeypatch.setattr(norms, "_is_ours", lambda: ours)
    monkeypatch.setattr(stock, name, lambda self, x, residual=None: ("vllm's", x, residual), raising=False)
    with set_current_vllm_config(VllmConfig()):
        norm = own(8).bfloat16() if not ours else own(8)
    generator = torch.Generator().manual_seed(0)
    norm.weight.data.copy_(torch.randn(8, generator=generator))
    x, residual = (torch.randn(3, 8, generator=generator).bfloat16() for _ in range(2))
    if not ours:
        assert getattr(norm, name)(x, residual) == ("vllm's", x, residual) and norm.weight.dtype == torch.bfloat16
        return
    assert norm.weight.dtype == torch.float32 and not norm.weight.requires_grad
    total = x + residual
    factor = norm.weight.double() + (own is QerlGemmaRMSNorm)
    for given, of in (((x,), x), ((x, residual), total)):
        exact = of.double() * torch.rsqrt(of.double().square().mean(-1, keepdim=True) + 1e-6) * factor
        found = getattr(norm, name)(*given)
        y = found if len(given) == 1 else found[0]
        assert (y == exact.bfloat16()).double().mean() > 0.95 and y.dtype == torch.bfloat16
        assert len(given) == 1 or torch.equal(found[1], total)


def test_a_norm_over_a_part_of_its_input_is_refused(monkeypatch):
    monkeypatch.setattr(norms, "_is_ours", lambda: True)
    with (
        set_current_vllm_config(VllmConfig()),
        pytest.raises(ValueError, match=r"a part of its input \(4 of 8 channels\)"),
    ):
        QerlRMSNorm(8, var_hidden_size=4)
    with set_current_vllm_config(VllmConfig()):
        assert not QerlRMSNorm(8, has_weight=False).is_fp32
