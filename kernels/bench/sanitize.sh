#!/usr/bin/env bash
# compute-sanitizer over one kernel of each kind; needs a Hopper GPU and the CUDA toolkit's compute-sanitizer.
#   kernels/bench/sanitize.sh [TOOL ...]      TOOL: memcheck, racecheck, synccheck; without any, all three
# Each run is a process of its own under the tool, several at a time. The last line says how many were clean.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # so that a tool sees where each tensor ends
sanitizer="$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)"
if [[ -z "$sanitizer" ]]; then
  echo "compute-sanitizer is not here; it comes with the CUDA toolkit" >&2
  exit 2
fi
tools=("$@")
[[ $# -gt 0 ]] || tools=(memcheck racecheck synccheck)
kinds=(runs long_runs cluster synchronous shrink dequantize)
for kind in "${kinds[@]}"; do # compiled before, and right without a tool
  python kernels/bench/sanitize.py "$kind" || exit 1
done
python kernels/bench/sanitize.py runs float16 || exit 1
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT
check() { # TOOL KIND OPERAND
  local log="$logs/$1.$2.$3" ours=nvfp4
  [[ "$2" != shrink ]] || ours=adapter_shrink # torch's kernels are left out: they take most of the time
  timeout 90 "$sanitizer" --tool "$1" --error-exitcode 9 --kernel-regex "kns=$ours" \
    python kernels/bench/sanitize.py "$2" "$3" >"$log" 2>&1
  local code=$?
  echo "$1 $2 $3: exit $code, $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1)"
  [[ $code -eq 0 ]] || { grep -vE '^=+$' "$log" | head -25; touch "$logs/failed.$1.$2.$3"; }
}
for tool in "${tools[@]}"; do
  for kind in "${kinds[@]}"; do
    check "$tool" "$kind" bfloat16 &
    while [[ $(jobs -rp | wc -l) -ge 6 ]]; do wait -n; done
  done
  check "$tool" runs float16 &
done
wait
failed=$(find "$logs" -name 'failed.*' | wc -l)
echo "$((${#tools[@]} * (${#kinds[@]} + 1) - failed)) of $((${#tools[@]} * (${#kinds[@]} + 1))) clean"
[[ $failed -eq 0 ]]
