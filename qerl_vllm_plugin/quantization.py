"""Provide ``--quantization qerl_nvfp4``: decide which checkpoints are accepted and which layers are quantized."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from qerl_vllm_plugin import NAME
from qerl_vllm_plugin.compat import layers as vllm_layers
from qerl_vllm_plugin.options import ONE_CARRIER, Options
from qerl_vllm_plugin.weights.checkpoint import Nvfp4Scheme, check_overrides, inspect_folder, weights_taken
from qerl_vllm_plugin.weights.expected import CONFIG, experts
from qerl_vllm_plugin.weights.families import WITHOUT_SLOTS, check_family, kept_in_bf16, never_compared
from qerl_vllm_plugin.weights.formats import CACHE_KEYS, FP8, check_weight_only, matches, read_quantization
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.qerl")
# stays in BF16 when a BF16 checkpoint is quantized at load time; the same default as `qerl quantize --ignore`
DEFAULT_IGNORE = ("lm_head",)
CACHE_SCALES = "are used, unless --kv-cache-dtype names another cache than an FP8 one"


class QerlConfig(QuantizationConfig):
    """Configure the quantization qerl_nvfp4.

    It reads the NVFP4 checkpoints that weights/formats.py accepts, and quantizes BF16 checkpoints one layer at a time.
    ``ignore`` holds the checkpoint's own names; vLLM's names are translated to those before they are compared.
    """

    def __init__(self, scheme: Nvfp4Scheme | None = None) -> None:
        """Take a ``scheme``, None for a checkpoint that is not quantized."""
        from qerl_vllm_plugin.compat.engine import end_start_on_sigterm

        super().__init__()
        end_start_on_sigterm()  # the process that starts an engine makes its config first
        self.scheme = scheme
        self.ignore: tuple[str, ...] = scheme.ignore if scheme else ()
        self.kv_cache_scheme = CACHE_KEYS if scheme and scheme.kv_cache else None  # vLLM's Attention looks here
        self.mappers: list[Any] = []  # vLLM's mappers from the checkpoint's names to its own, where they differ
        self.adapter_rank, self.kernel = 0, "auto"
        self._is_checked = False
        self._kept: tuple[str, ...] = ()
        self._expected: tuple[str, ...] = ()  # the user's own "qerl.ignore"
        self._met: set[str] = set()  # vLLM's names of the layers for which a method was asked

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75  # Marlin's minimum

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QerlConfig":
        # the option weight_only is not known yet; ``_prepare`` checks it
        return cls(read_quantization(config, weight_only=True))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim a checkpoint only if the user named this method; raise CheckpointError for one that cannot be read."""
        if user_quant != NAME:
            return None
        read_quantization(hf_quant_cfg, weight_only=True)
        return NAME

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.mappers.append(hf_to_vllm_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the quantization method of one layer; None leaves embeddings, lm_head and attention as they are.

        Attention gets vLLM's KV-cache method if the checkpoint has scales for an FP8 KV cache.
        """
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.linear import LinearBase

        vllm_config = get_current_vllm_config()
        self._prepare(vllm_config)
        self._met.add(prefix)
        if isinstance(layer, LinearBase):
            return self._linear_method(prefix)
        if vllm_layers.is_fused_experts(layer):
            from qerl_vllm_plugin.weights.experts import experts_method, part_names

            if vllm_config.model_config.dtype == torch.float16:
                raise ValueError(
                    f"{prefix}: --dtype float16: vLLM's kernels for experts would take block scales below 2^-6 for "
                    "zero; use --dtype bfloat16"
                )
            return experts_method(layer, prefix, self.scheme, {self.kind(name) for name in part_names(prefix)})
        if self.kv_cache_scheme is not None and vllm_layers.is_attention(layer):
            return vllm_layers.kv_cache_method(self)
        return None

    def _linear_method(self, prefix: str) -> QuantizeMethodBase:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        from qerl_vllm_plugin.weights.fp8 import Fp8LinearMethod
        from qerl_vllm_plugin.weights.linear import AdaptedLinearMethod, QerlLinearMethod, QerlOnlineLinearMethod

        kind = self.kind(prefix)
        if kind is None:
            parts = self.part_names(prefix)
            # linears that the family keeps in BF16 still get an adapter; the others were left out by the user's or
            # the checkpoint's choice, and a router would ignore an adapter
            if self.adapter_rank and all(any(matches(kept, part) for kept in self._kept) for part in parts):
                if self.kernel == "batch_invariant":
                    raise ValueError(f"{prefix} stays in BF16, and its adapter has no batch_invariant kernel; use none")
                return AdaptedLinearMethod(prefix, parts, self.adapter_rank)
            return UnquantizedLinearMethod()
        if kind == FP8:
            return Fp8LinearMethod(prefix)
        options: tuple[str, list[str], int, str] = (prefix, self.part_names(prefix), self.adapter_rank, self.kernel)
        if self.scheme is None:
            return QerlOnlineLinearMethod(*options)
        return QerlLinearMethod(*options, self.scheme.format, bool(self.scheme.activations))

    def part_names(self, prefix: str) -> list[str]:
        """Return the names of the layers that vLLM fuses into this one: qkv_proj -> q_proj, k_proj, v_proj.

        They still have vLLM's parent name. A layer that is not fused gives its own name.
        """
        parent, _, name = prefix.rpartition(".")
        return [f"{parent}.{part}" for part in self.packed_modules_mapping.get(name, [name])]

    def _stored_names(self, name: str) -> set[str]:
        """Return what the checkpoint may call vLLM's module ``name``, and each layer that vLLM fuses into it."""
        parts = (name, *self.part_names(name))
        return {stored for part in parts for stored in vllm_layers.checkpoint_names(self.mappers, part)}

    def kind(self, prefix: str) -> str | None:
        """Return ``Nvfp4Scheme.kind`` by vLLM's name; raise CheckpointError if a fused layer's parts differ in it."""
        scheme = replace(self.scheme or Nvfp4Scheme(), ignore=self.ignore)
        whole = vllm_layers.checkpoint_names(self.mappers, prefix)
        if any(scheme.is_ignored(name) for name in whole):
            return None
        kinds: dict[str, str | None] = {}
        for part in self.part_names(prefix):
            names = vllm_layers.checkpoint_names(self.mappers, part)
            stored = [scheme.kind(name) for name in names if not any(map(scheme.is_ignored, names))]
            kinds[part] = next((kind for kind in stored if kind is not None), None)
        if len(set(kinds.values())) > 1:
            words = ", ".join(f"{name} in {kind or 'bf16'}" for name, kind in kinds.items())
            raise CheckpointError(f"vLLM fuses layers that would be stored differently: {words}; ignore all or none")
        return next(iter(kinds.values()))

    def _set_ignore(self, ignore: tuple[str, ...] | None, model_type: str, *, is_multimodal: bool) -> None:
        """Set the layers that stay in BF16; raise ValueError for a multimodal model without "qerl.ignore"."""
        if ignore is None and is_multimodal:
            raise ValueError(
                "this BF16 checkpoint has parts for images or sound, whose layers would be quantized too; name what "
                """stays in BF16: --additional-config '{"qerl": {"ignore": ["lm_head", "re:.*visual.*"]}}', or """
                "quantize it first"
            )
        self.ignore = (DEFAULT_IGNORE if ignore is None else ignore) + kept_in_bf16(model_type)
        self._expected = ignore or ()

    def check_built(self, model: torch.nn.Module, *, is_tied_by_user: bool) -> Callable[[str], None]:
        """Return a check that raises CheckpointError for the name of a checkpoint tensor with no place in the model.

        vLLM's classes silently leave out a bias that they have no parameter for, and an lm_head that is tied to the
        embedding. ``is_tied_by_user`` says that --hf-overrides ties them, whatever the checkpoint has.
        """
        modules, with_bias, wholes = set(), set(), ["mtp."]  # multi-token prediction, which this model does not use
        for name, module in model.named_modules(remove_duplicate=False):
            names = self._stored_names(name)
            modules |= names
            if getattr(module, "bias", None) is not None:
                with_bias |= names
            if vllm_layers.is_fused_experts(module):
                wholes += [stored.partition(".experts")[0] + ".experts." for stored in names]
            if vllm_layers.is_of_another_stage(module):
                wholes += [f"{stored}." for stored in names]

        def check(name: str) -> None:
            module, _, leaf = name.rpartition(".")
            has_place = module in (with_bias if leaf == "bias" else modules) or name.startswith(tuple(wholes))
            if not has_place or (is_tied_by_user and module == "lm_head"):
                raise CheckpointError(
                    f"the checkpoint's {name} has no place in the model that was built ({type(model).__name__}) and "
                    f"would be left out; serve it as its own {CONFIG} says, without --hf-overrides"
                )

        return check

    def check_ignore(self) -> None:
        """Raise ValueError for an entry of "qerl.ignore" that matches no layer of the model that has been built."""
        layers = set().union(*map(self._stored_names, self._met))
        for pattern in self._expected:
            if not any(matches(pattern, name) for name in layers):
                raise ValueError(
                    f'--additional-config: "qerl.ignore" names {pattern!r}, which is no layer of this model'
                )

    def _prepare(self, vllm_config: "VllmConfig") -> None:
        """Prepare for one model, before its first layer is built; later calls do nothing.

        Check the options and what the engine cannot do under them, register the checks of the checkpoint and of the
        built model, and install the fp32 norms. Raises ValueError for what cannot be honoured.
        """
        if self._is_checked:
            return
        from vllm import envs
        from vllm.platforms import current_platform

        from qerl_vllm_plugin import norms
        from qerl_vllm_plugin.adapter import folder as adapter_folder
        from qerl_vllm_plugin.compat import drafts, engine, loading, lora_loading
        from qerl_vllm_plugin.compat import worker as vllm_worker
        from qerl_vllm_plugin.weights import layouts
        from qerl_vllm_plugin.worker.methods import add_worker_methods
        from qerl_vllm_plugin.worker.policy import install_at_start

        engine.check_vllm_version()
        engine.check_kv_cache(vllm_config)
        options = Options.parse(vllm_config.additional_config)
        options.check_folders()
        if options.adapter_path is not None:
            adapter_folder.check_before_load(options.adapter_path, None, options.adapter_rank)
        if (options.kernel == "batch_invariant") != envs.VLLM_BATCH_INVARIANT:
            raise ValueError(
                "VLLM_BATCH_INVARIANT=1 is an experiment under qerl_nvfp4, asked for in two places: that variable, for "
                "vLLM's kernels, and for ours, which are slower at few tokens then, "
                """--additional-config '{"qerl": {"kernel": "batch_invariant"}}'. Set both or none"""
            )
        cache = str(vllm_config.cache_config.cache_dtype)
        if options.adapter_rank and cache.startswith("fp8"):
            logger.warning(
                "--kv-cache-dtype %s under a policy adapter: log-probabilities are off by six times as much as with "
                "the usual cache, and whoever trains on these answers has that difference; it is meant for serving",
                cache,
            )
        hf_overrides = vllm_config.model_config.hf_overrides
        overrides = hf_overrides if isinstance(hf_overrides, dict) else {}
        check_overrides(overrides)
        hf_config = vllm_config.model_config.hf_config
        model_type = hf_config.model_type
        check_family(model_type, options.untested_models)
        self._kept = kept_in_bf16(model_type)
        if self.scheme is None:
            self._set_ignore(options.ignore, model_type, is_multimodal=vllm_config.model_config.is_multimodal_model)
        elif options.ignore is not None:
            raise ValueError(
                '--additional-config: "qerl.ignore" is for BF16 checkpoints; this one is packed already, and its own '
                "config.json says which layers are not"
            )
        else:
            check_weight_only(self.scheme, options.weight_only)

        def inspect(folder: Path) -> None:
            report = inspect_folder(folder, weight_only=options.weight_only)
            if options.adapter_path is not None:
                adapter_folder.check_base(options.adapter_path, folder)
            if self.scheme is not None and self.scheme.extras:
                # a warning, because something is dropped and `qerl serve` shows nothing below warnings
                logger.warning("%s", weights_taken(report, CACHE_SCALES))

        def when_built(model: torch.nn.Module) -> Callable[[str], None]:
            if vllm_config.parallel_config.pipeline_parallel_size == 1:
                self.check_ignore()
            if never_compared(model_type):  # it is not known which tensors such a class may leave out
                return lambda name: None
            return self.check_built(model, is_tied_by_user=bool(overrides.get("tie_word_embeddings")))

        install = None
        if (path := options.adapter_path) is not None:

            def install(model: torch.nn.Module) -> None:
                install_at_start(model, path)

        look = _look_for_overflow(vllm_config, has_adapter=path is not None)

        def when_ready(model: torch.nn.Module) -> None:
            engine.keep_compiled_by(layouts.digest(model), vllm_config, model)
            if look is not None:
                look(model)

        loading.watch(vllm_config, inspect, when_built, install, when_ready)
        if vllm_config.lora_config is not None and model_type in WITHOUT_SLOTS:
            raise ValueError(
                f"{model_type}: --enable-lora has no slots that fit every linear of this family; leave it out and use "
                """--additional-config '{"qerl": {"policy_adapter": {"rank": R}}}', which reaches all of them"""
            )
        if vllm_config.lora_config is not None and current_platform.is_cpu() and experts(hf_config.to_dict()):
            raise ValueError(
                "vLLM runs no mixture of experts (of whatever quantization) with --enable-lora on a CPU; leave it out "
                """and use --additional-config '{"qerl": {"policy_adapter": {"rank": R}}}', for attention"""
            )
        if options.adapter_rank and vllm_config.lora_config is not None:
            raise ValueError(ONE_CARRIER)
        lora_loading.watch(vllm_config, adapter_folder)
        vllm_worker.draw_with_whole_prompts_alone()
        drafts.expand_on_cpu()
        self.adapter_rank, self.kernel = options.adapter_rank, options.kernel
        norms.install()
        add_worker_methods()
        self._is_checked = True


def _look_for_overflow(vllm_config: "VllmConfig", *, has_adapter: bool) -> Callable[[torch.nn.Module], None] | None:
    """Return a check that raises ActivationOverflow for a loaded model whose activations its dtype cannot hold.

    Return None unless the dtype is FP16, whose range is small, or an adapter is installed at start, which may be of
    any size. Return None under pipeline parallelism too, with a warning.
    """
    from qerl_vllm_plugin.weights import overflow
    from qerl_vllm_plugin.worker.change import TOO_LARGE

    dtype = vllm_config.model_config.dtype
    if (dtype != torch.float16 and not has_adapter) or not overflow.can_check(vllm_config):
        return None

    def look(model: torch.nn.Module) -> None:
        way_out = overflow.NEEDS_BFLOAT16 if dtype == torch.float16 else TOO_LARGE
        name, value = overflow.check_engine(model, vllm_config, way_out).largest()
        logger.info("%s: the largest activation of first tokens is %.3g (%s)", dtype, value, name)

    return look
