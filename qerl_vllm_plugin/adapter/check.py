"""Checks a LoRA adapter, whole, before any of it is used: names, shapes, rank, dtype and values.

Layout: PEFT. ``config`` is the content of ``adapter_config.json``; tensors are named
``base_model.model.<module>.lora_A.weight: (r, in)`` and ``.lora_B.weight: (out, r)``.
"""

import json
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from qerl_vllm_plugin.wire.spans import Copied

PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
MAX_ALPHA = 1e6  # a hundred thousand times what anyone trains with
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# An adapter of at most this strength cannot overflow: an MLP multiplies gate by up and then by down, and three linears
# that stretch their inputs so much turn a norm's output of size 1e3 into 1e18 at worst, which the next norm can square
# in fp32. Adapters in training have a strength of 1 to 1000.
STRENGTH = 1e4

# what PEFT can write into adapter_config.json and a plain low-rank update cannot express; the value is the way out
_UNSUPPORTED = {
    "use_dora": "train without DoRA",
    "lora_bias": "train with lora_bias=False",
    "modules_to_save": "train with modules_to_save=None; trained norms travel beside the adapter",
    "rank_pattern": "use one rank for all modules",
    "alpha_pattern": "use one lora_alpha for all modules",
    "layer_replication": "use a base model that has these layers",
    "target_parameters": "name modules in target_modules",
    "trainable_token_indices": "leave the embeddings frozen",
    "use_qalora": "train a plain LoRA adapter",
    "fan_in_fan_out": "train an adapter of torch.nn.Linear layers",
    "alora_invocation_tokens": "train a plain LoRA adapter",
    "arrow_config": "train a plain LoRA adapter",
    "megatron_config": "export the adapter in PEFT's layout",
    "monteclora_config": "train a plain LoRA adapter",
    "use_bdlora": "train a plain LoRA adapter",
    "kasa_config": "train a plain LoRA adapter",
}
# what a plain low-rank update needs, and below what says where it comes from or how it was started and trained
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
# the ways to start an adapter that leave the base weights as they are; others (pissa, olora, corda, loftq) change them
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


class AdapterError(ValueError):
    """An adapter that cannot be installed; nothing has been changed."""


class NoCarrierError(Exception):
    """A worker has no room for an adapter of the kind that was looked for."""


@dataclass(frozen=True)
class Target:
    """Where the engine keeps the adapter of one linear of the checkpoint: part ``part`` of ``module``."""

    module: str
    part: int
    in_features: int
    out_features: int


# copies of tensors without memory in this process, on a device
Fetch = Callable[[Sequence[torch.Tensor], torch.device], Copied]


@dataclass(frozen=True)
class CheckedAdapter:
    """An adapter that fits the model.

    ``pairs``: checkpoint module name -> (A: (r, in), B: (out, r)), the caller's tensors. Where their memory belongs to
    another process, ``fetch`` reads them, or parts of them.
    """

    rank: int
    scaling: float
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    fetch: Fetch | None = None


class Checker:
    """``check`` for one engine, which knows an adapter again: one that has names, shapes, dtypes and config of the last
    that was found right is not looked at name by name. A policy in training sends the same hundreds of names each time.
    """

    def __init__(self, targets: Mapping[str, Target], max_rank: int) -> None:
        """As ``check`` has them."""
        self.targets, self._max_rank = targets, max_rank
        self._known: tuple[tuple[Any, ...], int, float, list[tuple[str, str, str]]] | None = None  # the last good one

    def check(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], fetch: Fetch | None = None
    ) -> CheckedAdapter:
        """The adapter. Raises AdapterError."""
        layout = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        key = (json.dumps(config, sort_keys=True, default=str), layout)
        if self._known is None or key != self._known[0]:
            found = check(tensors, config, self.targets, self._max_rank)
            names = [(name, f"{PREFIX}{name}{_A}", f"{PREFIX}{name}{_B}") for name in found.pairs]
            self._known = key, found.rank, found.scaling, names
        _, rank, scaling, names = self._known
        return CheckedAdapter(rank, scaling, {name: (tensors[a], tensors[b]) for name, a, b in names}, fetch)


