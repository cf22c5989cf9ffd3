"""``--quantization qerl_nvfp4``: which checkpoints are accepted and which layers are quantized."""

from dataclasses import dataclass, fields
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


def is_registered() -> bool:
    """Whether vLLM already knows the method in this process."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    return NAME in QUANTIZATION_METHODS


@dataclass(frozen=True)
class Options:
    """What ``--additional-config '{"qerl": {...}}'`` may set.

    ``ignore``: layers of a BF16 checkpoint that stay in BF16, by name or ``re:`` pattern (compressed-tensors' syntax).
    """

    ignore: tuple[str, ...] = DEFAULT_IGNORE

    @classmethod
    def parse(cls, additional_config: Any) -> "Options":
        """Raises ValueError for an unknown key or a value of the wrong type."""
        given = additional_config.get("qerl", {}) if isinstance(additional_config, dict) else {}
        if not isinstance(given, dict):
            raise ValueError(f'--additional-config: "qerl" must be an object, not {given!r}')
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f'--additional-config: unknown key {unknown[0]!r} under "qerl"; known: {sorted(known)}')
        ignore = given.get("ignore", DEFAULT_IGNORE)
        if isinstance(ignore, str) or not all(isinstance(name, str) for name in ignore):
            raise ValueError(f'--additional-config: "qerl.ignore" must be a list of layer names, not {ignore!r}')
        return cls(ignore=tuple(ignore))


class QerlConfig(QuantizationConfig):
    """Reads compressed-tensors NVFP4A16 checkpoints, and quantizes BF16 checkpoints one layer at a time."""

    def __init__(self, scheme: Nvfp4Scheme | None = None) -> None:
        """``scheme`` is None for a checkpoint that is not quantized."""
        super().__init__()
        self.scheme = scheme
        self.ignore: list[str] | None = list(scheme.ignore) if scheme else None
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

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of one layer; None leaves embeddings, lm_head and attention as they are."""
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

        from qerl_vllm_plugin import compat
        from qerl_vllm_plugin.linear import QerlLinearMethod, QerlOnlineLinearMethod

        self._prepare(get_current_vllm_config())
        if isinstance(layer, LinearBase):
            if should_ignore_layer(prefix, ignore=self.ignore or [], fused_mapping=self.packed_modules_mapping):
                return UnquantizedLinearMethod()
            return QerlOnlineLinearMethod(prefix) if self.scheme is None else QerlLinearMethod(prefix)
        if compat.is_fused_experts(layer):
            from qerl_vllm_plugin.experts import experts_method

            return experts_method(layer, prefix, online=self.scheme is None)
        return None

    def _prepare(self, vllm_config: "VllmConfig") -> None:
        """Once for each model: options, the checkpoint's headers, and the norms that are about to be built."""
        if self._is_checked:
            return
        from qerl_vllm_plugin import compat, norms

        compat.check_vllm_version()
        options = Options.parse(vllm_config.additional_config)
        folder = Path(vllm_config.model_config.model)
        if self.scheme is None:
            self.ignore = list(options.ignore)
        elif vllm_config.load_config.load_format != "dummy" and folder.is_dir():
            inspect_folder(folder)
        norms.install()
        compat.add_worker_methods()
        self._is_checked = True
