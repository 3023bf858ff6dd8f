"""tune: a search for the algorithm and its parameters that suit a task."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from fairwind import algorithms
from fairwind.choosing import tune
from fairwind.cli.options import Names, described, options_of, values
from fairwind.cli.terminal import note, out
from fairwind.runs.folder import new_directory
from fairwind.runs.recipe import changed_settings
from fairwind.runs.references import is_reference, load_task
from fairwind.setups import Where, task


@described
@dataclass(frozen=True)
class Tune:
    """Search for the algorithm, and its parameters, that suit a task best.

    Settings are tried on validation samples, many at once; those that fall behind leave early, except the
    defaults. In the end the choice is compared with every default on the test samples, under other seeds. A
    search that was stopped, or killed, goes on with the same command and its --out.

    For example: fairwind tune mine.py:task --aim within=5
    """

    task: Annotated[str, tyro.conf.Positional, values(str, metavar="TASK")]
    """Your own task, FILE.py:NAME, or a setup. If it has no validation samples, a tenth of each client's
    samples are taken from those for training."""
    aim: str = "worst30"
    """average; worst30; or within=POINTS, the best average whose worst 30 % is at most so many points off."""
    algorithms: Names = algorithms.PAPER
    """Algorithms to search; parameters that are given stay, as in adafedadam:alpha=0. A set is named paper,
    fair, accelerated or all. The baselines local and pooled stand beside the choice in the end."""
    trials: int = 64
    """Settings to try."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of the comparison at the end."""
    search_seed: int = 0
    """Seed of the search."""
    local_rates: Annotated[tuple[float, ...], values(float, count="*")] = ()
    """Further local learning rates to try; each is a stack of its own."""
    data_dir: Path | None = None
    """Folder with the setup's files."""
    cache: Path | None = None
    """Folder of prepared data."""
    settings: dict[str, object] = field(
        default_factory=dict, metadata=options_of("numbers", "rounding", "machine", "history")
    )
    out: Path | None = None
    """Directory of the search (runs/NAME-tune-TIME if not given)."""

    def run(self) -> None:
        if is_reference(self.task):
            searched = load_task(self.task)
        else:
            searched = task(self.task, Where(self.data_dir, None, self.cache), note)
        given = changed_settings(searched.solver, searched.rounds, **self.settings)
        options = {name: value for name, value in vars(given).items() if name != "device" or value != "auto"}
        name = searched.name.partition(":")[0]
        folder = self.out or new_directory(f"{name}-tune")
        found = tune(
            searched,
            self.algorithms,
            aim=self.aim,
            trials=self.trials,
            seeds=self.seeds,
            search_seed=self.search_seed,
            local_rates=self.local_rates,
            out=folder,
            **options,
        )
        out.print(repr(found), highlight=False, markup=False)
        out.print(f"page: {found.page()}", soft_wrap=True, markup=False)
