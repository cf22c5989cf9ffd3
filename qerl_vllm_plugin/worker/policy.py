"""Hold one worker's part of the policy, and prepare its changes.

``prepare_swap`` and ``prepare_noise`` check a change and return what commits it; ``change.on_all_ranks`` runs both.
"""

import hashlib
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qerl_vllm_plugin import noise
from qerl_vllm_plugin.adapter import check
from qerl_vllm_plugin.adapter import folder as adapter_folder
from qerl_vllm_plugin.adapter.check import AdapterError, Target
from qerl_vllm_plugin.adapter.lora_slots import LoraSlots
from qerl_vllm_plugin.adapter.resident import ResidentAdapter
from qerl_vllm_plugin.compat import layers as vllm_layers
from qerl_vllm_plugin.compat import worker as vllm_worker
from qerl_vllm_plugin.wire.receiver import MappedFile
from qerl_vllm_plugin.wire.safetensors_file import Tensors
from qerl_vllm_plugin.wire.timing import Timer
from qerl_vllm_plugin.worker.change import Answer, Change, StaleVersionError, on_all_ranks
from qerl_vllm_plugin.worker.change_log import ChangeLog

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
# larger trained norm weights and sigmas are tried on some tokens before they serve; models have weights of 0.1 to 50
LARGEST_NORM = 100.0


@dataclass
class WorkerPolicy:
    """Hold one worker's part of the policy; it is kept on the worker's model.

    ``layers`` are the norm layers, and ``carrier`` holds the adapter. Both are looked up once, because the lookup takes
    longer than a swap. ``targets`` and ``sizes`` describe the linears and norms of the whole model, of which a pipeline
    rank holds a part. ``checkpoint_norms`` are this rank's norms as loaded. The noise is added to ``base_norms``, which
    are the same or trained. ``digest`` is the digest that the caller gave for the adapter.

    ``released`` is what ``kv_cache.resume`` needs, None unless the KV cache is released. ``lost`` says why this engine
    may not serve any more. ``timer`` timed the last change, and ``file`` is the mapped file of its tensors.
    ``changes`` is the log that API server processes read. ``instance`` is their name for this engine, a new one after a
    restart. ``page_words`` are words of the frozen weights, for an engine that may sleep.
    """

    model: torch.nn.Module
    layers: dict[str, torch.nn.Module]
    carrier: LoraSlots | ResidentAdapter | None
    checkpoint_norms: dict[str, torch.Tensor]
    base_norms: dict[str, torch.Tensor]
    targets: dict[str, Target]
    sizes: dict[str, int]
    checker: check.Checker = field(repr=False)
    version: int = 0
    digest: str = ""
    sigma: float = 0.0
    seed: int = 0
    rollout: int = 0
    noise_targets: tuple[str, ...] = noise.DEFAULT_TARGETS
    released: Any = field(default=None, repr=False)
    lost: str | None = None
    worker: Any = field(default=None, repr=False)
    changes: ChangeLog | None = field(default=None, repr=False)
    timer: Timer = field(default_factory=Timer, repr=False)
    file: MappedFile = field(default_factory=MappedFile, repr=False)
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    page_words: torch.Tensor | None = field(default=None, repr=False)


def most_bytes(policy: WorkerPolicy) -> int:
    """Return the bytes of the largest adapter with all norms as a safetensors file: fp32 values and a header."""
    rank = policy.carrier.max_rank if policy.carrier is not None else 0
    adapter_values = sum(rank * (target.in_features + target.out_features) for target in policy.targets.values())
    return 4 * (adapter_values + sum(policy.sizes.values())) + (1 << 20) + 1024 * len(policy.targets)


def policy_of(worker: Any) -> WorkerPolicy:
    """Return a worker's policy, which a first call on all ranks creates; raise AdapterError if one cannot hold it."""
    model = vllm_worker.model_of(worker)
    if not hasattr(model, "qerl_policy"):
        model.qerl_policy = _open(model, worker)
    model.qerl_policy.worker = worker
    return model.qerl_policy


