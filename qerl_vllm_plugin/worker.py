"""What runs inside each vLLM worker: stage and commit an adapter, set and clear the noise, tell the state.

``collective_rpc`` calls these by name with the worker as ``self``. Refusals are returned as ``{"error": text}`` rather
than raised: vLLM stops reading at the first rank that has raised, and takes what the other ranks answered for the
answers to its next call.
"""

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qerl_vllm_plugin import adapter, compat, noise
from qerl_vllm_plugin.adapter import AdapterError, NoCarrierError, Staged
from qerl_vllm_plugin.lora_slots import LoraSlots
from qerl_vllm_plugin.resident import ResidentAdapter

METHODS = ("qerl_open", "qerl_stage", "qerl_commit", "qerl_discard", "qerl_set_noise", "qerl_state")

NO_CARRIER = (
    "this engine has no room for an adapter; start it with enable_lora=True, max_lora_rank=R, or with "
    'additional_config={"qerl": {"policy_adapter": {"rank": R}}}'
)

SEVERAL_NAMES = (
    " would change every answer of this engine. It has LoRA slots, so a request may ask for the base's own name or for "
    "another adapter, and would be answered with that change. Serve with --quantization qerl_nvfp4 --additional-config "
    """'{"qerl": {"policy_adapter": {"rank": R}}}' instead of --enable-lora: such a server has one name. Only a """
    "program that alone sends requests, each with the policy's LoRARequest, may pass "
    "every_request_names_the_policy=True"
)

Tensors = Mapping[str, torch.Tensor]


@dataclass
class Resident:
    """What one worker holds of the policy.

    ``layers`` and ``carrier`` are where norms and adapter lie, looked up once: it takes longer than a swap.
    ``checkpoint_norms`` are the norms as loaded, ``base_norms`` those that the noise is added to: the same, or trained.
    ``checker`` is there from the first adapter on.
    ``released`` is what brings the memory of the KV cache back, None while the cache has it.
    """

    layers: dict[str, torch.nn.Module]
    carrier: LoraSlots | ResidentAdapter | None
    checkpoint_norms: dict[str, torch.Tensor]
    base_norms: dict[str, torch.Tensor]
    version: int = 0
    sigma: float = 0.0
    seed: int = 0
    rollout: int = 0
    targets: tuple[str, ...] = noise.DEFAULT_TARGETS
    checker: adapter.Checker | None = field(default=None, repr=False)
    staged: tuple[Staged, dict[str, torch.Tensor]] | None = field(default=None, repr=False)
    released: Any = field(default=None, repr=False)


def resident_of(worker: Any) -> Resident:
    if not hasattr(worker, "_qerl_resident"):
        layers = compat.norm_layers(worker)
        # clones in the dtype they have, so that clearing the noise gives back the very same bits
        norms = {name: layer.weight.data.clone() for name, layer in layers.items()}
        worker._qerl_resident = Resident(layers, _carrier(worker), norms, dict(norms))
    return worker._qerl_resident


def _carrier(worker: Any) -> LoraSlots | ResidentAdapter | None:
    """Where this worker keeps the adapter: in the layers, in vLLM's LoRA slots, or nowhere."""
    for kind in (ResidentAdapter, LoraSlots):
        with contextlib.suppress(NoCarrierError):
            return kind(worker)
    return None


def qerl_open(self: Any) -> dict[str, Any]:
    """Prepares this worker for a policy; idempotent."""
    resident = resident_of(self)
    carrier = resident.carrier
    try:
        if carrier is not None:
            carrier.prepare()
    except AdapterError as error:
        return {"error": str(error)}
    kind = {LoraSlots: "lora", ResidentAdapter: "resident"}.get(type(carrier))
    return {
        "carrier": kind,
        "norms": len(resident.base_norms),
        "version": resident.version,
        "is_released": resident.released is not None,
    }


@torch.no_grad()
def qerl_stage(
    self: Any,
    tensors: Tensors | bytes | None,
    config: Mapping[str, Any],
    norms: Tensors | bytes | None,
    every_request_names_the_policy: bool = False,
) -> dict[str, Any]:
    """Checks a whole adapter and its norms and makes converted copies; nothing that serves requests changes.

    Trained norms for LoRA slots are refused unless the caller vouches that ``every_request_names_the_policy``.
    """
    resident = resident_of(self)
    resident.staged = None
    try:
        if norms:
            _check_one_policy(resident, "trained norms", every_request_names_the_policy)
        staged_norms = _check_norms(_unpack(norms), resident)
        staged: Staged = {}
        carrier = resident.carrier
        if carrier is not None:
            carrier.prepare()
        if tensors is not None:
            if carrier is None:
                raise AdapterError(NO_CARRIER)
            if resident.checker is None:
                resident.checker = adapter.Checker(carrier.targets(), carrier.max_rank)
            checked = resident.checker.check(_unpack(tensors) or {}, config)
            # new tensors: vLLM scales B in place, and the caller's tensors must stay as they are
            for name, pair in adapter.converted(checked, carrier.dtype).items():
                target = resident.checker.targets[name]
                staged.setdefault(target.module, {})[target.part] = pair
    except AdapterError as error:
        return {"error": str(error)}
    except torch.OutOfMemoryError:
        return {"error": "out of GPU memory while staging the adapter; lower gpu_memory_utilization. Nothing changed"}
    resident.staged = (staged, staged_norms)
    return {"modules": sum(len(parts) for parts in staged.values())}


