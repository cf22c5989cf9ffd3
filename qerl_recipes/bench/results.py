"""Describe, write and show what a benchmark has measured."""

import json
import os
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import qerl_kernels.conditions
from rich.console import Console
from rich.table import Table

from qerl_recipes.machine.environment import runs_on_cuda
from qerl_vllm_plugin.wire.address import hidden


def conditions() -> dict[str, Any]:
    """Return the part of a result that says how it was measured; a login in the command's addresses is hidden."""
    command = hidden(shlex.join(["qerl", *sys.argv[1:]]))
    return qerl_kernels.conditions.conditions(command, on_gpu=runs_on_cuda(os.environ))


def save(result: Mapping[str, Any], output: Path | None) -> None:
    """Write a result as JSON to ``output``, creating its folder; do nothing if ``output`` is None."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def spread(values: Sequence[float]) -> float | None:
    """Return (largest - smallest) / median; None for a single value, which says nothing of its spread."""
    return (max(values) - min(values)) / statistics.median(values) if len(values) > 1 else None


def around(value: float | None) -> str:
    """Format a spread as a reader sees it behind a median."""
    return "once" if value is None else f"±{value / 2:.0%}"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table to print; its first column is aligned to the left, the others to the right."""
    shown = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        shown.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    return shown


def show_remarks(console: Console, arms: Mapping[str, Mapping[str, Any]], cached_tokens: int) -> None:
    """Print each arm's remarks, which arms failed and why, and whose KV cache holds fewer than ``cached_tokens``."""
    for arm, figures in arms.items():
        for remark in figures.get("remarks", ()):
            console.print(f"{arm}: {remark}", markup=False, soft_wrap=True)
        if (held := figures.get("kv_cache_tokens", cached_tokens)) < cached_tokens:
            console.print(f"{arm}: its KV cache holds {held:,} of {cached_tokens:,} tokens, so some wait")
        if "failed" in figures:
            console.print(f"{arm} failed: {figures['failed']}", style="bold red", markup=False, soft_wrap=True)
