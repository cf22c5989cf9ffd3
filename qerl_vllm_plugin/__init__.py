"""Extend vLLM with frozen NVFP4 weights, a policy adapter swapped in place, and noise on RMSNorm weights.

Start a server with ``vllm serve MODEL --quantization qerl_nvfp4``.
"""

import sys

NAME = "qerl_nvfp4"  # the value of --quantization
TESTED_VLLM = ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")


def register() -> None:
    """Register the plugin; vLLM calls this entry point of ``vllm.general_plugins`` in each of its processes.

    It is idempotent, and does not import vLLM's worker module unless the calling process has.
    """
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from qerl_vllm_plugin.quantization import QerlConfig

    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(QerlConfig)
    # a process that holds a worker has imported this module by now; the API server never does, where the import
    # would cost seconds
    if "vllm.v1.worker.worker_base" in sys.modules:
        from qerl_vllm_plugin.worker.methods import add_worker_methods

        add_worker_methods()
