"""Quantize with llmcompressor. This script runs in llmcompressor's own environment; its argument is a job as JSON."""

import json
import sys


def main(job: dict) -> None:
    """Calibrate on the token ids in the file ``job["rows"]``, quantize, and write ``job["destination"]``."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with open(job["rows"], encoding="utf-8") as stream:
        rows = json.load(stream)
    data = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows])
    model = AutoModelForCausalLM.from_pretrained(job["source"], dtype=torch.bfloat16)
    oneshot(
        model=model,
        processor=AutoTokenizer.from_pretrained(job["source"]),
        dataset=data,
        recipe=recipe(job["method"], job["ignore"]),
        num_calibration_samples=len(rows),
        max_seq_length=max(map(len, rows)),
        shuffle_calibration_samples=False,  # shuffling has no seed: the bits would differ between runs
    )
    model.save_pretrained(job["destination"], save_compressed=True)


def recipe(method: str, ignore: list[str]) -> list:
    """Return llmcompressor's modifiers for ``gptq`` or ``awq``."""
    if method == "gptq":
        from llmcompressor.modifiers.quantization import GPTQModifier

        return [GPTQModifier(targets="Linear", scheme="NVFP4A16", ignore=ignore)]
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    return [AWQModifier(duo_scaling="both"), QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=ignore)]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
