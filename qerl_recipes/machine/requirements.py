"""Check, before anything loads, that this machine has what a recipe needs beyond QeRL's own packages."""

from collections.abc import Iterator

import httpx
import huggingface_hub
from transformers import Trainer
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.utils import is_bitsandbytes_available

from qerl_recipes.recipe.configs import SERVER, GRPOConfig, ModelConfig
from qerl_vllm_plugin.server.token import TOKEN, TOKEN_FILE, configured_token

BITSANDBYTES = "pip install 'bitsandbytes>=0.46.1', which the extra nf4 brings too"
ATTENTIONS = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3")


def lacking(training: GRPOConfig, model: ModelConfig) -> Iterator[str]:
    """Yield a line for each package, access to the hub, GPU, process or token of a server that is missing."""
    if training.quantization == "nf4" and not is_bitsandbytes_available():
        yield f"quantization: nf4 holds the weights by bitsandbytes, which is not installed; {BITSANDBYTES}"
    try:
        Trainer.get_optimizer_cls_and_kwargs(training)
    except ImportError as error:
        name = training.optim.value
        way_out = BITSANDBYTES if "bitsandbytes" in str(error) else str(error).rstrip(".")
        yield f"optim: {name} needs a package that is not installed; {way_out}, or use optim: adamw_torch"
    except ValueError as error:
        yield f"optim: {training.optim.value}: {error}"
    attention = model.attn_implementation
    if attention is not None and attention not in ATTENTIONS:
        yield f"attn_implementation cannot be {attention!r}; it is one of {', '.join(ATTENTIONS)}"
    installed = {*get_available_reporting_integrations(), "flyte"}  # transformers has no check of flyte
    for name in training.report_to or ():
        if name not in INTEGRATION_TO_CALLBACK:
            yield f"report_to cannot be {name!r}; it is one of none, {', '.join(INTEGRATION_TO_CALLBACK)}"
        elif name not in installed:
            yield f"report_to: {name} is not installed; pip install {name}, or use --report_to none"
    yield from _hub(training)
    if training.n_gpu > 1:
        yield (
            f"this process sees {training.n_gpu} GPUs and trains on one: set CUDA_VISIBLE_DEVICES=0, or start a "
            "process for each with accelerate launch"
        )
    if training.vllm_mode == SERVER:
        try:
            if configured_token() is None:
                yield (
                    f"vllm_mode: {SERVER} pushes the policy under the server's admin token; export {TOKEN_FILE}=FILE "
                    f"or {TOKEN}, the same for server and trainer"
                )
        except ValueError as error:
            yield f"vllm_mode: {SERVER}: {error}"
        return
    if training.vllm_enable_sleep_mode and training.device.type != "cuda":
        yield "vllm_enable_sleep_mode needs a CUDA GPU; on a CPU leave it out"
    if training.world_size % training.vllm_tensor_parallel_size:
        yield (
            f"vllm_tensor_parallel_size ({training.vllm_tensor_parallel_size}) must divide the number of trainer "
            f"processes ({training.world_size}); start that many with accelerate launch"
        )


def _hub(training: GRPOConfig) -> Iterator[str]:
    """Yield why the hub would not take what the recipe sends there; the main process has it verify the token."""
    if training.push_to_hub:
        key, way_out = "push_to_hub", "without a push: --push_to_hub false"
    elif training.log_completions_hub_repo is not None:
        key, way_out = "log_completions_hub_repo", "leave it out"
    else:
        return
    token = training.hub_token or huggingface_hub.get_token()
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        yield f"{key}: HF_HUB_OFFLINE is set, so that nothing can be pushed; unset it, or {way_out}"
    elif token is None:
        yield f"{key} needs a token of the Hugging Face hub: hf auth login, or hub_token; {way_out}"
    elif training.process_index == 0:
        try:
            huggingface_hub.HfApi(token=token).whoami()
        except (httpx.HTTPError, OSError) as error:
            first = str(error).strip().partition("\n")[0]
            endpoint = huggingface_hub.constants.ENDPOINT
            yield f"{key}: {endpoint} does not take this token ({first}); check token and network, or {way_out}"
