"""Run a soak: ``python tests/soak --help``. ``make soak`` runs ten minutes of it."""

import sys

from qerl_recipes.machine.environment import prepare

if __name__ == "__main__":
    prepare()  # before anything imports vllm or torch
    import soak
    import typer

    try:
        typer.run(soak.main)
    except (ValueError, OSError) as error:
        print(f"soak: {error}", file=sys.stderr)
        raise SystemExit(2) from None
