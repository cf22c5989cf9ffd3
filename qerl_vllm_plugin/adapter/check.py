"""Check the names, shapes, rank, dtype and values of a whole LoRA adapter before any of it is used.

The layout is PEFT's. ``config`` is the content of ``adapter_config.json``; tensors are named
``base_model.model.<module>.lora_A.weight: (r, in)`` and ``.lora_B.weight: (out, r)``.
"""

import json
import math
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from qerl_vllm_plugin.wire.safetensors_file import Tensors
from qerl_vllm_plugin.wire.spans import Fetch

PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
MAX_ALPHA = 1e6  # a hundred thousand times the values used in training
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# An adapter of at most this strength cannot overflow. An MLP multiplies the outputs of gate and up and then applies
# down. If all three stretch their inputs by 1e4, a norm's output of size 1e3 becomes 1e18 at worst. The next norm can
# still square that in fp32. Adapters in training have a strength of 1 to 1000.
STRENGTH = 1e4

# keys of adapter_config.json that a plain low-rank update cannot express; each value tells the user what to do instead
_UNSUPPORTED = {
    "use_dora": "train without DoRA",
    "lora_bias": "train with lora_bias=False",
    "modules_to_save": "train with modules_to_save=None; trained norms travel beside the adapter",
    "rank_pattern": "use one rank for all modules",
    "alpha_pattern": "use one lora_alpha for all modules",
    "layer_replication": "use a base model that has these layers",
    "target_parameters": "name modules in target_modules",
    "trainable_token_indices": "leave the embeddings frozen",
    "fan_in_fan_out": "train an adapter of torch.nn.Linear layers",
    "megatron_config": "export the adapter in PEFT's layout",
    **dict.fromkeys(
        ("use_qalora", "alora_invocation_tokens", "arrow_config", "monteclora_config", "use_bdlora", "kasa_config"),
        "train a plain LoRA adapter",
    ),
}
# keys that a plain low-rank update needs, then keys that only say where it comes from or how it was trained
_KNOWN = {
    *("peft_type", "bias", "init_lora_weights", "r", "lora_alpha", "use_rslora"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    *("runtime_config", "megatron_core", "qalora_group_size", "ensure_weight_tying", "merge_weights"),
}
_UNKNOWN = (
    "what it does to the product is not known here: train without it, or delete it from adapter_config.json if it does "
    "nothing"
)
# initializations that leave the base weights unchanged; others (pissa, olora, corda, loftq) change them
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


class AdapterError(ValueError):
    """Report an adapter that cannot be installed; nothing has been changed."""


@dataclass(frozen=True)
class Target:
    """Name the place in the engine for the adapter of one linear of the checkpoint: part ``part`` of ``module``."""

    module: str
    part: int
    in_features: int
    out_features: int


@dataclass(frozen=True)
class CheckedAdapter:
    """Hold an adapter that fits the model.

    ``pairs`` maps checkpoint module names to (A: (r, in), B: (out, r)), which are the caller's tensors. Where their
    memory belongs to another process, ``fetch`` reads them or parts of them.
    """

    rank: int
    scaling: float
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    fetch: Fetch | None = None


class Checker:
    """Run ``check`` for one engine, and remember the last adapter that passed.

    An adapter with the same config, names, shapes and dtypes is not checked name by name again. A policy in training
    sends the same hundreds of names each time.
    """

    def __init__(self, targets: Mapping[str, Target], max_rank: int) -> None:
        """Take the engine's linears and its largest rank, as in ``check``."""
        self.targets, self._max_rank = targets, max_rank
        self._known: tuple[tuple[Any, ...], int, float, list[tuple[str, str, str]]] | None = None  # the last good one

    def check(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], fetch: Fetch | None = None
    ) -> CheckedAdapter:
        """Return the checked adapter. Raises AdapterError."""
        layout = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        key = (json.dumps(config, sort_keys=True, default=str), layout)
        if self._known is None or key != self._known[0]:
            checked = check(tensors, config, self.targets, self._max_rank)
            names = [(name, f"{PREFIX}{name}{_A}", f"{PREFIX}{name}{_B}") for name in checked.pairs]
            self._known = key, checked.rank, checked.scaling, names
        _, rank, scaling, names = self._known
        return CheckedAdapter(rank, scaling, {name: (tensors[a], tensors[b]) for name, a, b in names}, fetch)


