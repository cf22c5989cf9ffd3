"""The command ``qerl``. Each subcommand only calls the function that owns the work."""

import os
import sys
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
    ignore: Annotated[
        list[str] | None, typer.Option(help="layer kept in BF16; may be repeated; default: lm_head")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help='for gptq: a JSONL file of texts under the key "text"')
    ] = None,
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
        calibration=calibration,
    )


@app.command(context_settings=PASS_THROUGH, add_help_option=False)  # its --help is that of the recipe's parser
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
    shape: Annotated[str, typer.Option(help="Qwen2.5 size: 0.5B, 1.5B, 3B, 7B, 14B, 32B; or tiny, for a CPU")] = "7B",
    batch: Annotated[str, typer.Option(help="batch sizes, comma-separated")] = "1,8,64,128",
    arms: Annotated[
        str,
        typer.Option(help="of bf16, nf4, qerl_nvfp4, qerl_nvfp4_base (no adapter), _slots, _slots_marlin, stock_nvfp4"),
    ] = "bf16,qerl_nvfp4",
    rank: Annotated[int, typer.Option(help="rank of the LoRA adapter, which is on in every arm")] = 32,
    output: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Decode throughput with an adapter on random weights of the real shapes; nothing is downloaded."""
    from qerl_recipes.bench_rollout import run

    try:
        sizes = [int(size) for size in batch.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"--batch is {batch!r}; it is whole numbers, comma-separated, such as 1,8,64"
        ) from error
    run(shape, sizes, arms=arms.split(","), rank=rank, output=output)


@bench.command()
def swap(
    shape: Annotated[str, typer.Option(help="Qwen2.5 size: 0.5B, 1.5B, 3B, 7B, 14B, 32B; or tiny, for a CPU")] = "7B",
    rank: Annotated[int, typer.Option(help="rank of the adapter")] = 32,
    output: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """How long a change of policy takes: an adapter on the engine's own device, and the noise."""
    from qerl_recipes.bench_swap import run

    run(shape, rank=rank, output=output)


@bench.command()
def kernels(
    output: Annotated[Path, typer.Option(help="JSON file to write")] = Path("kernels.json"),
    shapes: Annotated[
        str | None, typer.Option(help='layers, comma-separated, such as "7B o,32B down"; default: all')
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="batch sizes M, comma-separated; default: those of the table")
    ] = None,
    tune: Annotated[
        bool, typer.Option(help="time every variant of our kernel instead, and make the table of variants anew")
    ] = False,
) -> None:
    """The linear kernels against cuBLAS BF16, Marlin and Humming, each behind its gate (a Hopper GPU, a checkout)."""
    from qerl_recipes.bench_kernels import run

    raise typer.Exit(run(output, shapes=shapes, tokens=tokens, tune=tune))


