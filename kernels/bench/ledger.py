"""Write the ledger of all measured figures, kernels/results/README.md, and its pictures.

The command is ``python kernels/bench/ledger.py``.

Every figure comes from a JSON file in kernels/results: one file a measurement, and ``printed.json`` for figures that a
test or a script has printed. ``tables.py`` makes the tables, ``pictures.py`` the pictures, which need matplotlib.
"""

from typing import Any

import tables
from tables import RESULTS, Files, read

HEAD = """# Measured figures

Look up any speed, memory or log-probability difference that a page cites.
`python kernels/bench/ledger.py` writes this page and its pictures from the JSON files in this folder.

A first cell links to its file, which has command, GPU, driver, versions, commit and date; an empty one repeats it.
Unless a row says otherwise, weights are random and of the real shapes, and every linear has an adapter of rank 32.
CUDA graphs are on, and GPUs are H200s, with vLLM 0.26.0. A figure is the median of its repetitions;
`-` means not measured. *Shared host*: other GPUs of the host were at work.
"""


def measured() -> Files:
    """Return all result files by name, without ``printed.json``."""
    names = sorted(file.stem for file in RESULTS.glob("*.json"))
    return {name: read(name) for name in names if name != "printed"}


def printed(result: dict[str, Any]) -> str:
    """Return the figures that a test or a script has printed, by group, but for those that another page gives."""
    groups: dict[str, list[str]] = {}
    for row in (row for row in result["rows"] if "page" not in row):
        gpu = row["gpu"].replace("*", ", shared host")
        on = f" ({gpu})" * (gpu != "H200")
        groups.setdefault(row["group"], []).append(f"* {row['figure']}: **{row['value']}**{on}")
    heads = {group: f"\n**{group}.** {result['groups'].get(group, '')}".rstrip() + "\n" for group in groups}
    return "\n".join("\n".join([heads[group], *lines]) for group, lines in groups.items())


def elsewhere(result: dict[str, Any]) -> str:
    """Return a link to each page that gives the other printed figures."""
    pages = dict.fromkeys(row["page"] for row in result["rows"] if "page" in row)
    return ", ".join(f"[{page}](../../{page})" for page in pages)


def page() -> str:
    """Return the ledger."""
    files, result = measured(), read("printed")
    random_head = "tokens | target | met | median | worst | an adapter adds 10 % or 2 us at most"
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
        "*Median seconds of the steps after the first, mostly one. All but stock TRL have our trainer."
        " More accumulation (fewer completions at a time) leaves the rollout as fast.*\n",
        tables.steps(files),
        "\n## Swaps\n\nFrom the call until every rank has committed.\n",
        tables.swaps(files),
        "\n## A server under swaps\n\nThe policy changes every second."
        " Each answer is replayed under the policy that its header names."
        " The last columns are seconds of a change, p50 and p99, by what it does to running requests.\n",
        tables.soaks(files),
        "\n## Linear kernels\n\n[Random layers and token counts](random_NVIDIA_H200.json), each kernel chosen by the"
        " cost model:\n",
        tables.table(random_head, tables.both_regimes(files["random_NVIDIA_H200"])),
        "\n![Speed of the linear kernels relative to cuBLAS BF16](NVIDIA_H200.png)\n",
        "*[Speed of Qwen2.5's layers](NVIDIA_H200.json) by number of tokens, each with its fastest variant.*",
        "\n[Where a decode step of 7B goes](profile_7B_NVIDIA_H200.json), by configuration and sequences, 768 tokens of"
        " context:\n",
        tables.decode_step(files["profile_7B_NVIDIA_H200"]),
        "\n## Targets\n\nRollouts and prefill are relative to BF16 with the adapter merged.\n",
        tables.targets(files),
        "\n## Printed by tests and scripts\n\n[printed.json](printed.json) has command, GPU, commit and date of each"
        f" figure (a `script` is not in this repository), and those that other pages give: {elsewhere(result)}.",
        printed(result),
    ]
    text = "\n".join(parts) + "\n"
    others = ", ".join(f"[{name}]({name}.json)" for name in files if f"]({name}.json)" not in text)
    return text + f"\nOther files, such as older runs: {others}.\n" if others else text


if __name__ == "__main__":
    import pictures

    (RESULTS / "README.md").write_text(page())
    pictures.draw_all(RESULTS)
