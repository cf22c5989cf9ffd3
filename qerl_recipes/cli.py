"""Define the command ``qerl``. Each subcommand only calls the function that does the work."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:
    sys.exit(
        "qerl: the package typer is missing, which vLLM brings: install vLLM 0.26 to 0.32 first, then qerl beside it"
    )

from qerl_recipes.bench.commands import PASS_THROUGH, bench
from qerl_recipes.convert import commands

app = typer.Typer(
    name="qerl",
    help="Reinforcement learning on frozen NVFP4 weights, with vLLM and TRL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # the help shows --output-dir; --output_dir, as recipes spell their keys, is accepted too
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)
app.add_typer(bench, name="bench")


def _show_version(show: bool) -> None:
    if show:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"qerl {version('qerl-vllm')}")
        except PackageNotFoundError:
            typer.echo("qerl, run from a checkout that is not installed")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """Reinforcement learning on frozen NVFP4 weights, with vLLM and TRL."""


app.command()(commands.quantize)
app.command("calibration-texts", context_settings=PASS_THROUGH)(commands.calibration_texts)
app.command("import-smollm2")(commands.import_smollm2)
app.command("text-model")(commands.text_model)


@app.command(context_settings=PASS_THROUGH, add_help_option=False)  # the recipe's parser answers --help
def train(context: typer.Context) -> None:
    """Train an adapter: qerl train --config RECIPE.yaml [--any_key value ...]"""
    from qerl_recipes.train.run import main as run

    run(context.args)


@app.command(context_settings=PASS_THROUGH)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="NVFP4 or BF16 checkpoint: a folder or a model id")],
) -> None:
    """Start vLLM's OpenAI server on NVFP4 weights; every option of `vllm serve` may follow."""
    from qerl_recipes.machine.serve import serve as run

    run(model, context.args)


@app.command()
def evaluate(
    base: Annotated[str, typer.Argument(help="NVFP4 or BF16 checkpoint: a folder or a model id")],
    tasks: Annotated[
        str,
        typer.Option(
            help="gsm8k, math_500, aime24, aime25, amc23, running_sum, jsonl:PATH, jsonl-accuracy:PATH, "
            "jsonl-exact:PATH, jsonl-number:PATH; comma-separated"
        ),
    ],
    output_dir: Annotated[Path, typer.Option(help="for evaluation.json and answers")],
    adapter: Annotated[
        str | None, typer.Option(help="folder of a trained adapter, or of the run that trained it")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="qerl_nvfp4, bf16 or nf4; default: what the adapter was trained on")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; default: as in training")] = None,
    temperature: Annotated[float, typer.Option(help="0: greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="above temperature 0")] = 1.0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="default: as in training, else each task's own"),
    ] = None,
    max_model_length: Annotated[
        int | None,
        typer.Option(help="of prompt and answer, default: the model's"),
    ] = None,
    tensor_parallel_size: int = 1,
    num_samples: Annotated[int, typer.Option(help="answers to each problem")] = 1,
    max_samples: Annotated[int | None, typer.Option(help="problems of each task, default: all")] = None,
    num_fewshot: Annotated[int, typer.Option(help="solved problems shown before each (gsm8k)")] = 0,
    seed: Annotated[int | None, typer.Option(help="of sampling above temperature 0, default: 0")] = None,
    use_chat_template: Annotated[
        bool | None,
        typer.Option("--use-chat-template/--no-chat-template", help="default: if there is one"),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="Jinja text or a file; default: as in training"),
    ] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            help='JSON, such as {"enable_thinking": false}; default: as in training',
        ),
    ] = None,
    system_prompt: Annotated[
        str | None,
        typer.Option(help='default: as in training; "" is none'),
    ] = None,
    generation_kwargs: Annotated[
        str | None,
        typer.Option(help='JSON of SamplingParams, such as {"stop": ["</answer>"]}; default: as in training'),
    ] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="share for vLLM")] = 0.9,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            help="size of vLLM's KV cache, unmeasured: for several engines on one GPU",
        ),
    ] = None,
    adapter_only: Annotated[bool, typer.Option(help="leave the base out, where it was judged before")] = False,
) -> None:
    """Measure the accuracy of a base, and of the base with an adapter, through lighteval on one engine."""
    from qerl_recipes.evaluate.run import evaluate as run

    run(
        base,
        adapter,
        [task.strip() for task in tasks.split(",")],
        output_dir=output_dir,
        quantization=quantization,
        dtype=dtype,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        max_model_length=max_model_length,
        tensor_parallel_size=tensor_parallel_size,
        num_samples=num_samples,
        max_samples=max_samples,
        num_fewshot=num_fewshot,
        seed=seed,
        use_chat_template=use_chat_template,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        system_prompt=system_prompt,
        generation_kwargs=generation_kwargs,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        adapter_only=adapter_only,
    )


