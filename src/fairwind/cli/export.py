"""export: a trained model as a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fairwind.cli.options import Directory, described, values
from fairwind.cli.terminal import out
from fairwind.comparison import load


@described
@dataclass(frozen=True)
class Export:
    """Write a trained model of a finished comparison to a file.

    For example: fairwind export runs/mine --algorithm adafedadam --to model.onnx
    """

    directory: Directory
    """The comparison's directory."""
    to: Annotated[Path, values(Path, metavar="FILE")] = Path("model.safetensors")
    """NAME.safetensors or NAME.pt for its state dict; NAME.onnx for a graph that runs without PyTorch, which
    needs the extra fairwind[onnx]."""
    algorithm: Annotated[str | None, values(str, metavar="NAME")] = None
    """The algorithm that trained it, as the table names it (the first if not given)."""
    seed: int | None = None
    """The seed it was trained under (the first if not given)."""
    client: Annotated[str | None, values(str, metavar="NAME")] = None
    """Whose model, where each client has its own."""

    def run(self) -> None:
        compared = load(self.directory)
        algorithm = self.algorithm or compared[0].algorithm
        result = compared[algorithm] if self.seed is None else compared[algorithm, self.seed]
        result.save(self.to, client=self.client)
        whose = f" of {self.client}" if self.client else ""
        out.print(f"{self.to}: {algorithm}{whose}, seed {result.seed}", highlight=False, markup=False)