def check(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    targets: Mapping[str, Target],
    max_rank: int,
) -> CheckedAdapter:
    """The adapter, if every module that ``config`` names is there, on every layer it names, and fits.

    Its values are for ``converted`` to check.

    ``targets`` are the engine's linears by their checkpoint names. Raises AdapterError.
    """
    rank, scaling = check_config(config, max_rank)
    expected = named_modules(config, targets)
    pairs = _pair_up(tensors)
    if missing := sorted(expected - pairs.keys()):
        raise AdapterError(
            f"the adapter's config names {missing[0]} (and {len(missing) - 1} more), but its tensors are missing; "
            "save the whole adapter again"
        )
    if extra := sorted(pairs.keys() - expected):
        raise AdapterError(
            f"the adapter has tensors for {extra[0]} (and {len(extra) - 1} more), which this model does not have or "
            "the adapter's target_modules do not name; was it trained on another base?"
        )
    checked = {}
    for name in expected:
        checked[name] = _check_pair(name, pairs[name], targets[name], rank)
    return CheckedAdapter(rank, scaling, checked)


def named_modules(config: Mapping[str, Any], targets: Collection[str]) -> set[str]:
    """Which of the engine's linears ``target_modules``, ``exclude_modules`` and ``layers_to_transform`` name.

    PEFT's rules: a list matches whole names or their ends, a string is a regular expression for the whole name.
    Raises AdapterError if an entry of the list names no linear that can carry an adapter.
    """
    wanted, excluded = config.get("target_modules"), config.get("exclude_modules")
    for key, value in (("target_modules", wanted), ("exclude_modules", excluded)):
        _check_patterns(key, value)
    _check_patterns("layers_pattern", config.get("layers_pattern"), always_regular=True)
    if not wanted:
        raise AdapterError("the adapter's config has no target_modules; nothing would be adapted")
    if not isinstance(wanted, str):
        for entry in wanted:
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
        if _matches(name, wanted)
        and not (excluded and _matches(name, excluded))
        and (layers is None or _layer(name, config.get("layers_pattern")) in layers)
    }
    if not names:
        raise AdapterError(
            f"target_modules {wanted!r} names no linear layer of this model; those that can carry an adapter end in "
            f"{_endings(targets)}"
        )
    return names


