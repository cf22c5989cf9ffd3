"""Keep the policy's adapter in one of vLLM's LoRA slots (``--enable-lora``).

Everything here that carries the policy through vLLM's LoRA manager depends on vLLM's internals.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from qerl_vllm_plugin.adapter.check import AdapterError, CheckedAdapter, Target, converted
from qerl_vllm_plugin.compat import layers as vllm_layers

# the policy's LoRA id in every engine: the largest that vLLM can hold, since vLLM counts its own ids up from 1
ADAPTER_ID = 2**31 - 1
SCHEME = "qerl://"  # prefix of the path in the policy's LoRARequest; that path is never opened


@dataclass
class Staged:
    """Hold a staged change: module -> part -> (A, B), B scaled, in ``parts``, and the ``strength`` of ``Converted``."""

    parts: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    strength: float = 0.0


class LoraSlots:
    """Keep the adapter in one slot of vLLM's LoRA buffers."""

    def __init__(self, manager: Any) -> None:
        """Take the LoRA manager of a worker's model runner."""
        self._worker_manager, self._manager = manager, manager._adapter_manager
        self.max_rank: int = self._manager.lora_config.max_lora_rank
        self.dtype: torch.dtype = self._manager.lora_config.lora_dtype

    def _keep_others_out(self) -> None:
        """Refuse from now on another adapter under the policy's LoRA id, or that the policy leaves no slot for.

        vLLM knows adapters by their id alone, and would answer a foreign request under this one with the policy.
        """
        add = self._worker_manager.add_adapter

        def add_checked(request: Any) -> bool:
            if request.lora_int_id == ADAPTER_ID and not request.lora_path.startswith(SCHEME):
                raise AdapterError(
                    f"LoRA id {ADAPTER_ID} belongs to the policy; give the adapter {request.lora_name!r} another one"
                )
            if request.lora_int_id != ADAPTER_ID and self._manager.lora_slots == 1:
                raise AdapterError(
                    f"the policy holds this engine's only LoRA slot, so the adapter {request.lora_name!r} has none; "
                    "start the engine with max_loras=2, max_cpu_loras=2 or more"
                )
            return add(request)

        self._worker_manager.add_adapter = add_checked

    def prepare(self) -> None:
        """Pin an empty adapter, so that vLLM neither reads nor evicts ours."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        manager = self._manager
        if ADAPTER_ID in manager.list_adapters():
            return
        # vLLM wants at least one layer in an adapter, so one gets an adapter of zeros
        name, layer = next((name, layer) for name, layer in self._linears().items() if layer.n_slices == 1)
        a = torch.zeros(1, getattr(layer.base_layer, "input_size", layer.input_size), dtype=self.dtype)
        b = torch.zeros(layer.base_layer.output_size, 1, dtype=self.dtype)
        empty = LoRAModel(ADAPTER_ID, rank=1, loras={name: LoRALayerWeights(name, 1, 1, a, b)})
        manager.add_adapter(empty)
        manager.activate_adapter(ADAPTER_ID)
        manager.pin_adapter(ADAPTER_ID)
        self._keep_others_out()

    def targets(self) -> dict[str, Target]:
        """Return every linear that can carry an adapter by its checkpoint name, with its sizes before it is cut."""
        packed = self._manager.packed_modules
        targets: dict[str, Target] = {}
        for name, layer in self._linears().items():
            base = layer.base_layer
            parts = packed.get(name) or [name]
            inputs = getattr(base, "input_size", layer.input_size)
            for i, (part, outputs) in enumerate(zip(parts, vllm_layers.output_sizes(base, len(parts)), strict=True)):
                targets[part] = Target(name, i, inputs, outputs)
        return targets

    def stage(self, adapter: CheckedAdapter | None) -> Staged:
        """Put the whole (A, B) on the device; vLLM's setter cuts out this tensor-parallel rank's share itself."""
        self._slot()
        staged = Staged()
        if adapter is not None:
            targets = self.targets()
            own = {name: pair for name, pair in adapter.pairs.items() if name in targets}
            device = next(iter(self._linears().values())).lora_a_stacked[0].device
            new = converted(CheckedAdapter(adapter.rank, adapter.scaling, own, adapter.fetch), self.dtype, device)
            staged.strength = new.strength
            for name, pair in new.items():
                staged.parts.setdefault(targets[name].module, {})[targets[name].part] = pair
        return staged

    def commit(self, staged: Staged) -> None:
        """Copy the staged (A, B) into the slot of every layer, in place; set layers that are not staged to zero."""
        slot = self._slot()
        for name, layer in self._linears().items():
            parts = staged.parts.get(name)
            if parts is None:
                layer.reset_lora(slot)
            elif layer.n_slices == 1:
                layer.set_lora(slot, *parts[0])
            else:
                pairs = [parts.get(i, (None, None)) for i in range(layer.n_slices)]
                layer.set_lora(slot, [a for a, _ in pairs], [b for _, b in pairs])

    @contextmanager
    def answering(self, tokens: int) -> Iterator[None]:
        """Apply the policy's adapter to a forward of ``tokens`` tokens that vLLM's scheduler does not know of."""
        from vllm.lora.layers import LoRAMapping

        mapping = LoRAMapping((ADAPTER_ID,) * tokens, (ADAPTER_ID,) * tokens, is_prefill=True)
        self._manager.set_adapter_mapping(mapping)
        yield

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield this rank's A and B of the slot, in a fixed order."""
        slot = self._slot()
        for _, layer in sorted(self._linears().items()):
            for stacked in (*layer.lora_a_stacked, *layer.lora_b_stacked):
                yield stacked[slot]

    def _slot(self) -> int:
        return self._manager.lora_index_to_id.index(ADAPTER_ID)

    def _linears(self) -> dict[str, Any]:
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

        modules = self._manager.modules
        return {name: layer for name, layer in modules.items() if isinstance(layer, BaseLinearLayerWithLoRA)}