def _open(model: torch.nn.Module, worker: Any) -> WorkerPolicy:
    """Create a policy, without ``worker`` while the model is loaded; raise AdapterError if a stage cannot hold it."""
    layers = vllm_layers.norm_layers(model)
    carrier, reason = None, None
    try:
        carrier = _carrier(model, worker)
    except AdapterError as error:
        reason = str(error)
    own = carrier.targets() if carrier is not None else {}
    stages = vllm_worker.of_all_stages((own, {name: layer.weight.numel() for name, layer in layers.items()}, reason))
    if reasons := [reason for _, _, reason in stages if reason is not None]:
        raise AdapterError(reasons[0])
    targets = {name: target for own_targets, _, _ in stages for name, target in own_targets.items()}
    sizes = {name: size for _, own_sizes, _ in stages for name, size in own_sizes.items()}
    # clones in the norms' own dtype, so that clearing the noise restores the same bits
    norms = {name: layer.weight.data.clone() for name, layer in layers.items()}
    checker = check.Checker(targets, carrier.max_rank if carrier is not None else 0)
    return WorkerPolicy(model, layers, carrier, norms, dict(norms), targets, sizes, checker)


def _carrier(model: torch.nn.Module, worker: Any) -> LoraSlots | ResidentAdapter | None:
    """Return what keeps the adapter: the layers, vLLM's LoRA slots, or None if this engine has room in neither."""
    if layers := [layer for layer in model.modules() if hasattr(layer, "policy_a")]:
        return ResidentAdapter(layers)
    manager = None if worker is None else getattr(worker.model_runner, "lora_manager", None)
    return None if manager is None else LoraSlots(manager)


def install_at_start(model: torch.nn.Module, folder: str) -> None:
    """Install a saved adapter as version 1 of a model just loaded; raise AdapterError if it is refused."""
    saved = adapter_folder.read(folder)
    policy = model.qerl_policy = _open(model, None)
    given = saved.tensors, saved.config, saved.norms, 1, saved.digest()
    answer = on_all_ranks(policy, lambda: prepare_swap(policy, *given))
    if "error" in answer:
        raise AdapterError(f"{folder}: {answer['error']}")


def prepare_swap(
    policy: WorkerPolicy,
    tensors: Tensors | None,
    config: Any,
    norms: Tensors | None,
    version: int | None,
    digest: str,
    fetch: check.Fetch | None = None,
) -> Change:
    """Prepare the installation of an adapter and norms, as ``qerl_swap`` (methods.py) describes it.

    ``fetch`` copies tensors, or parts of them, to the device; it is needed for tensors on the meta device. Raises
    AdapterError for a refused adapter, and StaleVersionError for a version that is not newer.
    """
    if version is None:
        version = policy.version + 1
    elif version == policy.version and digest == policy.digest and (digest or tensors is norms is None):
        return Change(lambda: {"version": policy.version, "unchanged": True})
    elif version <= policy.version:
        raise StaleVersionError(f"version {version} is not newer than {policy.version}, which is served")
    checked = None
    if tensors is not None:
        if policy.carrier is None:
            raise AdapterError(NO_CARRIER)
        if not isinstance(config, Mapping):
            raise AdapterError(f"the adapter's config is {type(config).__name__}; it must be an object")
        checked = policy.checker.check(tensors, config, fetch)
        policy.timer.end("check")
    staged: Any = None
    is_doubtful = False
    if policy.carrier is not None:
        policy.carrier.prepare()
        staged = policy.carrier.stage(checked)
        # FP16's range is so small that an adapter of any size may exceed it
        is_half = checked is not None and policy.carrier.dtype == torch.float16
        is_doubtful = is_half or staged.strength > check.STRENGTH
    base, largest = _trained(policy, norms)
    values = None
    if any(norm is not policy.base_norms[name] for name, norm in base.items()):
        values = _norm_values(base, policy.sigma, policy.seed, policy.rollout, policy.noise_targets)

    def commit() -> Answer:
        if policy.carrier is not None:
            policy.carrier.commit(staged)
        if values is not None:
            _write_norms(policy, values)
            policy.base_norms = base
        policy.version, policy.digest = version, digest
        return {"version": version, "modules": len(checked.pairs) if checked else 0}

    return Change(commit, is_doubtful or largest > LARGEST_NORM)