def _check_patterns(key: str, value: Any, *, always_regular: bool = False) -> None:
    """None, a regular expression, or a list of names. Raises AdapterError."""
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
    """The rank of an adapter and what its product is multiplied by. ``besides``: keys that may be used all the same.

    Raises AdapterError for what PEFT means by ``config`` and a plain low-rank update cannot express, a key that is set
    and that nobody here knows, or a rank above ``max_rank``.
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
            f"the adapter has rank {rank}, the engine was started for at most {max_rank} (max_lora_rank)"
        )
    # a whole number may have more digits than any float
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not -MAX_ALPHA <= alpha <= MAX_ALPHA:
        raise AdapterError(
            f"lora_alpha is {str(alpha)[:20]}; it must be a finite number of at most {MAX_ALPHA:.0e} in size"
        )
    return rank, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


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


def _check_pair(
    name: str, pair: dict[str, torch.Tensor], target: Target, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
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
    """Pairs (A, B) by the names of their linears, and their ``strength``: no linear's B A stretches an input by more.

    Above STRENGTH it is the largest |A| |B| of a linear, in Frobenius norms; below, a bound of that.
    """

    strength = 0.0


@torch.no_grad()
def converted(adapter: CheckedAdapter, dtype: torch.dtype, device: torch.device | None = None) -> Converted:
    """The adapter's pairs in new tensors of ``dtype``, B times the scaling in fp32; the caller's stay as they are.

    They lie on ``device``, None being where they are. Raises AdapterError for NaN, infinite values, and such that are
    infinite in ``dtype``.
    """
    if not adapter.pairs:
        return Converted()
    names = list(adapter.pairs), list(adapter.pairs)
    if adapter.fetch is not None:  # as they lie in memory, where they then are one piece already
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
    # one transfer for all that is right; its names are looked for only where something is not
    pairs = Converted({name: (new[0][name], new[1][name]) for name in adapter.pairs})
    pairs.strength = _bound(pairs, a, b)
    if not math.isfinite(pairs.strength) and (bad := _not_finite(adapter.pairs, *new)):
        was = "holds NaN or infinite values"
        if bad != _not_finite(adapter.pairs, *by_name(*_flat(halves, device, adapter.fetch))):
            was = f"holds values too large for the engine's {dtype}"
        others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise AdapterError(f"the adapter of {bad[0]}{others} {was}")
    if pairs.strength > STRENGTH:
        one, other = _norms(adapter.pairs, *new)
        pairs.strength = max(map(operator.mul, one, other))
    return pairs


def _flat(
    halves: Sequence[Sequence[torch.Tensor]], device: torch.device | None, fetch: Fetch | None
) -> list[torch.Tensor]:
    """New memory with all values of A, one behind the other, and such with those of B: few launches, where one tensor
    after the other would take longer to launch than to compute."""
    if fetch is not None:
        assert device is not None  # every carrier names its own
        copied = fetch([tensor for half in halves for tensor in half], device)
        return [copied.flat(0, len(halves[0])), copied.flat(len(halves[0]), len(copied.pieces))]
    if device is not None and any(tensor.device != device for half in halves for tensor in half):
        halves = [[tensor.to(device, non_blocking=True) for tensor in half] for half in halves]
    # of one alone it would be a view, and the caller's memory
    return [_flatten_dense_tensors(half) if len(half) > 1 else half[0].flatten().clone() for half in halves]


def _bound(pairs: Converted, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return what no pair's |A| |B| is above, from the largest value of each half; it is finite only where all values
    are. ``a`` and ``b`` are all values of A and of B."""
    sizes = max(math.sqrt(one.numel() * other.numel()) for one, other in pairs.values())
    largest = [torch.linalg.vector_norm(half, math.inf) for half in (a, b)]
    return sizes * math.prod(torch.stack(largest).tolist())


def _norms(
    names: Iterable[str], a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]
) -> tuple[list[float], list[float]]:
    """Return the Frobenius norms of A and of B by their names, in fp32."""
    names = list(names)
    tensors = [half[name] for half in (a, b) for name in names]
    norms = torch.stack(torch._foreach_norm(tensors, dtype=torch.float32)).tolist()
    return norms[: len(names)], norms[len(names) :]


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


Tensors = Mapping[str, torch.Tensor]


def joined(tensors: Tensors | None, norms: Tensors | None) -> dict[str, torch.Tensor]:
    """An adapter and trained norms as one. Raises AdapterError for a name that is in both."""
    if both := sorted((tensors or {}).keys() & (norms or {}).keys()):
        raise AdapterError(f"{both[0]} is a tensor of the adapter and a trained norm; name it once")
    return {**(tensors or {}), **(norms or {})}


def plain_config(given: Any) -> dict[str, Any]:
    """An adapter's config, as JSON has it, from what ``Policy.swap`` takes. Raises AdapterError for anything else."""
    if given is not None and not isinstance(given, Mapping):
        if not callable(getattr(given, "to_dict", None)):
            raise AdapterError(f"the adapter's config is {type(given).__name__}; give a dict or PEFT's LoraConfig")
        given = given.to_dict()
    return json.loads(json.dumps(dict(given or {}), default=_plain))


def _plain(value: Any) -> Any:
    """JSON for what PEFT keeps in a LoraConfig: sets and enums."""
    return sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", str(value))
