"""Run verl's FSDP2 engine on the frozen NVFP4 model, with the same bytes as the weights of the rollout engine."""

import torch
from qerl_kernels.linear import expand, linear
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from qerl_recipes.model import loading, lora, norms
from qerl_recipes.model.frozen import FrozenNVFP4Linear

DTYPE = torch.bfloat16  # of activations, embedding and head; the adapter has model_dtype


class SentLinear(FrozenNVFP4Linear):
    """Compute a FrozenNVFP4Linear with block scales as uint8: verl broadcasts buffers, and gloo has no float8."""

    def __init__(self, frozen: FrozenNVFP4Linear) -> None:
        parts = (frozen.weight_packed, frozen.weight_scale, frozen.weight_global_scale)
        super().__init__(*parts, frozen.bias, frozen.dtype)
        self.register_buffer("weight_scale", frozen.weight_scale.view(torch.uint8))

    @property
    def _block_scales(self) -> torch.Tensor:
        return self.weight_scale.view(torch.float8_e4m3fn)

    def operand(self, dtype: torch.dtype, room: int = 0) -> tuple[torch.Tensor, float]:
        return expand(self.weight_packed, self._block_scales, dtype, room)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight_packed, self._block_scales, self.row_scale, self.bias, self._factor)


def _in_float32(head: torch.nn.Module, inputs: tuple[torch.Tensor, ...], logits: torch.Tensor) -> torch.Tensor:
    """Return the logits in fp32, as the rollout engine has them before temperature and log-softmax.

    verl divides bf16 logits by the temperature in bf16. Without flash-attn it also rounds their log-probabilities to
    bf16, which is an error of up to 0.03 at -10.
    """
    return logits.float()


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda"], vendor=["nvidia"])
class FrozenEngine(FSDPEngineWithLMHead):
    """Train, as verl's engine, a LoRA adapter in ``fsdp_config.model_dtype`` on frozen NVFP4 weights.

    FSDP2 shards only parameters. Packed weights and norms are buffers, so every rank holds them whole.
    """

    def _build_module(self) -> torch.nn.Module:
        """Load the frozen model; raise ValueError for settings that it cannot honour, and as ``loading.load``."""
        if reasons := self._refusals():
            raise ValueError("; ".join(reasons))
        model = self.model_config
        module = loading.load(
            model.local_path, DTYPE, quantization="qerl_nvfp4", attn_implementation=model.hf_config._attn_implementation
        )
        for name, frozen in list(module.named_modules()):
            if isinstance(frozen, FrozenNVFP4Linear):
                module.set_submodule(name, SentLinear(frozen))
        for _, norm in norms.named_norms(module):
            # FSDP2 would cast a parameter to bf16, but the rollout engine's norms are in fp32
            weight = norm.weight.detach()
            del norm.weight
            norm.register_buffer("weight", weight)
        module.get_output_embeddings().register_forward_hook(_in_float32)
        apply_monkey_patch(
            model=module,
            use_remove_padding=self.use_remove_padding,
            ulysses_sp_size=self.ulysses_sequence_parallel_size,
        )
        if model.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module

    def _build_lora_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Add the adapter in ``model_dtype``, computed with its frozen layer and rounded once, as in the engine."""
        wrapped = super()._build_lora_module(module)
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(PrecisionType.to_dtype(self.engine_config.model_dtype or "fp32"))
        lora.install(wrapped, lora.ADAPTER)
        return wrapped

    def _refusals(self) -> list[str]:
        model, found = self.model_config, []
        if self.engine_config.strategy != "fsdp2":
            found.append(f"actor.strategy={self.engine_config.strategy} would cast the packed weights; set it to fsdp2")
        if model.lora_rank <= 0:
            found.append("model.lora_rank is 0: the NVFP4 weights are frozen; set actor_rollout_ref.model.lora_rank=32")
        if model.lora.get("merge", False):
            found.append("model.lora.merge: NVFP4 weights take no adapter into themselves; set it to false")
        if model.use_liger:
            found.append("model.use_liger replaces norms and MLPs, which round as the engine's here; set it to false")
        if model.use_fused_kernels:
            found.append("model.use_fused_kernels is untested on the frozen model; set it to false")
        if self._qat_enabled:
            found.append("actor.fsdp_config.qat fakes the quantization that these weights have; set qat.enable=false")
        if "hf_model" in (self.checkpoint_config.get("save_contents") or ()):
            found.append(
                "actor.checkpoint.save_contents names hf_model, which would write packed weights that nothing loads; "
                "leave it out: the adapter comes from verl.model_merger, the base is model.path"
            )
        if (self.engine_config.mixed_precision or {}).get("param_dtype", "bf16") not in ("bf16", "bfloat16"):
            found.append("actor.fsdp_config.mixed_precision.param_dtype: the rollout computes in bf16; set it to bf16")
        return found
