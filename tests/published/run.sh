#!/usr/bin/env bash
# Train the demo's model in a published environment, in the root of a clone: tests/published/run.sh increment|2048|ors|catch
set -eu
export PYTHONPATH="$(dirname "$0"):.${PYTHONPATH:+:$PYTHONPATH}"

# The model writes digits alone, so its recipe gets the name of the call and of its argument.
demo() { sed "s#extends: ../#extends: recipes/demo/#; $1" recipes/demo/tools/higher_lower.yaml; }

case "${1:-}" in
increment) # increment.py: IncrementEnv of TRL's guide to GRPO
  demo 's/guess/increment/; s/number/step/' > increment.yaml
  qerl train --config increment.yaml --environments increment.IncrementEnv --max_steps 30 --output_dir runs/increment
  ;;
2048) # grpo_2048.py: TRL's examples/scripts/grpo_2048.py
  demo 's/guess/move/; s/number/direction/' > 2048.yaml
  qerl train --config 2048.yaml --environments grpo_2048.Game2048Env --reward_funcs grpo_2048.reward_score --reward_weights 1.0 \
    --max_tool_tokens 24 --vllm_max_model_length 256 --max_steps 2 --output_dir runs/2048
  ;;
ors) # server.py of `orwd init NAME`, which listens on port 8080
  export OPENREWARD_SESSION_URL=http://127.0.0.1:8080
  python -c 'import ors; ors.spec.train_dataset.to_json("ors.jsonl")'
  demo 's/guess/answer/; s/number/answer/' > ors.yaml
  qerl train --config ors.yaml --environments ors:spec.environment_factory --reward_funcs ors:spec.reward_funcs --reward_weights 1.0 \
    --dataset_name ors.jsonl --num_generations 64 --per_device_train_batch_size 64 --max_steps 20 --output_dir runs/ors
  ;;
catch) # multi_env.py: TRL's examples/scripts/openenv/multi_env.py; openspiel_env listens on port 8001
  # OpenEnv needs mcp below 2, vLLM 2 or newer: $OPENENV is an environment of its own, with TRL in it
  yes '{"prompt": [{"role": "user", "content": "Catch the ball. "}], "env": "catch"}' | head -n 64 > catch.jsonl
  demo 's/guess/stay/; s/{number: "{content}"}/{}/; s/ and call.function.arguments.number is defined//; s/ + call.function.arguments.number | string//' > catch.yaml
  qerl train --config catch.yaml --environments catch.Catch --environment_python "${OPENENV:?}/bin/python" --reward_funcs caught.caught \
    --reward_weights 1.0 --dataset_name catch.jsonl --num_generations 4 --per_device_train_batch_size 8 --max_tool_calling_iterations 10 \
    --max_tool_tokens 4 --max_completion_length 160 --vllm_max_model_length 256 --max_steps 3 --output_dir runs/catch
  ;;
*)
  sed -n 2p "$0" >&2
  exit 2
  ;;
esac
