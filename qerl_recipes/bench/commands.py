"""Define the commands of ``qerl bench``; those for the kernels lie beside them, in a checkout."""

import contextlib
import json
import runpy
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from qerl_recipes.recipe.keys import ENGINE_RANKS

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
SHAPE = "Qwen2.5 size: 0.5B, 1.5B, 3B, 7B, 14B, 32B; 30B-A3B, Qwen3's mixture of experts; tiny or tiny-moe, for a CPU"
KERNELS = Path(__file__).parents[2] / "kernels/bench"  # in a checkout
Shape = Annotated[str, typer.Option(help=SHAPE)]
Rank = Annotated[int, typer.Option(min=1, max=ENGINE_RANKS[-1], help="rank of the LoRA adapter")]
Output = Annotated[Path | None, typer.Option(help="JSON file to write")]
BY_THE_RECIPE = ("shape", "arms", "groups", "generations", "completion", "rank", "seed")  # options of `bench train`
bench = typer.Typer(help="Measure speed.", no_args_is_help=True)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not whole numbers, comma-separated, such as 1,8,64") from error


def _list(meaning: str) -> Any:
    return typer.Option(parser=_numbers, metavar="N,...", help=meaning)


def _json_object(text: str) -> dict[str, Any]:
    with contextlib.suppress(json.JSONDecodeError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise typer.BadParameter(f"{text!r} is not a JSON object, such as '{{\"async_scheduling\": false}}'")


def _variant(text: str) -> tuple[str, dict[str, Any]]:
    name, equals, options = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not NAME=JSON")
    return name, _json_object(options)


@bench.command()
def rollout(
    shape: Shape = "7B",
    batch: Annotated[Any, _list("numbers of sequences")] = "1,8,64,128",
    input_len: Annotated[Any, _list("tokens in: one number, or one for each batch")] = "128",
    output_len: Annotated[Any, _list("tokens out: one number, or one for each batch")] = "128",
    arms: Annotated[
        str,
        typer.Option(
            help="An arm is one of the engine configurations that are compared: bf16_merged "
            "(no adapter), bf16 (LoRA slots), nf4 (LoRA slots), qerl_nvfp4, qerl_nvfp4_base (no adapter), "
            "qerl_nvfp4_float16, qerl_nvfp4_slots_marlin; without this plugin: fp8_merged (no adapter) and fp8 "
            "(LoRA slots), which are W8A8 with a scale per output channel and per token, stock_nvfp4 (Marlin, LoRA "
            "slots), stock_nvfp4_humming (no adapter), stock_nvfp4_humming_slots"
        ),
    ] = "bf16_merged,bf16,qerl_nvfp4",
    rank: Annotated[Any, _list("ranks of the LoRA adapter; each takes an engine of its own")] = "32",
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|lognormal:MEAN,SIGMA,MAX",
            help="Measure each number of sequences also with completions of unequal lengths: drawn from a file of "
            "numbers of tokens, or at random; lognormal alone is lognormal:1440,0.8,4096.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Repeat each case this often, after one that warms up.")] = 3,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Measure each configuration with these caches, such as auto,fp8.")
    ] = "auto",
    profile: Annotated[bool, typer.Option("--profile", hidden=True)] = False,  # of earlier releases
    interleave: Annotated[
        bool, typer.Option(help="Start all engines at once on one GPU, and measure each repeat on one after the other.")
    ] = False,
    engine: Annotated[
        Any, typer.Option(parser=_json_object, metavar="JSON", help="more arguments of vllm.LLM, as --variant's")
    ] = "{}",
    variant: Annotated[
        list[Any] | None,
        typer.Option(
            parser=_variant,
            metavar="NAME=JSON",
            help="Measure each configuration also with these arguments of vllm.LLM above --engine's, such as "
            "'sync={\"async_scheduling\": false}'; repeatable.",
        ),
    ] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="folder for the checkpoint of a mixture or of nf4, such as /dev/shm")
    ] = None,
    output: Output = None,
) -> None:
    """Measure the tokens per second of a rollout on random weights of the real shapes; nothing is downloaded."""
    from qerl_recipes.bench.rollout import run
    from qerl_recipes.bench.rollout_arm import make_cases

    if profile:
        raise typer.BadParameter("--profile has gone, and rates alone are measured now; see `vllm bench latency`")
    variants = dict(variant or [])
    if len(variants) < len(variant or []):
        raise typer.BadParameter("--variant gives one name twice; give each a name of its own")
    result = run(
        shape,
        make_cases(batch, input_len, output_len),
        arms=arms.split(","),
        engine=engine,
        rank=rank,
        lengths=lengths,
        repeats=repeats,
        tensor_parallel_size=tensor_parallel_size,
        kv_cache_dtype=kv_cache_dtype.split(","),
        interleave=interleave,
        variants=variants,
        scratch=scratch,
        output=output,
    )
    raise typer.Exit(int(any("failed" in figures for figures in result["arms"].values())))


@bench.command()
def swap(
    shape: Shape = "7B",
    rank: Rank = 32,
    transport: Annotated[
        str,
        typer.Option(
            help="ways to measure, comma-separated: auto (in process; as ipc on several GPUs), ipc (GPU to GPU), "
            "shared (from the CPU through shared memory), http (a server, both ways)"
        ),
    ] = "auto",
    tensor_parallel_size: int = 1,
    output: Output = None,
) -> None:
    """Measure how long a change of policy takes: an adapter by each way to an engine, and the noise."""
    from qerl_recipes.bench.swap import run

    run(shape, rank=rank, transports=transport.split(","), tensor_parallel_size=tensor_parallel_size, output=output)