@torch.no_grad()
def qerl_commit(self: Any, version: int) -> dict[str, Any]:
    """Makes what was staged the policy, in place."""
    resident = resident_of(self)
    if resident.staged is None:
        return {"error": "nothing is staged in this worker; stage the adapter first"}
    staged, norms = resident.staged
    resident.staged = None
    if resident.carrier is not None:
        resident.carrier.write(staged)
    if any(norm is not resident.base_norms[name] for name, norm in norms.items()):
        resident.base_norms = norms
        _write_norms(resident)
    resident.version = version
    return {"version": version}


def qerl_discard(self: Any) -> dict[str, Any]:
    """Forgets what was staged."""
    resident_of(self).staged = None
    return {}


@torch.no_grad()
def qerl_set_noise(
    self: Any,
    sigma: float,
    seed: int,
    rollout: int,
    targets: list[str],
    every_request_names_the_policy: bool = False,
) -> dict[str, Any]:
    """Sets the norms to base + sigma * z(seed, rollout, name); sigma 0 restores the base bit for bit.

    Noise beside LoRA slots is refused unless the caller vouches that ``every_request_names_the_policy``.
    """
    resident = resident_of(self)
    try:
        sigma = noise.check_sigma(sigma)
        if sigma:
            _check_one_policy(resident, f"noise of sigma {sigma:g}", every_request_names_the_policy)
        # no noise is what clears it, and needs no target
        names = sorted(noise.targeted(resident.base_norms, targets)) if sigma or targets else []
    except ValueError as error:
        return {"error": str(error)}
    resident.sigma, resident.seed, resident.rollout, resident.targets = sigma, seed, rollout, tuple(targets)
    _write_norms(resident)
    return {"touched": len(names) if sigma else 0, "swallowed": _swallowed(resident, names)}


def qerl_state(self: Any, digest: bool = False) -> dict[str, Any]:
    """Version and noise of this worker; with ``digest`` a SHA-256 over norms and adapter buffers as they are now."""
    resident = resident_of(self)
    state = {key: getattr(resident, key) for key in ("version", "sigma", "seed", "rollout")}
    state["targets"] = list(resident.targets)
    if digest:
        norms = [layer.weight.data for _, layer in sorted(resident.layers.items())]
        state["norms"] = _digest(norms)
        state["adapter"] = _digest(resident.carrier.buffers()) if resident.carrier is not None else ""
    return state


def _check_one_policy(resident: Resident, change: str, every_request_names_the_policy: bool) -> None:
    """Raises AdapterError for a change to all answers where some may be another policy's, unless the caller vouches."""
    # nothing but True: a server passes on whatever JSON holds, and the text "false" is true
    if isinstance(resident.carrier, LoraSlots) and every_request_names_the_policy is not True:
        raise AdapterError(change + SEVERAL_NAMES)


def _unpack(tensors: Tensors | bytes | None) -> Tensors | None:
    if isinstance(tensors, bytes | bytearray | memoryview):
        from safetensors.torch import load

        return load(bytes(tensors))
    return tensors


def _check_norms(given: Tensors | None, resident: Resident) -> dict[str, torch.Tensor]:
    """The norms that the noise will be added to: the checkpoint's, with the trained ones in their place."""
    norms = dict(resident.checkpoint_norms)
    for name, tensor in (given or {}).items():
        present = norms.get(name)
        if present is None:
            raise AdapterError(f"trained norm {name} is no norm of this model; was it trained on another base?")
        if tensor.shape != present.shape:
            raise AdapterError(f"trained norm {name} has shape {tuple(tensor.shape)}, not {tuple(present.shape)}")
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"trained norm {name} holds NaN or infinite values")
        norms[name] = tensor.to(present, copy=True)
    return norms


def _write_norms(resident: Resident) -> None:
    """In place: compiled graphs and CUDA graphs hold the addresses."""
    values = []
    for name, base in resident.base_norms.items():
        if resident.sigma and noise.is_target(name, resident.targets):
            base = noise.noisy(base, resident.sigma, resident.seed, resident.rollout, name)
        values.append(base)
    weights = [resident.layers[name].weight.data for name in resident.base_norms]
    if weights:
        torch._foreach_copy_(weights, values)


def _swallowed(resident: Resident, names: list[str]) -> float:
    """Share of noisy weights that rounding to the norm's dtype left unchanged; 0 for fp32 norms."""
    weights = {name: resident.layers[name].weight.data for name in names}
    if not resident.sigma or all(weight.dtype == torch.float32 for weight in weights.values()):
        return 0.0
    same = sum(int((weight == resident.base_norms[name]).sum()) for name, weight in weights.items())
    return same / sum(weight.numel() for weight in weights.values())


def _digest(tensors: Any) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return sha.hexdigest()
