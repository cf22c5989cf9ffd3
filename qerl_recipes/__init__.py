"""Train and judge policies: a thin layer over TRL, PEFT, transformers and lighteval."""

from pathlib import Path

_HERE = Path(__file__).parent
SHIPPED = _HERE / "recipes" if (_HERE / "recipes").is_dir() else _HERE.parent / "recipes"  # a wheel; a checkout
