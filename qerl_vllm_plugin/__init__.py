"""vLLM plugin: frozen NVFP4 weights, a policy adapter swapped in place, and noise on RMSNorm weights.

vllm serve MODEL --quantization qerl_nvfp4
"""

import sys

NAME = "qerl_nvfp4"  # what --quantization is given
TESTED_VLLM = ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; vLLM calls it once in each of its processes.

    Idempotent, and imports nothing that the calling process has not imported already.
    """
    from vllm.model_executor.layers.quantization import register_quantization_config

    from qerl_vllm_plugin.quantization import QerlConfig, is_registered

    if not is_registered():
        register_quantization_config(NAME)(QerlConfig)
    # processes that hold a worker have imported its module by now; the API server never does, and importing it
    # there would cost seconds
    if "vllm.v1.worker.worker_base" in sys.modules:
        from qerl_vllm_plugin.worker.methods import add_worker_methods

        add_worker_methods()