@app.command()
def export(
    adapter: Annotated[Path, typer.Argument(help="folder of a trained adapter, or of the run that trained it")],
    destination: Annotated[Path, typer.Argument(help="folder to write; it appears only when it is complete")],
    merge: Annotated[bool, typer.Option(help="write base + adapter as one BF16 checkpoint")] = False,
    base: Annotated[str | None, typer.Option(help="folder or model id, default: what the adapter says")] = None,
    name: Annotated[
        str | None, typer.Option(help="of the adapter, in the card's commands, default: policy; not with --merge")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="replace the destination if it exists")] = False,
    measure: Annotated[
        str | None,
        typer.Option(help="with --merge: how much of the gain on this task of `qerl evaluate` survives the merge"),
    ] = None,
    max_samples: Annotated[int | None, typer.Option(help="problems for --measure, default: all")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="vLLM's share for --measure, default: 0.9")
    ] = None,
) -> None:
    """Write an adapter as a self-contained folder for PEFT and stock vLLM, or merge it into its base."""
    from qerl_recipes.convert.export import export as run
    from qerl_recipes.convert.export import written
    from qerl_recipes.evaluate.request import check

    if measure is not None:
        if not merge:
            raise typer.BadParameter("--measure compares a merged checkpoint with its adapter: add --merge")
        check([measure])  # the merge, which may take minutes, comes after this
    elif max_samples is not None or gpu_memory_utilization is not None:
        option = "--gpu_memory_utilization" if max_samples is None else "--max_samples"
        raise typer.BadParameter(f"{option} is of --measure TASK; name one or remove it")
    typer.echo(written(run(adapter, destination, base=base, merge=merge, overwrite=overwrite, name=name)))
    if measure is not None:
        from qerl_recipes.evaluate.survival import measure as survive

        memory = {} if gpu_memory_utilization is None else {"gpu_memory_utilization": gpu_memory_utilization}
        survive(adapter, destination, measure, base=base, max_samples=max_samples, **memory)


@app.command(context_settings=PASS_THROUGH)
def doctor(
    context: typer.Context,
    recipe: Annotated[
        Path | None, typer.Option(help="plan the GPU memory of this recipe; flags of `qerl train` may follow")
    ] = None,
    gpu_memory: Annotated[float | None, typer.Option(help="GB to plan for, default: this machine's GPU")] = None,
    mismatch: Annotated[
        Path | None,
        typer.Option(
            help="folder of a run: how its engine and trainer differ, part by part; flags of `qerl train` may follow"
        ),
    ] = None,
    problems: Annotated[int | None, typer.Option(help="to sample for --mismatch, default: 16")] = None,
) -> None:
    """Say what this machine can do, or plan a recipe's GPU memory, or measure how a run's engine and trainer differ."""
    if mismatch is not None:
        if recipe is not None or gpu_memory is not None:
            raise typer.BadParameter("--mismatch takes the recipe of the run; remove --recipe and --gpu_memory")
        from qerl_recipes.train.mismatch import run as compare

        raise typer.Exit(compare(mismatch, context.args, 16 if problems is None else problems))
    if problems is not None:
        raise typer.BadParameter("--problems needs a run to sample from: add --mismatch RUN")
    if recipe is not None:
        from qerl_recipes.memory.table import run as plan

        raise typer.Exit(plan(recipe, context.args, gpu_memory))
    if context.args or gpu_memory is not None:
        flags = [*(["--gpu_memory"] if gpu_memory is not None else []), *context.args]
        raise typer.BadParameter(f"{' '.join(flags)} needs a recipe to plan for: add --recipe FILE.yaml")
    from qerl_recipes.machine.doctor import run

    raise typer.Exit(run())


