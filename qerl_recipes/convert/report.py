"""Report the error of each quantized layer, as a JSON file and a printed table."""

import json
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class LayerError:
    """One packed layer: its name, shape (N, K) and relative error |w - packed| / |w| (Frobenius norms)."""

    name: str
    shape: tuple[int, ...]
    relative_error: float

    @property
    def place(self) -> tuple[str, str]:
        """Return row and column in the table.

        ``model.layers.3.mlp.experts.7.up_proj`` gives ``3`` and ``mlp.experts.*.up_proj``.
        """
        parts = self.name.split(".")
        first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if first is None:
            return "", self.name
        return parts[first], ".".join("*" if part.isdigit() else part for part in parts[first + 1 :])


@dataclass(frozen=True)
class QuantizeReport:
    """The result of ``quantize_checkpoint``; ``layers`` is empty where no errors are known."""

    source: str
    destination: str
    method: str
    scales: str
    ignore: tuple[str, ...]
    layers: list[LayerError] = field(default_factory=list)
    calibration: dict[str, int] | None = None  # for gptq and awq: the counts that `calibration_file.read` returns

    @property
    def worst(self) -> LayerError:
        """Return the layer with the largest relative error."""
        return max(self.layers, key=lambda layer: layer.relative_error)

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def print(self, console: Console | None = None) -> None:
        """Print a table with one row per decoder layer and one column per kind of linear layer.

        Of several experts it shows the worst error.
        """
        console = console or Console()
        if (used := self.calibration) is not None:
            console.print(
                f"calibrated on {used['texts']} of {used['of']} texts, {used['tokens']} tokens; {used['cut']} texts "
                f"were cut at {used['longest']} tokens",
                soft_wrap=True,
            )
        if not self.layers:
            line = (
                f"written to {self.destination}; {self.method} scales weights before it rounds them, so that no error"
            )
            console.print(f"{line} of a single layer is known", soft_wrap=True)
            return
        cells: dict[tuple[str, str], float] = {}
        for layer in self.layers:
            cells[layer.place] = max(cells.get(layer.place, 0.0), layer.relative_error)
        columns = list(dict.fromkeys(column for _, column in cells))
        table = Table(title=f"relative error of the NVFP4 weights ({self.method}, {self.scales})", title_justify="left")
        table.add_column("layer", justify="right", overflow="fold")
        for column in columns:
            table.add_column(column if "*" in column else column.rpartition(".")[2], justify="right", overflow="fold")
        for row in dict.fromkeys(row for row, _ in cells):
            values = (cells.get((row, column)) for column in columns)
            table.add_row(row, *("" if value is None else f"{value:.4f}" for value in values))
        console.print(table)
        console.print(
            f"worst: {self.worst.name} {self.worst.relative_error:.4f}; written to {self.destination}", soft_wrap=True
        )