@bench.command("train", context_settings=PASS_THROUGH)
def bench_train(
    context: typer.Context,
    shape: Annotated[str, typer.Option(help="Qwen2.5 size: 0.5B, 1.5B, 3B, 7B, 14B, 32B; or tiny, for a CPU")] = "7B",
    arms: Annotated[
        str, typer.Option(help="of bf16, nf4, qerl_nvfp4; ratios are to the first")
    ] = "bf16,nf4,qerl_nvfp4",
    groups: Annotated[int, typer.Option(help="prompts of a step")] = 8,
    generations: Annotated[int, typer.Option(help="completions of a prompt")] = 8,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 256,
    completion: Annotated[int, typer.Option(help="tokens of a completion, all of which are generated")] = 1024,
    steps: Annotated[int, typer.Option(help="GRPO steps of each arm, the first of which warms up")] = 3,
    rank: Annotated[int, typer.Option(help="rank of the LoRA adapter")] = 32,
    seed: Annotated[int, typer.Option(help="of weights, prompts, sampling and adapter")] = 0,
    part: Annotated[str, typer.Option(help="step; training: forward and backward of one packed row; or all")] = "all",
    profile: Annotated[bool, typer.Option(help="also say which kernels forward and backward consist of")] = False,
    gpu_memory_gb: Annotated[
        float | None,
        typer.Option("--gpu-memory-gb", "--gpu_memory_gb", help="GB of the GPU that may be used; the rest is blocked"),
    ] = None,
    scratch: Annotated[Path | None, typer.Option(help="folder for the random checkpoints, such as /dev/shm")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file to write, with a picture beside it")] = None,
) -> None:
    """A whole GRPO step in each arm, on random weights of the real shapes. Flags of `qerl train` may follow."""
    from qerl_recipes.bench_train import run
    from qerl_recipes.bench_train_workload import Workload, parse_overrides

    overrides = parse_overrides(context.args)
    work = Workload(shape, groups, generations, prompt, completion, steps, rank, seed, overrides)
    memory = None if gpu_memory_gb is None else int(gpu_memory_gb * 1e9)
    result = run(work, arms=arms.split(","), part=part, profile=profile, memory=memory, scratch=scratch, output=output)
    raise typer.Exit(int(any("failed" in found for found in result["arms"].values())))


@app.command()
def evaluate(
    base: Annotated[str, typer.Argument(help="NVFP4 or BF16 checkpoint: a folder or a model id")],
    tasks: Annotated[str, typer.Option(help="gsm8k, math_500, aime24, aime25, amc23, running_sum, jsonl:PATH; a,b,c")],
    output_dir: Annotated[Path, typer.Option("--output-dir", "--output_dir", help="for evaluation.json and answers")],
    adapter: Annotated[str | None, typer.Option(help="folder of a trained adapter")] = None,
    quantization: Annotated[str, typer.Option(help="qerl_nvfp4, bf16 or nf4")] = "qerl_nvfp4",
    temperature: Annotated[float, typer.Option(help="0: greedy")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", "--top_p")] = 1.0,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "--max_new_tokens", help="default: each task's own")
    ] = None,
    max_model_length: Annotated[
        int | None,
        typer.Option("--max-model-length", "--max_model_length", help="of prompt and answer, default: the model's"),
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", "--tensor_parallel_size")] = 1,
    num_samples: Annotated[int, typer.Option("--num-samples", "--num_samples", help="answers to each problem")] = 1,
    max_samples: Annotated[
        int | None, typer.Option("--max-samples", "--max_samples", help="problems of each task, default: all")
    ] = None,
    seed: Annotated[int, typer.Option(help="of sampling")] = 0,
    use_chat_template: Annotated[
        bool | None,
        typer.Option("--use-chat-template/--no-chat-template", help="default: if there is one"),
    ] = None,
    system_prompt: Annotated[str | None, typer.Option("--system-prompt", "--system_prompt")] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option("--gpu-memory-utilization", "--gpu_memory_utilization", help="share for vLLM")
    ] = 0.9,
) -> None:
    """Measure the accuracy of a base, and of the base with an adapter, through lighteval on one engine."""
    from qerl_recipes.evaluate import evaluate as run

    run(
        base,
        adapter,
        [task.strip() for task in tasks.split(",")],
        output_dir=output_dir,
        quantization=quantization,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        max_model_length=max_model_length,
        tensor_parallel_size=tensor_parallel_size,
        num_samples=num_samples,
        max_samples=max_samples,
        seed=seed,
        use_chat_template=use_chat_template,
        system_prompt=system_prompt,
        gpu_memory_utilization=gpu_memory_utilization,
    )


@app.command()
def export(
    adapter: Annotated[Path, typer.Argument(help="folder of a trained adapter")],
    destination: Annotated[Path, typer.Argument(help="folder to write; it appears only when it is complete")],
    merge: Annotated[bool, typer.Option(help="write base + adapter as one BF16 checkpoint")] = False,
    base: Annotated[str | None, typer.Option(help="folder or model id, default: what the adapter says")] = None,
    name: Annotated[str, typer.Option(help="of the adapter, in the card's commands")] = "policy",
    overwrite: Annotated[bool, typer.Option(help="replace the destination if it exists")] = False,
) -> None:
    """Write an adapter as a folder that stands by itself, for PEFT and stock vLLM, or merged into its base."""
    from qerl_recipes.export import export as run

    typer.echo(run(adapter, destination, base=base, merge=merge, overwrite=overwrite, name=name))


@app.command(context_settings=PASS_THROUGH)
def doctor(
    context: typer.Context,
    recipe: Annotated[
        Path | None, typer.Option(help="plan the GPU memory of this recipe; flags of `qerl train` may follow")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory", "--gpu_memory", help="GB to plan for, default: this machine's GPU")
    ] = None,
) -> None:
    """Say what this machine can do and check one layer for exactness, or plan the GPU memory of a recipe."""
    if recipe is not None:
        from qerl_recipes.memory_table import run as plan

        raise typer.Exit(plan(recipe, context.args, gpu_memory))
    if context.args or gpu_memory is not None:
        given = [*(["--gpu_memory"] if gpu_memory is not None else []), *context.args]
        raise typer.BadParameter(f"{' '.join(given)} needs a recipe to plan for: add --recipe FILE.yaml")
    from qerl_recipes.doctor import run

    raise typer.Exit(run())


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
    """Entry point. A refusal is printed as one message; QERL_TRACEBACK=1 shows where it came from."""
    from qerl_recipes.environment import prepare

    prepare()  # before anything imports vllm or torch
    try:
        app()
    except (ValueError, OSError, MemoryError) as error:  # what the whole project raises for bad input, or too much
        if os.environ.get("QERL_TRACEBACK"):
            raise
        print(f"qerl: {error}\n(QERL_TRACEBACK=1 shows the traceback)", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
