"""The policy adapter in vLLM's LoRA slots (``--enable-lora``): everything that depends on that part of vLLM."""

from collections.abc import Iterator
from typing import Any

import torch

from qerl_vllm_plugin import compat
from qerl_vllm_plugin.adapter import AdapterError, NoCarrierError, Staged, Target

ADAPTER_ID = 1  # the LoRA id that the policy uses in every engine


class LoraSlots:
    """One slot of vLLM's LoRA buffers, as the adapter's carrier."""

    def __init__(self, worker: Any) -> None:
        """Raises NoCarrierError if the engine was started without LoRA."""
        manager = getattr(worker.model_runner, "lora_manager", None)
        if manager is None:
            raise NoCarrierError("this engine was started without LoRA")
        self._manager = manager._adapter_manager
        self.max_rank: int = self._manager.lora_config.max_lora_rank
        self.dtype: torch.dtype = self._manager.lora_config.lora_dtype

    def prepare(self) -> None:
        """Registers and pins an empty adapter, so that vLLM never looks for the policy on disk or evicts it.

        Raises AdapterError if the id belongs to another adapter.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        manager = self._manager
        if ADAPTER_ID in manager.list_adapters():
            if getattr(manager.get_adapter(ADAPTER_ID), "is_qerl_policy", False):
                return
            raise AdapterError(
                f"LoRA id {ADAPTER_ID} is already in use in this engine; the policy adapter needs it. Start the engine "
                "without --lora-modules"
            )
        # vLLM wants at least one layer in an adapter; this one is zero
        name, layer = next((name, layer) for name, layer in self._linears().items() if layer.n_slices == 1)
        a = torch.zeros(1, getattr(layer.base_layer, "input_size", layer.input_size), dtype=self.dtype)
        b = torch.zeros(layer.base_layer.output_size, 1, dtype=self.dtype)
        empty = LoRAModel(ADAPTER_ID, rank=1, loras={name: LoRALayerWeights(name, 1, 1, a, b)})
        empty.is_qerl_policy = True
        manager.add_adapter(empty)
        manager.activate_adapter(ADAPTER_ID)
        manager.pin_adapter(ADAPTER_ID)

    def targets(self) -> dict[str, Target]:
        """Every linear that can carry an adapter, by its checkpoint name; sizes are those of all ranks together."""
        packed = self._manager.packed_modules
        found: dict[str, Target] = {}
        for name, layer in self._linears().items():
            base = layer.base_layer
            parts = packed.get(name) or [name]
            inputs = getattr(base, "input_size", layer.input_size)
            for i, (part, outputs) in enumerate(zip(parts, compat.output_sizes(base, len(parts)), strict=True)):
                found[part] = Target(name, i, inputs, outputs)
        return found

    def write(self, staged: Staged) -> None:
        """Copies staged (A, B) into the slot of every layer, in place; layers that are not staged become zero.

        vLLM's own setter cuts out this rank's share.
        """
        slot = self._slot()
        for name, layer in self._linears().items():
            parts = staged.get(name)
            if parts is None:
                layer.reset_lora(slot)
            elif layer.n_slices == 1:
                layer.set_lora(slot, *parts[0])
            else:
                pairs = [parts.get(i, (None, None)) for i in range(layer.n_slices)]
                layer.set_lora(slot, [a for a, _ in pairs], [b for _, b in pairs])

    def buffers(self) -> Iterator[torch.Tensor]:
        """This rank's A and B of the slot, in a fixed order."""
        slot = self._slot()
        for _, layer in sorted(self._linears().items()):
            for stacked in (*layer.lora_a_stacked, *layer.lora_b_stacked):
                yield stacked[slot]

    def _slot(self) -> int:
        if ADAPTER_ID not in self._manager.lora_index_to_id:
            raise AdapterError(
                "vLLM has dropped the policy adapter's slot (were weights reloaded?); swap the adapter again"
            )
        return self._manager.lora_index_to_id.index(ADAPTER_ID)

    def _linears(self) -> dict[str, Any]:
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

        modules = self._manager.modules
        return {name: layer for name, layer in modules.items() if isinstance(layer, BaseLinearLayerWithLoRA)}