def prepare_noise(policy: WorkerPolicy, sigma: Any, seed: Any, rollout: Any, targets: list[str]) -> Change:
    """Prepare the noise, as ``qerl_set_noise`` describes it; raise AdapterError or ValueError for unusable values."""
    sigma, seed, rollout, targets = noise.checked(sigma, seed, rollout, targets)
    # sigma 0 clears the noise and needs no target
    names = sorted(noise.targeted(policy.sizes, targets)) if sigma or targets else []
    values = _norm_values(policy.base_norms, sigma, seed, rollout, targets)

    def commit() -> Answer:
        _write_norms(policy, values)
        policy.sigma, policy.seed, policy.rollout, policy.noise_targets = sigma, seed, rollout, tuple(targets)
        own = [name for name in names if name in policy.layers]
        noisy_norms = len(names) if sigma else 0
        # "touched" is the older name of noisy_norms, for clients of the release before
        return {"noisy_norms": noisy_norms, "touched": noisy_norms, "swallowed": _swallowed(policy, own)}

    return Change(commit, sigma > LARGEST_NORM)


def check_one_policy(policy: WorkerPolicy, change: str, every_request_names_the_policy: bool) -> None:
    """Raise AdapterError for a change that would affect requests for the base or another adapter.

    With LoRA slots such requests may come, unless the caller promises that every request names the policy.
    """
    # accept True alone: a server passes on whatever JSON holds, and the text "false" is truthy
    if isinstance(policy.carrier, LoraSlots) and every_request_names_the_policy is not True:
        raise AdapterError(change + SEVERAL_NAMES)


def _trained(policy: WorkerPolicy, trained: Tensors | None) -> tuple[dict[str, torch.Tensor], float]:
    """Return the norms that noise is added to, and the largest absolute value of a trained weight.

    The norms are the checkpoint's, with the ``trained`` ones in their place. Raises AdapterError for a trained
    norm that does not fit the model or is not finite in its dtype.
    """
    norms, sizes = dict(policy.checkpoint_norms), []
    for name, tensor in (trained or {}).items():
        size = policy.sizes.get(name)
        if size is None:
            raise AdapterError(f"trained norm {name} is no norm of this model; was it trained on another base?")
        if tuple(tensor.shape) != (size,):
            raise AdapterError(f"trained norm {name} has shape {tuple(tensor.shape)}, not {(size,)}")
        if tensor.dtype not in check.DTYPES:
            raise AdapterError(f"trained norm {name} is {tensor.dtype}; use float32, bfloat16 or float16")
        if (present := norms.get(name)) is not None:
            norms[name] = tensor.to(present, copy=True)
            sizes.append((name, norms[name].abs().amax()))
    largest = torch.stack([size for _, size in sizes]).tolist() if sizes else []
    for (name, _), size in zip(sizes, largest, strict=True):
        if not math.isfinite(size):
            dtype = norms[name].dtype
            raise AdapterError(f"trained norm {name} holds NaN or infinite values, or values too large for {dtype}")
    return norms, max(largest, default=0.0)


def _norm_values(
    base: dict[str, torch.Tensor], sigma: float, seed: int, rollout: int, targets: Any
) -> dict[str, torch.Tensor]:
    """Return the values of all norms: ``base``, plus noise on the targets."""
    targeted = {name: norm for name, norm in base.items() if sigma and noise.is_target(name, targets)}
    return {**base, **noise.all_noisy(targeted, sigma, seed, rollout)}


def _write_norms(policy: WorkerPolicy, values: dict[str, torch.Tensor]) -> None:
    """Write the norms in place, because compiled graphs and CUDA graphs hold their addresses."""
    if values:
        torch._foreach_copy_([policy.layers[name].weight.data for name in values], list(values.values()))


def _swallowed(policy: WorkerPolicy, names: list[str]) -> float:
    """Return the share of noisy weights that rounding to the norm's dtype left unchanged; 0 for fp32 norms."""
    weights = {name: policy.layers[name].weight.data for name in names}
    if not policy.sigma or all(weight.dtype == torch.float32 for weight in weights.values()):
        return 0.0
    same = sum(int((weight == policy.base_norms[name]).sum()) for name, weight in weights.items())
    return same / sum(weight.numel() for weight in weights.values())


def digest_of(tensors: Any) -> str:
    """Return the SHA-256 of the tensors' bits, in their order."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return sha.hexdigest()
