"""Train the adapter with TRL's AsyncGRPO (``trl.experimental.async_grpo``) against a server with ``/v1/qerl``.

    config, adapter = AsyncGRPOConfig(...), LoraConfig(...)
    trainer = QerlAsyncGRPOTrainer(BASE, rewards, args=config, train_dataset=rows, peft_config=adapter)

AsyncGRPO samples without a pause, and a completion that is under way goes on with the new policy. Here the base is
loaded as by `qerl train`, PyTorch attends, and the adapter is swapped in place. Versions are those of the server, and
each answer's header is checked. The server is started as for `qerl train`, and QERL_ADMIN_TOKEN holds its token. There
is no noise, no exact resume (AsyncGRPO draws without seeds), and one trainer process.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import aiohttp
import torch
from peft import PeftConfig
from peft.utils import get_peft_model_state_dict
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

from qerl_recipes.model import loading
from qerl_recipes.rollout.calls import read_any_text
from qerl_recipes.rollout.server_link import AnotherPolicyError, ServerRefusedError
from qerl_vllm_plugin.client import VERSION_HEADER, PolicyClient
from qerl_vllm_plugin.server.token import configured_token


class CheckedLoop(_AsyncRolloutLoop):
    """Sample as TRL does, check which policies computed an answer, and end the run at a request that is refused."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        read_any_text(self.tokenizer)

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> dict[str, Any]:
        async def post() -> dict[str, Any]:
            before, limit = self.model_version, aiohttp.ClientTimeout(total=timeout)
            async with self.session.post(f"{self.vllm_server_url}{path}", json=payload, timeout=limit) as response:
                if 400 <= response.status < 500:  # TRL would ask again for minutes, and not say why
                    raise ServerRefusedError(f"the server refuses a request: {await response.text()}")
                response.raise_for_status()
                answer: dict[str, Any] = await response.json()
            # the server has a new version a moment before this process hears of it
            first, last = versions(response.headers.get(VERSION_HEADER))
            if not before <= first <= last <= self.model_version + 1:
                raise AnotherPolicyError(
                    f"the server computed an answer with policy versions {first} to {last}, and this run had pushed "
                    f"{before} before and {self.model_version} after: another program uses the server"
                )
            mixed = self._rates["sampling/mixed_versions"]
            mixed[0], mixed[1] = mixed[0] + (first < last), mixed[1] + 1
            return answer

        answer: dict[str, Any] = await self._retry(post, label=f"POST {path}", max_attempts=max_retries)
        return answer


def versions(header: str | None) -> tuple[int, int]:
    """Return the first and the last policy version that computed an answer, 0 for both without a header."""
    first, _, last = (header or "0").partition("-")
    return int(first), int(last or first)


class QerlAsyncGRPOTrainer(AsyncGRPOTrainer):
    """Train a LoRA adapter on the checkpoint folder ``model``; the other arguments are TRL's, without transfers."""

    def __init__(
        self, model: str | Path, *given: Any, args: AsyncGRPOConfig, peft_config: PeftConfig, **named: Any
    ) -> None:
        token = configured_token()
        if token is None:
            raise ValueError("the server's admin token is missing; set QERL_ADMIN_TOKEN to the server's")
        self._policy = PolicyClient(args.vllm_server_base_url, token)

        def load(path: str, dtype: Any, **options: Any) -> PreTrainedModel:
            loaded = loading.load(path, dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype))
            loaded.set_attn_implementation(packing.TREE_ATTENTION)
            return loaded

        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
        replaced: dict[str, Any] = {"create_model_from_path": load}  # TRL takes no loaded model
        if not torch.cuda.is_available():
            replaced["get_peak_flops_per_device"] = lambda *_: None  # TRL asks CUDA
        with mock.patch.multiple(async_grpo_trainer, **replaced):
            transfer = SimpleNamespace(init_weight_transfer=lambda: None, destroy=lambda: None)  # TRL's is not used
            super().__init__(str(model), *given, args=args, peft_config=peft_config, weight_transfer=transfer, **named)
        if self.accelerator.num_processes > 1:
            raise ValueError("AsyncGRPO on a server with /v1/qerl takes one trainer process; start one")
        self._policy.clear_noise()  # of an earlier run
        self.model_version = max(self._policy.state()["version"], 1)
        self.rollout_worker._loop_cls = CheckedLoop
        self.rollout_worker.update_model_version(self.model_version)

    def _sync_weight_merged(self, t0: float) -> tuple[float, float, float]:
        """Swap the adapter in place, while requests go on; nothing is merged."""
        policy = self.accelerator.unwrap_model(self.model)
        tensors = get_peft_model_state_dict(policy, save_embedding_layers=False)
        config = policy.peft_config[policy.active_adapters[0]].to_dict()
        self.model_version = self._policy.swap(tensors, config, version=self.model_version + 1, requests="keep")
        self.rollout_worker.update_model_version(self.model_version)
        return t0, t0, t0


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    *longest: int,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    **options: Any,
) -> torch.Tensor:
    """Attend, segment by segment, from its ``query`` to ``key`` and ``value``, of which the last are its own.

    Shapes are (T, heads, D), (K, key heads, D) and, of both starts, (segments + 1,). Raises ValueError for a sliding
    window or a soft cap of the logits.
    """
    if window_size != (-1, -1) or "softcap" in options:
        raise ValueError("this model attends by a sliding window or caps its logits, which AsyncGRPO cannot here")
    outputs = []
    for (a, b), (c, d) in zip(
        *(torch.stack((x[:-1], x[1:]), dim=1).tolist() for x in (starts, key_starts)), strict=True
    ):
        q, k, v = (x.transpose(0, 1)[None] for x in (query[a:b], key[c:d], value[c:d]))
        mask = causal_lower_right(b - a, d - c)
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True))
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)
