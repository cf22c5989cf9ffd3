"""Local files in the place of what a recipe would fetch from the hub."""

import json

import pytest

from qerl_recipes.convert.quantize import quantization_config
from qerl_recipes.recipe.shapes import config_json


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory):
    """Flags that point a recipe's data and the demo's model at local files of the same schema."""
    folder = tmp_path_factory.mktemp("stand_ins")
    gsm8k, big_math = folder / "gsm8k.jsonl", folder / "big_math.jsonl"
    gsm8k.write_text("".join(json.dumps({"question": f"{i}?", "answer": f"so\n#### {i}"}) + "\n" for i in range(80)))
    big_math.write_text("".join(json.dumps({"prompt": f"{i}?", "solution": f"{i}"}) + "\n" for i in range(80)))
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 256}))
    packed = folder / "packed"
    packed.mkdir()
    config = {**config_json("30B-A3B"), "quantization_config": quantization_config(["lm_head"])}
    (packed / "config.json").write_text(json.dumps(config))
    return {"gsm8k": gsm8k, "bigmath": big_math, "model": model, "packed": packed}
