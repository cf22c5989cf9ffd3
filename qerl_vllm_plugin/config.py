"""``--quantization qerl_nvfp4``: which checkpoints are accepted and which layers are quantized."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from qerl_vllm_plugin.checkpoint import Nvfp4Scheme, inspect_folder, read_quantization

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NAME = "qerl_nvfp4"
# left in BF16 when a BF16 checkpoint is quantized on the way in; the same default as `qerl quantize --ignore`
DEFAULT_IGNORE = ("lm_head",)
KNOWN_OPTIONS = {"ignore", "policy_adapter", "kernel"}
KERNELS = ("auto", "tiled", "marlin", "dequantize")
MAX_ADAPTER_RANK = 512  # vLLM's own limit for --max-lora-rank


def is_registered() -> bool:
    """Whether vLLM already knows the method in this process."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    return NAME in QUANTIZATION_METHODS


@dataclass(frozen=True)
class Options:
    """What ``--additional-config '{"qerl": {...}}'`` may set.

    ``ignore``: layers of a BF16 checkpoint that stay in BF16, by name or ``re:`` pattern (compressed-tensors' syntax);
    None where it is not given.
    ``policy_adapter``: ``{"rank": R}`` keeps one adapter of up to that rank in the layers themselves, for all requests.
    ``kernel``: ``auto`` (our tiled kernel on Hopper, else Marlin; dequantization on a CPU), or one of them by name.
    """

    ignore: tuple[str, ...] | None = None
    adapter_rank: int = 0
    kernel: str = "auto"

    @classmethod
    def parse(cls, additional_config: Any) -> "Options":
        """Raises ValueError for an unknown key or a value of the wrong type."""
        given = additional_config.get("qerl", {}) if isinstance(additional_config, dict) else {}
        if not isinstance(given, dict):
            raise ValueError(f'--additional-config: "qerl" must be an object, not {given!r}')
        if unknown := sorted(set(given) - KNOWN_OPTIONS):
            raise ValueError(
                f'--additional-config: unknown key {unknown[0]!r} under "qerl"; known: {sorted(KNOWN_OPTIONS)}'
            )
        ignore, adapter = given.get("ignore"), given.get("policy_adapter", {"rank": 0})
        if ignore is not None and (
            not isinstance(ignore, list | tuple) or not all(isinstance(name, str) for name in ignore)
        ):
            raise ValueError(f'--additional-config: "qerl.ignore" must be a list of layer names, not {ignore!r}')
        rank = adapter.get("rank") if isinstance(adapter, dict) and set(adapter) == {"rank"} else None
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank <= MAX_ADAPTER_RANK:
            raise ValueError(
                '--additional-config: "qerl.policy_adapter" must be {"rank": R} with a whole number R of at most '
                f"{MAX_ADAPTER_RANK}, not {adapter!r}"
            )
        kernel = given.get("kernel", "auto")
        if kernel not in KERNELS:
            raise ValueError(f'--additional-config: "qerl.kernel" is {kernel!r}; it is one of {", ".join(KERNELS)}')
        return cls(tuple(ignore) if ignore is not None else None, rank, kernel)


class QerlConfig(QuantizationConfig):
    """Reads compressed-tensors NVFP4A16 checkpoints, and quantizes BF16 checkpoints one layer at a time."""

    def __init__(self, scheme: Nvfp4Scheme | None = None) -> None:
        """``scheme`` is None for a checkpoint that is not quantized."""
        super().__init__()
        self.scheme = scheme
        self.ignore: list[str] | None = list(scheme.ignore) if scheme else None
        self.targets: list[str] = list(scheme.targets) if scheme else ["Linear"]
        self.adapter_rank, self.kernel = 0, "auto"
        self._is_checked = False

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75  # Marlin

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QerlConfig":
        return cls(read_quantization(config))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claims a checkpoint only where the user named this method; one that cannot be read is refused here."""
        if user_quant != NAME:
            return None
        read_quantization(hf_quant_cfg)
        return NAME

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        if self.ignore is not None:
            self.ignore = hf_to_vllm_mapper.apply_list(self.ignore)
        if "Linear" not in self.targets:
            self.targets = hf_to_vllm_mapper.apply_list(self.targets)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of one layer; None leaves embeddings, lm_head and attention as they are."""
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        from qerl_vllm_plugin import compat
        from qerl_vllm_plugin.linear import QerlLinearMethod, QerlOnlineLinearMethod

        self._prepare(get_current_vllm_config())
        if isinstance(layer, LinearBase):
            if not self._is_quantized(prefix):
                return UnquantizedLinearMethod()
            method = QerlOnlineLinearMethod if self.scheme is None else QerlLinearMethod
            return method(prefix, self.part_names(prefix), self.adapter_rank, self.kernel)
        if compat.is_fused_experts(layer):
            from qerl_vllm_plugin.experts import experts_method

            return experts_method(layer, prefix, online=self.scheme is None)
        return None

    def part_names(self, prefix: str) -> list[str]:
        """The checkpoint's names of what a fused layer joins: qkv_proj -> q_proj, k_proj, v_proj."""
        parent, _, name = prefix.rpartition(".")
        return [f"{parent}.{part}" for part in self.packed_modules_mapping.get(name, [name])]

    def _is_quantized(self, prefix: str) -> bool:
        """Nvfp4Scheme.is_quantized for vLLM's names, fused layers (qkv_proj) included."""
        from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

        def listed(patterns: list[str]) -> bool:
            return should_ignore_layer(prefix, ignore=patterns, fused_mapping=self.packed_modules_mapping)

        return not listed(self.ignore or []) and ("Linear" in self.targets or listed(self.targets))

    def _prepare(self, vllm_config: "VllmConfig") -> None:
        """Once for each model: options, the checkpoint's headers, and the norms that are about to be built."""
        if self._is_checked:
            return
        from qerl_vllm_plugin import compat, norms

        compat.check_vllm_version()
        options = Options.parse(vllm_config.additional_config)
        folder = Path(vllm_config.model_config.model)
        if self.scheme is None:
            self.ignore = list(DEFAULT_IGNORE if options.ignore is None else options.ignore)
        elif options.ignore is not None:
            raise ValueError(
                '--additional-config: "qerl.ignore" is for BF16 checkpoints; this one is packed already, and its own '
                "config.json says which layers are not"
            )
        if vllm_config.load_config.load_format != "dummy" and folder.is_dir():
            # vLLM checks that every parameter was loaded only for models without a quantization method
            inspect_folder(folder)
        if options.adapter_rank and vllm_config.lora_config is not None:
            raise ValueError(
                '"qerl.policy_adapter" and --enable-lora exclude each other: the policy adapter is part of every layer '
                "and on for every request. Use --enable-lora alone for several adapters"
            )
        self.adapter_rank, self.kernel = options.adapter_rank, options.kernel
        norms.install()
        compat.add_worker_methods()
        self._is_checked = True
