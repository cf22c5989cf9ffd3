"""The commands of ``qerl bench``. Each only calls the function that owns the work."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
SHAPE = "Qwen2.5 size: 0.5B, 1.5B, 3B, 7B, 14B, 32B; 30B-A3B, Qwen3's mixture of experts; tiny or tiny-moe, for a CPU"
bench = typer.Typer(help="Measure speed.", no_args_is_help=True)


@bench.command()
def rollout(
    shape: Annotated[str, typer.Option(help=SHAPE)] = "7B",
    batch: Annotated[str, typer.Option(help="numbers of sequences, comma-separated")] = "1,8,64,128",
    input_len: Annotated[str, typer.Option(help="tokens in: one number, or one for each batch")] = "128",
    output_len: Annotated[str, typer.Option(help="tokens out: one number, or one for each batch")] = "128",
    arms: Annotated[
        str,
        typer.Option(
            help="of bf16_merged (no adapter), bf16 (LoRA slots), nf4, qerl_nvfp4, qerl_nvfp4_base (no adapter), "
            "_float16, _slots, _slots_marlin, stock_nvfp4"
        ),
    ] = "bf16_merged,bf16,qerl_nvfp4",
    rank: Annotated[int, typer.Option(help="rank of the LoRA adapter")] = 32,
    repeats: Annotated[
        int | None, typer.Option(help="of each case in a round, after one that warms up; default: 3")
    ] = None,
    rounds: Annotated[int, typer.Option(help="how often all arms are run, one after the other: A B A B")] = 1,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(help="caches to measure each arm with, such as auto,fp8"),
    ] = "auto",
    profile: Annotated[
        bool, typer.Option(help="instead of rates: the kernels of a decode step halfway through the completions")
    ] = False,
    interleave: Annotated[
        bool, typer.Option(help="all arms' engines at once, on one GPU together; each repeat is measured arm by arm")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="more arguments of vllm.LLM, as JSON, such as '{\"async_scheduling\": false}'")
    ] = "{}",
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=JSON",
            help="measure each arm also as 'ARM, NAME' with these arguments of vllm.LLM above --engine's; repeatable",
        ),
    ] = None,
    scratch: Annotated[Path | None, typer.Option(help="folder for a mixture's checkpoint, such as /dev/shm")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Tokens per second of a rollout on random weights of the real shapes; nothing is downloaded."""
    from qerl_recipes.bench.rollout import run
    from qerl_recipes.bench.rollout_cases import make_cases

    lists = []
    for name, given in (("--batch", batch), ("--input_len", input_len), ("--output_len", output_len)):
        try:
            lists.append([int(number) for number in given.split(",")])
        except ValueError as error:
            raise typer.BadParameter(
                f"{name} is {given!r}; it is whole numbers, comma-separated, such as 1,8,64"
            ) from error
    result = run(
        shape,
        make_cases(*lists),
        arms=arms.split(","),
        engine=_json_object("--engine", engine),
        rank=rank,
        repeats=repeats,
        rounds=rounds,
        tensor_parallel_size=tensor_parallel_size,
        kv_cache_dtype=kv_cache_dtype.split(","),
        profile=profile,
        interleave=interleave,
        variants=_variants(variant or []),
        scratch=scratch,
        output=output,
    )
    raise typer.Exit(int(any("failed" in found for found in result["arms"].values())))


def _variants(given: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        name, equals, options = text.partition("=")
        if not equals:
            raise typer.BadParameter(
                f"--variant is {text!r}; it is NAME=JSON, such as 'sync={{\"async_scheduling\": false}}'"
            )
        if name in found:
            raise typer.BadParameter(f"--variant {name} is given twice; give each a name of its own")
        found[name] = _json_object(f"--variant {name}", options)
    return found


def _json_object(name: str, given: str) -> dict[str, Any]:
    try:
        found = json.loads(given)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"{name} is {given!r}, which is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{name} is {given!r}; it is a JSON object")
    return found


@bench.command()
def swap(
    shape: Annotated[str, typer.Option(help=SHAPE)] = "7B",
    rank: Annotated[int, typer.Option(help="rank of the adapter")] = 32,
    transport: Annotated[
        str,
        typer.Option(
            help="comma-separated, of auto (in process; as ipc on several GPUs), ipc (GPU to GPU), shared (from the "
            "CPU through shared memory), http (a server, both ways)"
        ),
    ] = "auto",
    tensor_parallel_size: int = 1,
    output: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """How long a change of policy takes: an adapter by each way to an engine, and the noise."""
    from qerl_recipes.bench.swap import run

    run(
        shape,
        rank=rank,
        transports=transport.split(","),
        tensor_parallel_size=tensor_parallel_size,
        output=output,
    )


@bench.command()
def soak(
    model: Annotated[
        str | None, typer.Option(help="folder of a checkpoint to serve; default: random weights of --shape")
    ] = None,
    shape: Annotated[str, typer.Option(help=SHAPE)] = "tiny",
    streams: Annotated[int, typer.Option(help="requests under way at a time")] = 64,
    minutes: Annotated[float, typer.Option(help="of load, a fifth of them without swaps; judging comes after")] = 10,
    api_server_count: Annotated[
        int,
        typer.Option(help="processes that take requests"),
    ] = 1,
    seed: Annotated[int, typer.Option(help="of weights, prompts, adapters and noise")] = 0,
    output: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """A server under load, its policy swapped every second, and every answer checked against the policy it names."""
    from qerl_recipes.bench.soak import run

    result = run(
        model=model,
        shape=shape,
        streams=streams,
        minutes=minutes,
        api_servers=api_server_count,
        seed=seed,
        output=output,
    )
    raise typer.Exit(int(bool(result["failed"])))


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
        bool, typer.Option(help="time variants of our kernel on random layers, and fit the rule that chooses anew")
    ] = False,
    random: Annotated[
        int | None, typer.Option(help="so many random layers and batch sizes up to 256, and as many up to 8192")
    ] = None,
    seed: Annotated[int, typer.Option(help="of --random and --tune")] = 1,
) -> None:
    """The linear kernels against cuBLAS BF16, Marlin and Humming, each behind its gate (a Hopper GPU, a checkout)."""
    from qerl_recipes.bench.kernels import run

    raise typer.Exit(run(output, shapes=shapes, tokens=tokens, tune=tune, random=random, seed=seed))


@bench.command("train", context_settings=PASS_THROUGH)
def bench_train(
    context: typer.Context,
    shape: Annotated[str, typer.Option(help=SHAPE)] = "7B",
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
    rounds: Annotated[int, typer.Option(help="how often all arms are run, one after the other: A B A B")] = 1,
    gpu_memory_gb: Annotated[
        float | None,
        typer.Option(help="GB of the GPU that may be used; the rest is blocked"),
    ] = None,
    scratch: Annotated[Path | None, typer.Option(help="folder for the random checkpoints, such as /dev/shm")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file to write, with a picture beside it")] = None,
) -> None:
    """A whole GRPO step in each arm, on random weights of the real shapes. Flags of `qerl train` may follow."""
    from qerl_recipes.bench.train import Workload, parse_overrides, run

    overrides = parse_overrides(context.args)
    work = Workload(shape, groups, generations, prompt, completion, steps, rank, seed, overrides)
    memory = None if gpu_memory_gb is None else int(gpu_memory_gb * 1e9)
    result = run(
        work,
        arms=arms.split(","),
        part=part,
        profile=profile,
        rounds=rounds,
        memory=memory,
        scratch=scratch,
        output=output,
    )
    raise typer.Exit(int(any("failed" in found for found in result["arms"].values())))