def check(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    targets: Mapping[str, Target],
    max_rank: int,
) -> CheckedAdapter:
    """Return the adapter if it has tensors that fit for exactly the modules and layers that ``config`` names.

    The values are not checked here; ``converted`` checks them. ``targets`` are the engine's linears by their checkpoint
    names. Raises AdapterError.
    """
    rank, scaling = check_config(config, max_rank)
    expected = named_modules(config, targets)
    pairs = _pair_up(tensors)
    if missing := sorted(expected - pairs.keys()):
        raise AdapterError(
            f"the adapter's config names {first_of(missing)}, but its tensors are missing; save the whole adapter again"
        )
    if extra := sorted(pairs.keys() - expected):
        raise AdapterError(
            f"the adapter has tensors for {first_of(extra)}, which this model does not have or "
            "the adapter's target_modules do not name; was it trained on another base?"
        )
    return CheckedAdapter(rank, scaling, {name: _checked(name, pairs[name], targets[name], rank) for name in expected})


def named_modules(config: Mapping[str, Any], targets: Collection[str]) -> set[str]:
    """Return the engine's linears that ``target_modules``, ``exclude_modules`` and ``layers_to_transform`` select.

    PEFT's rules hold: a list matches whole names or their ends, a string is a regular expression for the whole name.
    Raises AdapterError if a key is malformed, if an entry of the ``target_modules`` list names no linear that can carry
    an adapter, or if no linear is selected.
    """
    selected, excluded = config.get("target_modules"), config.get("exclude_modules")
    for key, value in (("target_modules", selected), ("exclude_modules", excluded)):
        _check_patterns(key, value)
    _check_patterns("layers_pattern", config.get("layers_pattern"), always_regular=True)
    if not selected:
        raise AdapterError("the adapter's config has no target_modules; nothing would be adapted")
    if not isinstance(selected, str):
        for entry in selected:
            if not any(_matches(name, [entry]) for name in targets):
                raise AdapterError(
                    f"target_modules names {entry!r}, which is no linear layer of this model that can carry an "
                    f"adapter (embeddings and lm_head cannot); those that can end in {_endings(targets)}"
                )
    layers = config.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers or None
    is_list = isinstance(layers, list | tuple | set) and all(isinstance(layer, int) for layer in layers)
    if layers is not None and not is_list:
        raise AdapterError(f"layers_to_transform is {layers!r}; it must be a whole number or a list of them")
    names = {
        name
        for name in targets
        if _matches(name, selected)
        and not (excluded and _matches(name, excluded))
        and (layers is None or _layer(name, config.get("layers_pattern")) in layers)
    }
    if not names:
        raise AdapterError(
            f"target_modules {selected!r:.200} names no linear layer of this model that exclude_modules "
            f"{excluded!r} and layers_to_transform {layers!r} leave; those that can carry an adapter end in "
            f"{_endings(targets)}"
        )
    return names


def _check_patterns(key: str, value: Any, *, always_regular: bool = False) -> None:
    """Raise AdapterError unless ``value`` is None, a regular expression or a list of names.

    With ``always_regular`` the entries of a list must be regular expressions, too.
    """
    entries = [value] if isinstance(value, str) else value or []
    if not isinstance(entries, list | tuple | set) or not all(isinstance(entry, str) for entry in entries):
        raise AdapterError(f"{key} is {value!r}; it must be a string or a list of strings")
    for entry in entries:
        try:
            if isinstance(value, str) or always_regular:
                re.compile(entry)
        except re.error as error:
            raise AdapterError(f"{key}: {entry!r} is not a regular expression ({error})") from error


