"""Sample from the current policy with a vLLM in the trainer's process: the built-in rollout engine.

It is a ``RolloutEngine`` that also takes turns and lends its weights (``TakesTurns``, ``LendsWeights``).
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from vllm import LLM, SamplingParams

from qerl_recipes.files.base_model import read_config
from qerl_recipes.machine.gpu import this_gpu
from qerl_recipes.memory import estimates
from qerl_recipes.memory.sizes import measure
from qerl_recipes.recipe.generation import for_sampling_params, sampling_parameters
from qerl_recipes.rollout import sampling
from qerl_recipes.rollout.arms import engine_on_cpu, engine_options
from qerl_recipes.rollout.interface import Profiler
from qerl_recipes.rollout.sampling import Completion, Ended, Follow, Request, SeededRollouts
from qerl_vllm_plugin.compat import engine, scheduler
from qerl_vllm_plugin.compat.drafts import expand_on_cpu, search_beside_torch
from qerl_vllm_plugin.policy import Policy
from qerl_vllm_plugin.weights.frozen_weights import FrozenWeights, frozen_weights
from qerl_vllm_plugin.worker.kv_cache import KVCacheError


class VLLMRollouts(SeededRollouts):
    """Run vLLM with an arm's frozen weights, the policy's unmerged adapter and its noise, as a ``StartEngine``."""

    # of vLLM's sleep: 1 moves the weights to CPU memory; 2 would discard them, and only the checkpoint holds them
    sleep_level = 1

    def _start(self, base: str, rank: int, dtype: torch.dtype) -> None:
        training, accelerator = self._training, self._accelerator
        self._processes, self._tensor_parallel = accelerator.num_processes, training.vllm_tensor_parallel_size
        self._is_noisy = self._is_closed = self._is_asleep = self._is_lent = self._is_held = False
        self._tensor_parallel_group: Any = None  # of the trainer processes that share one engine
        if (size := self._tensor_parallel) > 1:
            ranks = [list(range(first, first + size)) for first in range(0, self._processes, size)]
            self._tensor_parallel_group, _ = torch.distributed.new_subgroups_by_enumeration(ranks)
        # run the engine in the trainer's process: adapters are passed as tensors, and sleep frees this process's GPU
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if training.vllm_speculative_config is not None:
            expand_on_cpu()
            search_beside_torch()
        self._sampling = self._sampling_options()
        with engine.start_in_this_process(self._parameters(Request([], seed=0, max_tokens=16))) as self.start_seconds:
            self.llm = LLM(**self._options(base, rank, dtype))
        self.longest = self.llm.llm_engine.model_config.max_model_len
        self.policy = Policy(self.llm)
        accelerator.wait_for_everyone()

    @property
    def version(self) -> int:
        return self.policy.version

    def begin(self, rollout: int, sigma: float | None) -> int:
        self._open(rollout)
        self.sync_weights()
        if sigma is None:
            self._clear_noise()
            return 0
        self._is_noisy = True
        training = self._training
        assert training.noise_seed is not None  # GRPOConfig sets it
        report = self.policy.set_noise(sigma, seed=training.noise_seed, rollout=rollout, targets=training.noise_targets)
        return report.noisy_norms

    def begin_evaluation(self) -> None:
        self._seeds.open("evaluation", 0)
        self.sync_weights()
        self._clear_noise()

    def _clear_noise(self) -> None:
        if self._is_noisy:
            self.policy.clear_noise()
        self._is_noisy = False

    def sync_weights(self) -> None:
        self._wake()
        current = self._snapshot()
        self.policy.swap(current.tensors, current.config, norms=current.norms)

    @contextlib.contextmanager
    def episodes(self) -> Iterator[None]:
        """Stay awake for all turns of a batch; then compute with the engine's other processes until all are done."""
        self._is_held = True
        try:
            with super().episodes():
                yield
            while self._compute([])[0]:
                pass
        finally:
            self._is_held = False
        self._sleep()

    def _complete(self, requests: list[Request], profiler: Profiler, follow: Follow | None = None) -> list[Completion]:
        self._wake()
        with self._timed(profiler):
            completions, first = self._compute(requests, follow)
        if not self._is_held:
            self._sleep()
        return completions[first : first + len(requests)]

    def _compute(self, requests: list[Request], follow: Follow | None = None) -> tuple[list[Completion], int]:
        """Return the completions of all ranks of this engine, each of which takes every step, and this rank's first."""
        everyones, first, is_followed = self._over_tensor_parallel(requests, follow is not None)
        if not everyones:
            return [], 0
        own = {first + place: place for place in range(len(requests))}  # this rank's number of a request, by everyone's
        asked = len(everyones)
        # vLLM draws from this process's generators, though every request has its own seed. The draws of the trainer,
        # and of the tools that run in between, must not depend on the engine.
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []

        def following(ended: list[Ended]) -> list[tuple[list[int], SamplingParams]]:
            nonlocal asked
            apart.close()
            mine = [(own[one.number], one.completion) for one in ended if one.number in own]
            requests = follow(mine) if follow is not None and mine else []
            everyones, first, _ = self._over_tensor_parallel(requests)
            own.update({asked + first + place: len(own) + place for place in range(len(requests))})
            asked += len(everyones)
            apart.enter_context(torch.random.fork_rng(devices))
            return [(one.prompt, self._parameters(one)) for one in everyones]

        with contextlib.ExitStack() as apart:
            apart.enter_context(torch.random.fork_rng(devices))
            prompts, parameters = [one.prompt for one in everyones], [self._parameters(one) for one in everyones]
            given = (self.llm, prompts, parameters, self.policy.request, following if is_followed else None)
            return sampling.generate(*given), first

    def serve_base(self) -> None:
        """Serve the base without adapter, trained norms and noise, until the next ``begin`` or ``sync_weights``."""
        self._wake()
        self.policy.swap(None)
        self._clear_noise()

    def score(self, prompts: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
        """Return the log-probability of each token of ``completions`` at temperature 1; vLLM needs room for one."""
        self._wake()
        outputs = self.llm.generate(
            [{"prompt_token_ids": p + c} for p, c in zip(prompts, completions, strict=True)],
            SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
            lora_request=self.policy.request,
            use_tqdm=False,
        )
        self._sleep()
        logprobs = []
        for prompt, completion, output in zip(prompts, completions, outputs, strict=True):
            candidates = output.prompt_logprobs[len(prompt) :]
            logprobs.append([at[token].logprob for at, token in zip(candidates, completion, strict=True)])
        return logprobs

    def frozen_weights(self) -> FrozenWeights:
        """Return views of the frozen weights, which sleep no more; raise NotShareableError if there can be none."""
        self._wake()
        weights = frozen_weights(self.llm)
        self._is_lent = True
        self._sleep()
        return weights

    def check_weights(self) -> None:
        """Raise KVCacheError if the trainer changed what a sleeping engine lent; call it before anything is saved."""
        if self._is_lent and self._is_asleep:
            self.policy.check_unchanged()

    def close(self) -> None:
        """Shut the engine down. Nothing can be generated afterwards; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_lent:
            with contextlib.suppress(KVCacheError):  # vLLM frees the cache, and fails if that has no memory
                self._wake()
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        if self._processes == 1:
            cleanup_dist_env_and_memory()

    def _options(self, base: str, rank: int, dtype: torch.dtype) -> dict[str, Any]:
        training, is_cpu = self._training, not torch.cuda.is_available()
        options: dict[str, Any] = {
            "model": base,
            "dtype": str(dtype).removeprefix("torch."),
            **engine_options(training.quantization, rank, read_config(base)),
            "tensor_parallel_size": self._tensor_parallel,
            "gpu_memory_utilization": training.vllm_gpu_memory_utilization,
            "max_model_len": training.vllm_max_model_length,
            "max_num_seqs": estimates.sequences(training),
            "enable_sleep_mode": training.vllm_enable_sleep_mode,
            # the same on all tensor-parallel ranks of one engine, so that they sample alike
            "seed": self._accelerator.process_index // self._tensor_parallel,
            # of the distribution that was sampled from, by which importance correction divides
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "scheduler_cls": scheduler.NAME,  # schedules the same as vLLM's, in less time
        }
        if isinstance(drafts := training.vllm_speculative_config, dict):
            # of earlier completions a resumed run has none, and would draft and draw otherwise
            without_history = {"suffix_decoding_max_cached_requests": 0} if drafts["method"] == "suffix" else {}
            options["speculative_config"] = {**drafts, **without_history}
        if is_cpu:
            options |= engine_on_cpu(base)
        else:
            options["max_num_batched_tokens"] = estimates.ENGINE_TOKENS  # vLLM reserves memory for a batch of so many
            counts_twice = training.vllm_enable_sleep_mode and not engine.counts_released_memory()
            if counts_twice or training.vllm_kv_cache_memory_bytes is not None:
                options |= self._planned_cache(base, rank, dtype)
        if self._processes > 1:
            options["distributed_executor_backend"] = "external_launcher"
        return options

    def _planned_cache(self, base: str, rank: int, dtype: torch.dtype) -> dict[str, Any]:
        """Return vLLM's options for the KV cache size that the recipe or the memory plan sets.

        The size is None if the plan leaves nothing; vLLM reports that itself. If the recipe sets the size,
        ``gpu_memory_utilization`` becomes the planned share of the whole engine, because vLLM requires that much to be
        free at its start.
        """
        gpu = this_gpu()
        assert gpu is not None
        planned = estimates.Engine(measure(read_config(base)), self._training, gpu, rank, dtype.itemsize)
        options: dict[str, Any] = {"kv_cache_memory_bytes": planned.cache if planned.cache > 0 else None}
        if self._training.vllm_kv_cache_memory_bytes is not None:
            options["gpu_memory_utilization"] = min((planned.beside_cache + planned.cache) / gpu.memory, 1.0)
        return options

    def _sampling_options(self) -> dict[str, Any]:
        # one flat list of log-probabilities instead of an object for each token
        options = {"flat_logprobs": True, **for_sampling_params(sampling_parameters(self._training))}
        # only stop strings need vLLM to decode tokens to text: the trainer decodes them itself
        options.setdefault("detokenize", bool(options.get("stop")))
        return options

    def _parameters(self, request: Request) -> SamplingParams:
        return SamplingParams(**{**self._sampling, **request.limits(self._sampling)})

    def _over_tensor_parallel(
        self, requests: list[Request], is_followed: bool = False
    ) -> tuple[list[Request], int, bool]:
        """Return the requests of all ranks of this engine, the index of this rank's first, and if any has followers."""
        if self._tensor_parallel_group is None:
            return requests, 0, is_followed
        gathered: list[Any] = [None] * self._tensor_parallel
        torch.distributed.all_gather_object(gathered, (requests, is_followed), group=self._tensor_parallel_group)
        # an adapter's gradient all-reduces are tiny: without a barrier their clean-up can race with vLLM's collectives
        torch.distributed.barrier(device_ids=[self._accelerator.local_process_index])
        before = gathered[: torch.distributed.get_rank(group=self._tensor_parallel_group)]
        first = sum(len(part) for part, _ in before)
        return [request for part, _ in gathered for request in part], first, any(one for _, one in gathered)

    def _sleep(self) -> None:
        """Free GPU memory for the trainer: of an engine that has lent its weights the KV cache alone."""
        if not self._training.vllm_enable_sleep_mode or self._is_asleep:
            return
        if self._is_lent:
            self.policy.release_kv_cache()
        else:
            self.llm.sleep(level=self.sleep_level)
        self._is_asleep = True

    def _wake(self) -> None:
        if not self._is_asleep:
            return
        torch.cuda.empty_cache()
        if self._is_lent:
            self.policy.resume_kv_cache()
        else:
            self.llm.wake_up()
        self._is_asleep = False
