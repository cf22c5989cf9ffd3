#!/usr/bin/env bash
# Runs the GPU tests and prints their table, with versions, commit and date; needs one NVIDIA GPU and vLLM for CUDA.
#   tests/gpu/run.sh [FILE ...] [pytest options]
# Each file has a process of its own: an engine's memory is free again only when its process ends.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
export VLLM_ENABLE_V1_MULTIPROCESSING=0
unset TORCHDYNAMO_DISABLE
files=() options=()
for argument in "$@"; do
  if [[ -e "$argument" ]]; then files+=("$argument"); else options+=("$argument"); fi
done
if [[ ${#files[@]} -eq 0 ]]; then # every file with a test of its kind, wherever it lies
  mapfile -t files < <(grep -rl 'pytest\.mark\.gpu' tests --include='test_*.py' | sort)
fi
results="${QERL_GPU_RESULTS:-gpu_results.json}"
parts="$(mktemp -d)"
trap 'rm -rf "$parts"' EXIT
status=0
for file in "${files[@]}"; do
  QERL_GPU_RESULTS="$parts/$(basename "$file" .py).json" \
    python -m pytest -q -m gpu -p no:cacheprovider "$file" ${options[@]+"${options[@]}"}
  code=$?
  [[ $code -eq 0 || $code -eq 5 ]] || status=1 # 5: the options leave none of this file's tests
done
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python - "$results" "$parts"/*.json <<'PY'
import datetime, importlib.metadata as metadata, json, os, subprocess, sys
commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
versions = {name: metadata.version(name) for name in ("vllm", "torch", "transformers", "trl", "peft")}
print(datetime.date.today(), "commit", commit or "unknown", versions)
rows = [row for path in sys.argv[2:] if os.path.exists(path) for row in json.load(open(path))]
for row in rows:
    print(f"{row['what']:<90} {row['figure']}")
json.dump(rows, open(sys.argv[1], "w"), indent=1)
PY
exit $status