def check_config(config: Mapping[str, Any], max_rank: int, besides: Collection[str] = ()) -> tuple[int, float]:
    """Return the rank of an adapter and the factor by which B A is scaled.

    ``besides`` are keys to accept although they are unsupported or unknown here.
    Raises AdapterError for a ``config`` that a plain low-rank update cannot express, or an unknown key that is set.
    It also raises for a rank that is no positive whole number or above ``max_rank``, and for a ``lora_alpha`` that is
    no number or too large.
    """
    kind = config.get("peft_type", "LORA")
    if str(getattr(kind, "value", kind)).upper() != "LORA":
        raise AdapterError(f"peft_type is {kind}; only LORA adapters can be installed")
    if config.get("bias", "none") != "none":
        raise AdapterError(f'bias is {config["bias"]!r}; train with bias="none"')
    for key, value in config.items():
        if value and key not in _KNOWN and key not in besides:
            way_out = _UNSUPPORTED.get(key, _UNKNOWN)
            raise AdapterError(f"the adapter uses {key}={str(value)[:80]}, which is not supported; {way_out}")
    if (init := config.get("init_lora_weights")) not in _PLAIN_INITS:
        raise AdapterError(
            f"init_lora_weights is {init!r}, which changes the base weights too; save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion, or train with init_lora_weights=True"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(f"the adapter's rank r is {rank!r}; it must be a whole number of at least 1")
    if rank > max_rank:
        raise AdapterError(
            f"the adapter has rank {rank}, and this engine has room for at most {max_rank}; start it with {rank} "
            '("rank" of "qerl.policy_adapter", or --max-lora-rank for LoRA requests)'
        )
    # checked before any arithmetic: a Python integer may be too large for a float
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not -MAX_ALPHA <= alpha <= MAX_ALPHA:
        raise AdapterError(
            f"lora_alpha is {repr(alpha)[:20]}; it must be a finite number of at most {MAX_ALPHA:.0e} in size"
        )
    return rank, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def first_of(names: Sequence[str]) -> str:
    """Return the first of several names, and how many there are beside it."""
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _pair_up(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    if not tensors:
        raise AdapterError("the adapter holds no tensors; to serve the base alone, swap to no adapter (None)")
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        half = _A if name.endswith(_A) else _B
        if not name.startswith(PREFIX) or not name.endswith(half):
            raise AdapterError(
                f"tensor {name!r} is not part of a plain LoRA adapter; names look like "
                f"{PREFIX}model.layers.0.self_attn.q_proj{_A}, as peft.get_peft_model_state_dict(model) gives them"
            )
        pairs.setdefault(name[len(PREFIX) : -len(half)], {})[half] = tensor
    return pairs


def _checked(name: str, pair: dict[str, torch.Tensor], target: Target, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    for half, shape in ((_A, (rank, target.in_features)), (_B, (target.out_features, rank))):
        tensor = pair.get(half)
        if tensor is None:
            raise AdapterError(f"{name}{half} is missing; save the whole adapter again")
        if tuple(tensor.shape) != shape:
            raise AdapterError(
                f"{name}{half} has shape {tuple(tensor.shape)}, this model and rank {rank} need {shape}; "
                "was the adapter trained on another base or with another rank?"
            )
        if tensor.dtype not in DTYPES:
            raise AdapterError(f"{name}{half} is {tensor.dtype}; use float32, bfloat16 or float16")
    return pair[_A], pair[_B]


class Converted(dict[str, tuple[torch.Tensor, torch.Tensor]]):
    """Hold pairs (A, B) by the names of their linears, with their ``strength``.

    No linear's B A stretches an input by more than ``strength``. Above STRENGTH it is the largest |A| |B| of a linear,
    in Frobenius norms; up to STRENGTH it may be only an upper bound of that.
    """

    strength = 0.0


@torch.no_grad()
def converted(adapter: CheckedAdapter, dtype: torch.dtype, device: torch.device | None = None) -> Converted:
    """Return the adapter's pairs as new tensors of ``dtype``, with B multiplied by the scaling in fp32.

    The caller's tensors stay unchanged. The new ones lie on ``device``, or on the caller's device if it is None.
    Raises AdapterError for NaN, infinite values, and values that become infinite in ``dtype``.
    """
    if not adapter.pairs:
        return Converted()
    names = list(adapter.pairs), list(adapter.pairs)
    if adapter.fetch is not None:  # in the order of memory, so that they are contiguous already
        for i in (0, 1):
            names[i].sort(key=lambda name: adapter.pairs[name][i].storage_offset())
    halves = tuple([adapter.pairs[name][i] for name in names[i]] for i in (0, 1))

    def by_name(*flat: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        return [
            dict(zip(own, _unflatten_dense_tensors(values, half), strict=True))
            for own, values, half in zip(names, flat, halves, strict=True)
        ]

    a, b = _flat(halves, device, adapter.fetch)
    a, b = a.to(dtype), (b if adapter.scaling == 1 else b.float().mul_(adapter.scaling)).to(dtype)
    new = by_name(a, b)
    # one transfer to the CPU suffices for a good adapter; the bad names are looked for only if a value is not finite
    pairs = Converted({name: (new[0][name], new[1][name]) for name in adapter.pairs})
    pairs.strength = _bound(pairs, a, b)
    if not math.isfinite(pairs.strength) and (bad := _not_finite(adapter.pairs, *new)):
        was = "holds NaN or infinite values"
        if bad != _not_finite(adapter.pairs, *by_name(*_flat(halves, device, adapter.fetch))):
            was = f"holds values too large for the engine's {dtype}"
        raise AdapterError(f"the adapter of {first_of(bad)} {was}")
    if pairs.strength > STRENGTH:
        norms = torch._foreach_norm([half for pair in pairs.values() for half in pair], dtype=torch.float32)
        sizes = torch.stack(norms).tolist()
        pairs.strength = max(map(operator.mul, sizes[::2], sizes[1::2]))
    return pairs


def _flat(
    halves: Sequence[Sequence[torch.Tensor]], device: torch.device | None, fetch: Fetch | None
) -> list[torch.Tensor]:
    """Return a new flat tensor of all A and one of all B: by tensor, launching would take longer than computing."""
    if fetch is not None:
        assert device is not None  # every carrier names its own
        copied = fetch([tensor for half in halves for tensor in half], device)
        return [copied.flat(0, len(halves[0])), copied.flat(len(halves[0]), len(copied.pieces))]
    if device is not None and any(tensor.device != device for half in halves for tensor in half):
        halves = [[tensor.to(device, non_blocking=True) for tensor in half] for half in halves]
    # flattening a single tensor returns a view of the caller's memory, so it is cloned
    return [_flatten_dense_tensors(half) if len(half) > 1 else half[0].flatten().clone() for half in halves]


def _bound(pairs: Converted, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return an upper bound of every pair's |A| |B| from all values ``a`` and ``b``; not finite if one is not."""
    sizes = max(math.sqrt(one.numel() * other.numel()) for one, other in pairs.values())
    largest = [torch.linalg.vector_norm(half, math.inf) for half in (a, b)]
    return sizes * math.prod(torch.stack(largest).tolist())


def _not_finite(names: Iterable[str], a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names whose A or B holds NaN or infinite values."""
    return [name for name in names if not all(bool(torch.isfinite(half[name]).all()) for half in (a, b))]


def _matches(name: str, patterns: str | list[str]) -> bool:
    if isinstance(patterns, str):
        return patterns == "all-linear" or re.fullmatch(patterns, name) is not None
    return any(name == pattern or name.endswith("." + pattern) for pattern in patterns)


def _layer(name: str, pattern: str | list[str] | None) -> int | None:
    containers = [pattern] if isinstance(pattern, str) else pattern or [r"[^.]+"]
    for container in containers:
        if match := re.match(rf".*?\b(?:{container})\.(\d+)\.", name):
            return int(match.group(1))
    return None


def _endings(targets: Collection[str]) -> str:
    return ", ".join(sorted({name.rsplit(".", 1)[-1] for name in targets}))


def joined(tensors: Tensors | None, norms: Tensors | None) -> dict[str, torch.Tensor]:
    """Merge an adapter and trained norms into one dict.

    Raises AdapterError for a name that is in both, and for what are no tensors by name, or tensors without values.
    """
    for what, given in (("tensors", tensors or {}), ("norms", norms or {})):
        if not isinstance(given, Mapping):
            raise AdapterError(f"{what} is {type(given).__name__}; give a dict of torch.Tensor by name")
        for name, tensor in given.items():
            is_tensor = isinstance(name, str) and isinstance(tensor, torch.Tensor)
            if not is_tensor or tensor.is_meta or tensor.layout != torch.strided:
                kind = f"{tensor.layout} on {tensor.device}" if is_tensor else type(tensor).__name__
                raise AdapterError(f"{what} holds {name!r}: {kind}; give names with a dense torch.Tensor each")
    if both := sorted((tensors or {}).keys() & (norms or {}).keys()):
        raise AdapterError(f"{both[0]} is a tensor of the adapter and a trained norm; name it once")
    return {**(tensors or {}), **(norms or {})}


def plain_config(config: Any) -> dict[str, Any]:
    """Return a dict, PEFT's LoraConfig or None as plain JSON values; raise AdapterError for anything else."""
    if config is not None and not isinstance(config, Mapping):
        if not callable(getattr(config, "to_dict", None)):
            raise AdapterError(f"the adapter's config is {type(config).__name__}; give a dict or PEFT's LoraConfig")
        config = config.to_dict()
    return json.loads(json.dumps(dict(config or {}), default=_plain))


def _plain(value: Any) -> Any:
    """Return a JSON value for the sets and enums that PEFT keeps in a LoraConfig."""
    return sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", str(value))