@app.command("evaluate-each", hidden=True)
def evaluate_each(
    evaluations: Annotated[str, typer.Argument(help="JSON: a list of objects with the options of qerl evaluate")],
) -> None:
    """Run several evaluations one after the other, on one engine where they can share it. `qerl study` calls this."""
    from qerl_recipes.evaluate.run import evaluate_each as run
    from qerl_recipes.evaluate.settled import Evaluation

    run([Evaluation(**options) for options in json.loads(evaluations)])


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="output folder of a training run")]) -> None:
    """Write report.html with the plots of a run."""
    from qerl_recipes.evaluate.report import write

    typer.echo(write(folder))


@app.command()
def study(
    file: Annotated[Path, typer.Argument(help="study file, such as recipes/studies/demo.yaml, or a folder of them")],
    output: Annotated[Path | None, typer.Option(help="its folder, default: runs/studies/NAME")] = None,
    jobs: Annotated[int, typer.Option(help="trainings or evaluations at a time, dealt out to the visible GPUs")] = 1,
    minutes: Annotated[
        float | None, typer.Option(help="then everything saves its state and ends; the same command goes on")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="run nothing: make page and pictures anew from this results.csv.gz")
    ] = None,
    finished: Annotated[
        Path | None, typer.Option(help="a results.csv.gz of this study: the runs in it are not made again")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="run nothing: check the arms and print the plan")] = False,
) -> None:
    """Train and evaluate arms x seeds of a recipe, and compare arms, paired by seed. Finished runs are not repeated.

    Given a FOLDER, run nothing: rewrite the page of each study from its NAME/results.csv.gz, and one page over all.
    """
    if file.is_dir():
        from qerl_recipes.study.conduct import sum_up

        if output or table or finished or dry_run or minutes is not None or jobs != 1:
            raise typer.BadParameter(f"{file} is a folder of studies: it takes no options; name one of its files")
        typer.echo(sum_up(file))
        return
    if (table or dry_run) and (finished or output or minutes is not None or jobs != 1 or (table and dry_run)):
        raise typer.BadParameter(
            "--table and --dry-run run nothing: leave --finished, --output, --minutes and --jobs out, and the other of "
            "the two; the page of a --table lies beside it"
        )
    if dry_run:
        from qerl_recipes.study.check import check
        from qerl_recipes.study.outline import outline
        from qerl_recipes.study.plan import read

        plan = read(file)
        check(plan)
        typer.echo(outline(plan, file))
        return
    from qerl_recipes.study.conduct import conduct

    typer.echo(conduct(file, output, jobs=jobs, minutes=minutes, table=table, finished=finished))


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="study file, such as recipes/studies/smollm2_rank.yaml")],
    a: Annotated[str, typer.Argument(help="an arm as the table names it; ARM@VALUE in a study with a sweep")],
    b: Annotated[str, typer.Argument(help="another")],
    metric: Annotated[str, typer.Option(help="of the table, such as reward_area, mismatch, reward")] = "accuracy",
    steps: Annotated[str | None, typer.Option(help="FIRST-LAST: its mean over these, not its last value")] = None,
    table: Annotated[Path | None, typer.Option(help="default: NAME/results.csv.gz beside the study file")] = None,
) -> None:
    """Print A - B from a study's table, paired by seed: for comparisons that the study file did not plan."""
    from qerl_recipes.study.compare import compare as compared

    typer.echo(compared(file, a, b, metric, steps, table))


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
    from qerl_recipes.demo.run import run

    raise typer.Exit(run(output=output, seed=seed, steps=steps, problems=problems, from_scratch=from_scratch) or 0)


def main() -> None:
    """Run the command line; print a refusal as one message and exit with 2. QERL_TRACEBACK=1 shows the traceback."""
    from qerl_recipes.machine.environment import prepare

    prepare()  # before anything imports vllm or torch
    try:
        app()
    except (ValueError, OSError, MemoryError) as error:  # the project raises these for bad input, or for too much
        if os.environ.get("QERL_TRACEBACK"):
            raise
        print(f"qerl: {error}\n(QERL_TRACEBACK=1 shows the traceback)", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