@bench.command(hidden=True, context_settings=PASS_THROUGH)
def soak() -> None:
    """Refuse: this has become `python tests/soak`, in a clone."""
    raise ValueError("`qerl bench soak` has gone: run `python tests/soak` in a clone; it takes the same options")


def _of_a_clone(script: str) -> Path:
    """Return a script that lies beside the kernels. Raises FileNotFoundError where there is no clone."""
    if not (KERNELS / script).is_file():
        raise FileNotFoundError(f"{KERNELS} is missing: the benchmark is part of the source tree; run it from a clone")
    return KERNELS / script


@bench.command()
def scale(
    shape: Annotated[str, typer.Option(help="7B, 32B or 72B of Qwen2.5")] = "7B",
    completions: Annotated[int, typer.Option(help="completions of a step, dealt out to the GPUs")] = 1024,
    lengths: Annotated[
        str, typer.Option(metavar="FILE|lognormal:MEAN,SIGMA,MAX", help="tokens out, as for `qerl bench rollout`")
    ] = "lognormal",
    bandwidth_gb: Annotated[float, typer.Option(help="GB/s of a GPU to the next, for the all-reduce")] = 50,
    output: Output = None,
) -> None:
    """Compute a step on 1 to 512 GPUs, and an adapter's way to as many servers, from measured parts (checkout)."""
    compute = runpy.run_path(str(_of_a_clone("scale.py")))["run"]
    compute(shape, completions=completions, lengths=lengths, bandwidth_gb=bandwidth_gb, output=output)


@bench.command()
def kernels(
    output: Annotated[Path, typer.Option(help="JSON file to write")] = Path("kernels.json"),
    tune: Annotated[
        bool, typer.Option(help="time variants of our kernel on random layers, and fit the rule that chooses anew")
    ] = False,
    random: Annotated[
        int | None,
        typer.Option(help="number of random layers and batch sizes to draw up to 256, and as many up to 8192"),
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of --random and --tune")] = 1,
) -> None:
    """Time the linear kernels against cuBLAS BF16, Marlin and Humming once they are right (Hopper GPU, checkout)."""
    _of_a_clone("run.py")
    if tune and random is not None:
        raise ValueError("--tune and --random are two benchmarks: choose one")
    if random is not None and random < 1:
        raise ValueError(f"--random {random}: how many layers and batch sizes to draw; at least 1")
    output = output.resolve()
    scripts = [["run.py", "--out", str(output)]]
    if tune:  # the second sweep tries what the first shows to be good
        guided = output.with_stem(f"{output.stem}_guided")
        scripts = [
            ["tune.py", "--out", str(output), "--seed", str(seed)],
            ["fit.py", str(output)],
            ["tune.py", "--out", str(guided), "--seed", str(seed + 1), "--guided"],
            ["fit.py", str(output), str(guided)],
        ]
    if random is not None:
        scripts[0] += ["--random", str(random), "--seed", str(seed)]
    import torch

    from qerl_recipes.machine import processes

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ValueError("the kernels run on Hopper GPUs (H100, H200) only; there is none here")
    for script in scripts:
        if code := processes.run([sys.executable, *script], cwd=KERNELS):
            raise typer.Exit(code)


@bench.command("train", context_settings=PASS_THROUGH)
def bench_train(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="Time this recipe as `qerl train` runs it, on random weights of its model.")
    ] = None,
    shape: Shape = "7B",
    arms: Annotated[
        str,
        typer.Option(
            help="An arm is one of the training configurations that are compared: bf16, nf4, qerl_nvfp4; instead of "
            "this project: trl_stock (TRL's own trainer, in BF16) and fp8_rollout (an FP8 engine, made anew of the "
            "merged weights before each rollout, and BF16 training). Ratios are to the first."
        ),
    ] = "bf16,nf4,qerl_nvfp4",
    groups: Annotated[int, typer.Option(help="prompts of a step")] = 8,
    generations: Annotated[int, typer.Option(help="completions of a prompt")] = 8,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 256,
    completion: Annotated[int, typer.Option(help="tokens of a completion, all of which are generated")] = 1024,
    steps: Annotated[
        int, typer.Option(help="Make this many GRPO steps in each configuration; the first warms up.")
    ] = 3,
    rank: Rank = 32,
    seed: Annotated[int, typer.Option(help="seed of weights, prompts, sampling and adapter")] = 0,
    part: Annotated[str, typer.Option(hidden=True)] = "step",  # of earlier releases
    gpu_memory_gb: Annotated[
        float | None, typer.Option(help="GB of the GPU that may be used; the rest is blocked")
    ] = None,
    scratch: Annotated[Path | None, typer.Option(help="folder for the random checkpoints, such as /dev/shm")] = None,
    output: Output = None,
) -> None:
    """Time a whole GRPO step in each configuration, with random weights. Flags of `qerl train` may follow."""
    from qerl_recipes.bench.train import FIXED, FIXED_BESIDE_A_RECIPE, Workload, parse_overrides, run

    if part != "step":
        raise typer.BadParameter(f"--part is {part!r}, and whole steps alone are measured now; leave it out")
    overrides = parse_overrides(context.args, FIXED if config is None else FIXED_BESIDE_A_RECIPE)
    if config is None:
        work = Workload(shape, groups, generations, prompt, completion, steps, rank, seed, overrides)
    else:
        sources = {name: context.get_parameter_source(name) for name in BY_THE_RECIPE}
        if given := [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]:
            raise typer.BadParameter(f"--{given[0]} is not for --config: the recipe decides it; give its key as a flag")
        work, arms = Workload.of(config, prompt, steps, overrides)
    memory = None if gpu_memory_gb is None else int(gpu_memory_gb * 1e9)
    result = run(work, arms=arms.split(","), memory=memory, scratch=scratch, output=output)
    raise typer.Exit(int(any("failed" in figures for figures in result["arms"].values())))
