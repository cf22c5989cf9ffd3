"""The adapter in the trainer's model: its parameters, and its arithmetic under BF16 autocast.

PEFT writes y + scaling * (x A^T) B^T as a cast of x to the fp32 of A (which autocast takes back), two products, a
multiplication and a sum. Here the second product adds itself to y: one pass over y instead of three, one rounding
instead of three, and no copy of x in fp32.
"""

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from peft.utils import get_peft_model_state_dict

ADAPTER = "default"  # PEFT's name of the adapter that is trained


class FusedLora(LoraVariant):
    """How PEFT's linear layers apply a plain LoRA adapter, where activations are what autocast makes them."""

    @staticmethod
    def init(module: LoraLayer, adapter_name: str) -> None:
        """Nothing to add to a plain adapter."""

    @staticmethod
    def merge_safe(module: LoraLayer, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        """As PEFT merges a plain adapter."""
        return orig_weight.clone().add_(module.get_delta_weight(active_adapter))

    @staticmethod
    def merge_unsafe(module: LoraLayer, active_adapter: str, orig_weight: torch.Tensor) -> None:
        """As PEFT merges a plain adapter, in place."""
        orig_weight.data += module.get_delta_weight(active_adapter)

    @staticmethod
    def unmerge(module: LoraLayer, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        """What is left without the adapter."""
        return orig_weight.clone().sub_(module.get_delta_weight(active_adapter))

    @staticmethod
    def forward(
        module: LoraLayer, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        """``x: (..., K)``, ``result: (..., N)`` of the frozen layer -> ``result`` + scaling * (x A^T) B^T."""
        lora_A, lora_B = module.lora_A[active_adapter], module.lora_B[active_adapter]
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(lora_A.weight.dtype)
        hidden = lora_A(module.lora_dropout[active_adapter](x))
        flat = result.reshape(-1, result.shape[-1]).to(hidden.dtype)
        rows = hidden.reshape(-1, hidden.shape[-1])
        total = torch.addmm(flat, rows, lora_B.weight.t(), alpha=module.scaling[active_adapter])
        return total.to(result.dtype).view_as(result)


def install(model: torch.nn.Module, adapter: str) -> int:
    """Let every plain LoRA layer of ``model`` compute ``adapter`` this way from now on -> how many layers.

    Without autocast the activations are cast to the dtype of the adapter, as by PEFT. Layers with DoRA, a bias or any
    other variant of PEFT's stay as they are.
    """
    found = 0
    for module in model.modules():
        if not isinstance(module, LoraLayer) or adapter not in module.lora_A:
            continue
        if adapter in module.lora_variant or module.lora_bias[adapter]:
            continue
        module.lora_variant[adapter] = FusedLora()
        module.cast_input_dtype_enabled = False
        found += 1
    return found


def parameters(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """The trained adapter's parameters, by PEFT's names of them in a state dict.

    They are the same objects for the whole training: to ask PEFT anew for each swap takes it several walks through the
    model, 50 ms for one of 28 layers.
    """
    named = dict(model.named_parameters())
    names = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    return {name: named[f"{name.removesuffix('weight')}{ADAPTER}.weight"] for name in names}
