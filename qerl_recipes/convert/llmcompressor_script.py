"""Runs in llmcompressor's own environment, as a script whose one argument is the job as JSON."""

import json
import sys

LENGTH = 2048  # tokens of a text, as in the paper's calibration set


def main(job: dict) -> None:
    """Calibrate and write ``job["destination"]``; ``job["used"]`` becomes a file that says on what."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with open(job["calibration"], encoding="utf-8") as stream:
        texts = [json.loads(line) for line in stream if line.strip()]
    tokenizer = AutoTokenizer.from_pretrained(job["source"])
    whole = [tokens_of(text, tokenizer) for text in texts[: job["samples"]]]
    rows = [row[:LENGTH] for row in whole if row]
    if not rows:
        raise ValueError(f"{job['calibration']}: holds no text")
    used = {"texts": len(rows), "of": len(texts), "tokens": sum(map(len, rows)), "longest": LENGTH}
    used["cut"] = sum(len(row) > LENGTH for row in whole)
    with open(job["used"], "w", encoding="utf-8") as stream:
        json.dump(used, stream)
    data = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows])
    model = AutoModelForCausalLM.from_pretrained(job["source"], dtype=torch.bfloat16)
    oneshot(
        model=model,
        processor=tokenizer,
        dataset=data,
        recipe=recipe(job["method"], job["ignore"]),
        num_calibration_samples=len(rows),
        max_seq_length=LENGTH,
    )
    model.save_pretrained(job["destination"], save_compressed=True)


def tokens_of(text: dict, tokenizer) -> list:
    """The tokens of a line of the file: its own, where it has them and they are this model's."""
    if not isinstance(text, dict) or not isinstance(text.get("text"), str):
        raise ValueError(f'each line must be a JSON object with a text under the key "text", not {str(text)[:80]}')
    ids = text.get("input_ids")
    if ids is None:
        return tokenizer(text["text"])["input_ids"]
    if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text["text"]:
        raise ValueError("input_ids are not the tokens of their text in this model: the file was made with another one")
    return ids


def recipe(method: str, ignore: list[str]) -> list:
    """llmcompressor's modifiers."""
    if method == "gptq":
        from llmcompressor.modifiers.quantization import GPTQModifier

        return [GPTQModifier(targets="Linear", scheme="NVFP4A16", ignore=ignore)]
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return [AWQModifier(duo_scaling="both"), QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=ignore)]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
