"""Write held-out problems to a file for `qerl evaluate`: those of a recipe for `--tasks jsonl-number:FILE`.

python -m qerl_recipes.tasks.held_out --config RECIPE.yaml OUT.jsonl
"""

import argparse
import json
from pathlib import Path

from datasets import Dataset

from qerl_recipes.hooks import collect
from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks.prompts import read


def lines(recipe: str | Path) -> str:
    """Return the held-out problems as JSON lines, ``{"prompt", "answer"}``; raise ConfigError if there are none."""
    script, _, _ = parse(["--config", str(recipe)])
    _, held_out = read(script, collect("qerl_datasets"))
    if not (text := as_lines(held_out)):
        raise ConfigError(f"{recipe}: its data hold no problems with an answer out; name a dataset_test_split")
    return text


def as_lines(held_out: Dataset | None) -> str:
    """Return held-out problems as ``lines`` does; empty if there are none, or none with an answer."""
    if held_out is None or "answer" not in held_out.column_names:
        return ""
    rows = zip(held_out["prompt"], held_out["answer"], strict=True)
    return "".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows)


def whole_lines(held_out: Dataset | None) -> str:
    """Return held-out problems as JSON lines with all their columns, for episodes; empty if there are none."""
    rows = () if held_out is None else held_out
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m qerl_recipes.tasks.held_out", description=__doc__)
    parser.add_argument("--config", required=True, help="the recipe")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.write_text(lines(options.config), encoding="utf-8")


if __name__ == "__main__":
    main()
