#!/usr/bin/env bash
# Runs the GPU tests and prints their table, with versions, commit and date; needs one NVIDIA GPU and vLLM for CUDA.
#   tests/gpu/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
export VLLM_ENABLE_V1_MULTIPROCESSING=0 QERL_GPU_RESULTS="${QERL_GPU_RESULTS:-gpu_results.json}"
unset TORCHDYNAMO_DISABLE
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python - <<'PY'
import datetime, importlib.metadata as metadata, subprocess
commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
versions = {name: metadata.version(name) for name in ("vllm", "torch", "transformers", "trl", "peft")}
print(datetime.date.today(), "commit", commit or "unknown", versions)
PY
python -m pytest -q -m gpu -p no:cacheprovider tests/gpu "$@"
