"""The command ``qerl``. Each subcommand only calls the function that owns the work."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="qerl",
    help="Reinforcement learning on frozen NVFP4 weights, with vLLM and TRL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command()
def quantize(
    source: Annotated[str, typer.Argument(help="a Hugging Face checkpoint: a folder, or a model id of the hub")],
    destination: Annotated[Path, typer.Argument(help="folder to write; it appears only when it is complete")],
    method: Annotated[str, typer.Option(help="rtn, gptq or awq (the last two run llmcompressor by itself)")] = "rtn",
    scales: Annotated[str, typer.Option(help="amax: llmcompressor's bits; mse: search each block's scale")] = "amax",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    ignore: Annotated[list[str] | None, typer.Option(help="layer kept in BF16; may be repeated [lm_head]")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace the destination if it exists")] = False,
) -> None:
    """Write an NVFP4 checkpoint (compressed-tensors nvfp4-pack-quantized), which stock vLLM loads too."""
    from qerl_recipes.quantize import quantize_checkpoint

    quantize_checkpoint(
        source,
        destination,
        method=method,
        scales=scales,
        device=device,
        ignore=tuple(ignore or ("lm_head",)),
        overwrite=overwrite,
    )


@app.command(context_settings=PASS_THROUGH)
def train(context: typer.Context) -> None:
    """Train an adapter: qerl train --config RECIPE.yaml [--any_key value ...]"""
    from qerl_recipes.train import main as run

    run(context.args)


@app.command(context_settings=PASS_THROUGH)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="NVFP4 or BF16 checkpoint: a folder or a model id")],
) -> None:
    """Start vLLM's OpenAI server on NVFP4 weights; every option of `vllm serve` may follow."""
    from qerl_recipes.serve import serve as run

    run(model, context.args)


bench = typer.Typer(help="Measure speed.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command()
def rollout(
    shape: Annotated[str, typer.Option(help="Qwen2.5 size: 0.5B, 1.5B, 3B, 7B, 14B, 32B")] = "7B",
    batch: Annotated[str, typer.Option(help="batch sizes, comma-separated")] = "1,8,64,128",
    arms: Annotated[str, typer.Option(help="of bf16, qerl_nvfp4, nf4; ratios are to the first")] = "bf16,qerl_nvfp4",
    rank: Annotated[int, typer.Option(help="rank of the LoRA adapter, which is on in every arm")] = 32,
    output: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Decode throughput with an adapter on random weights of the real shapes; nothing is downloaded."""
    from qerl_recipes.bench_rollout import run

    run(shape, [int(size) for size in batch.split(",")], arms=arms.split(","), rank=rank, output=output)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="output folder of a training run")]) -> None:
    """Write report.html with the plots of a run."""
    from qerl_recipes.report import write

    typer.echo(write(folder))


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="folder for everything the demo makes")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="of training; the same seed gives the same numbers")] = 0,
    steps: Annotated[int, typer.Option(help="GRPO steps")] = 60,
    problems: Annotated[int, typer.Option(help="held-out problems to evaluate on, up to 512")] = 512,
    from_scratch: Annotated[
        bool, typer.Option(help="train the starting model too, instead of the one shipped")
    ] = False,
) -> None:
    """Quantize, train and evaluate a 0.3M-parameter model on a CPU: it shows the wiring and nothing else."""
    from qerl_recipes.demo import run

    raise typer.Exit(run(output=output, seed=seed, steps=steps, problems=problems, from_scratch=from_scratch) or 0)


def main() -> None:
    """Entry point. A refusal (ValueError and its kin) is printed as one message, without a traceback."""
    from qerl_recipes.environment import prepare

    prepare()
    app()


if __name__ == "__main__":
    main()
