"""``qerl bench train``: a whole GRPO step, rollout to optimizer, in each arm of an experiment.

Weights are random and of the real shapes, so nothing is downloaded, and completions have a fixed length, so that the
arms do the same work. Every arm runs in a process of its own, all on one GPU: where their memory permits, they are all
loaded and make their steps in turn, so that what slows the machine down for a while slows all of them down. Elsewhere
one runs after the other.
"""

import errno
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from qerl_recipes import bench_train_summary, bench_train_table
from qerl_recipes.bench_conditions import Device, conditions, save, this_device, used_bytes
from qerl_recipes.bench_train_process import ArmFailedError, ArmProcess
from qerl_recipes.bench_train_workload import Workload, engine_share, flags

ARMS = ("bf16", "nf4", "qerl_nvfp4")
PARTS = ("all", "step", "training")  # whole steps, forward and backward alone, or both

ANSWERS = {"step": "steps", "training": "training_part", "profile": "profile"}  # where the answers to a command go


def run(
    work: Workload,
    *,
    arms: Sequence[str] = ARMS,
    part: str = "all",
    profile: bool = False,
    memory: int | None = None,
    scratch: Path | None = None,
    output: Path | None = None,
) -> dict[str, Any]:
    """Measure every arm, print the table, and write it to ``output`` as JSON, with a picture beside it.

    ``profile`` adds where the time of forward and backward alone goes. ``memory`` (bytes) limits what all processes
    together may hold of the GPU. ``scratch`` is the folder for the random checkpoints, by default that of temporary
    files. An arm that fails is in the result with its reason, and the others go on. Raises ValueError for what cannot
    be measured, OSError where the checkpoints do not fit on the disk.
    """
    work.check()
    device = this_device()
    _check(arms, part, memory, device, work)
    rounds = {"step": 1 if part == "training" else work.steps, "training": 0 if part == "step" else work.steps}
    rounds |= {"profile": int(profile)}
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _leave))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qerl-bench-", dir=scratch)))
        _check_disk(work, arms, folder)
        if memory is not None:
            from qerl_recipes.bench_memory import ballast

            stack.enter_context(ballast(memory))
        recipes = {arm: _recipe(replace(work, steps=rounds["step"]), arm, device, memory) for arm in arms}
        requests = {arm: _request(work, arm, recipes[arm]["recipe"], folder, memory) for arm in arms}
        planned = sum(recipes[arm]["planned_bytes"] or 0 for arm in arms)
        in_turn = device is None or planned <= (memory or device.memory)
        found = {arm: {**recipes[arm], **{key: [] for key in ANSWERS.values()}} for arm in arms}
        result: dict[str, Any] = {
            **asdict(work),
            "overrides": dict(work.overrides),
            "order": "in turn, a step each" if in_turn else "one after the other",
            "memory_limit": memory,
            **conditions(),
            "arms": found,
        }
        for together in [list(arms)] if in_turn else [[arm] for arm in arms]:
            chosen = {arm: requests[arm] for arm in together}
            _measure(chosen, rounds, device, found, lambda: _save(result, output))
    _save(result, output)
    if output is not None:
        bench_train_table.picture(result, output.with_suffix(".png"))
    bench_train_table.show(result)
    return result


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the arms, gives the GPU back and removes the checkpoints: gigabytes, which nobody else would remove."""
    raise SystemExit(128 + number)


def _save(result: dict[str, Any], output: Path | None) -> None:
    """Write what there is so far: loading takes minutes, and a run may be cut short."""
    result["summary"] = bench_train_summary.summarize(result)
    save(result, output)


def _check(arms: Sequence[str], part: str, memory: int | None, device: Device | None, work: Workload) -> None:
    if unknown := sorted(set(arms) - set(ARMS)):
        raise ValueError(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")
    if not arms or len(set(arms)) < len(arms):
        raise ValueError(f"arms are {', '.join(arms) or 'missing'}; name each of them once")
    if part not in PARTS:
        raise ValueError(f"part is {part!r}; it is one of {', '.join(PARTS)}")
    if part != "step" and (kept := dict(work.overrides).get("checkpointed_layers")):
        from qerl_recipes.configs import AS_FEW_AS_FIT

        if kept == str(AS_FEW_AS_FIT):
            raise ValueError(
                f"checkpointed_layers: {kept} keeps what leaves room for the rows of a step, and forward and backward "
                "alone take a longer one; measure --part step, or name a number of layers"
            )
    if device is None and "nf4" in arms:
        raise ValueError("arm nf4 (bitsandbytes) needs a CUDA GPU; on this machine measure bf16 and qerl_nvfp4")
    if memory is not None and device is None:
        raise ValueError("a limit of GPU memory needs a CUDA GPU; leave it out here")
    if memory is not None and device is not None and not 0 < memory <= device.memory:
        raise ValueError(f"the limit is {memory / 1e9:g} GB and the GPU has {device.memory / 1e9:.0f} GB")


def _check_disk(work: Workload, arms: Sequence[str], folder: Path) -> None:
    from qerl_recipes.bench_checkpoint import size

    needed = sum(size(work.config(), packed=packed) for packed in {arm == "qerl_nvfp4" for arm in arms})
    free = shutil.disk_usage(folder).free
    if needed > 0.95 * free:
        message = f"{folder.parent} has {free / 1e9:.1f} GB free and the checkpoints take {needed / 1e9:.1f} GB; "
        raise OSError(errno.ENOSPC, message + "name another folder with --scratch, or fewer arms")


def _recipe(work: Workload, arm: str, device: Device | None, memory: int | None) -> dict[str, Any]:
    """The recipe of an arm; on a GPU with the engine's share, and the bytes that the arm should take at most.

    Worked out without touching the GPU. ``memory`` is the limit, which decides what ``checkpointed_layers: -1`` means.
    """
    if device is None:
        return {"recipe": work.recipe(arm, cuda=False), "planned_bytes": None}
    from qerl_recipes import memory_plan
    from qerl_recipes.configs import parse
    from qerl_recipes.memory_parts import Gpu
    from qerl_recipes.model_size import measure

    gpu, config, share = Gpu(device.memory, device.is_hopper), work.config(), None
    for _ in range(2):  # the second time with the share that the first one found
        settings = parse(flags(work.recipe(arm, cuda=False, engine_share=share)))
        plan = memory_plan.make(*settings, gpu=gpu, config=config, limit=memory)
        share = engine_share(plan, measure(config), work)
    print(f"{arm}: planned {plan.line()}", flush=True)
    recipe = work.recipe(arm, cuda=True, engine_share=share)
    if "checkpointed_layers" in recipe:
        recipe["checkpointed_layers"] = plan.checkpointed
    return {"recipe": recipe, "planned_bytes": plan.peak}


def _request(work: Workload, arm: str, recipe: Mapping[str, Any], folder: Path, memory: int | None) -> dict[str, Any]:
    """What the process of an arm is told, as ``bench_train_arm.Request`` has it."""
    packed = arm == "qerl_nvfp4"
    base = str(folder / ("nvfp4" if packed else "bf16"))
    paths = {"model_name_or_path": base, "output_dir": str(folder / arm)}
    request = {"flags": flags({**recipe, **paths}), "config": work.config(), "base": base, "packed": packed}
    return {**request, "seed": work.seed, "memory": memory}


def _measure(
    requests: Mapping[str, Mapping[str, Any]],
    rounds: Mapping[str, int],
    device: Device | None,
    found: dict[str, dict[str, Any]],
    save: Callable[[], None],
) -> None:
    """Load some arms, then let them take turns; what each answers, or why it failed, goes into ``found``.

    ``rounds`` says how often each piece of work is done; after each round everything is saved.
    """
    used = used_bytes if device else lambda: 0
    before = used()
    with ExitStack() as stack:
        running = {arm: stack.enter_context(ArmProcess(request)) for arm, request in requests.items()}

        def each(ask: Callable[[str], None]) -> None:
            """An arm that fails takes no further part."""
            for arm in list(running):
                try:
                    ask(arm)
                except ArmFailedError as error:
                    found[arm]["failed"] = str(error)
                    del running[arm]

        each(lambda arm: running[arm].wait_for_imports())
        already = (used() - before) // len(requests)
        # one at a time: vLLM measures free memory while it starts, and so does this
        each(lambda arm: found[arm].update(running[arm].load(used, already)))
        for command, times in rounds.items():

            def once(arm: str, command: str = command) -> None:
                found[arm][ANSWERS[command]].append(running[arm].ask(command))

            for _ in range(times):
                each(once)
                save()
