"""resume: a comparison that was stopped goes on."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from fairwind.cli.finishing import finish, show
from fairwind.cli.options import Directory, Folder, Seconds, described
from fairwind.cli.terminal import err, say
from fairwind.engine.ranks import find
from fairwind.engine.simulation import Simulation
from fairwind.errors import InputError, in_range
from fairwind.runs.directory import RunDirectory
from fairwind.runs.folder import explaining, held
from fairwind.runs.references import is_reference
from fairwind.runs.seals import damaged
from fairwind.runs.training import train_on_other_rank
from fairwind.tracking import Tracking


@described
@dataclass(frozen=True)
class Resume:
    """Go on with a comparison that was stopped or killed; the results are the same bits."""

    directory: Directory
    """The comparison's directory."""
    checkpoint_every: Seconds = 30
    """Time between checkpoints: what a kill may cost."""
    cache: Folder = None
    """Folder of prepared data (the one the comparison began with if not given)."""

    def run(self) -> None:
        in_range(0, math.inf, checkpoint_every=self.checkpoint_every)
        directory = RunDirectory.open(self.directory)
        first = find().first
        with held(self.directory) if first else nullcontext():
            if directory.finished and not damaged(self.directory):
                if not first:
                    return None
                for line in directory.mend_recipe():
                    say(f"fairwind: {line}")
                err.print("finished: nothing is left to train")
                show(self.directory)
                return None
            for line in directory.changed(directory.recipe.settings):
                say(f"fairwind: {line}")
            simulation = _begun(directory, self.cache)
            simulation.ranks.meet()  # from here on no other process changes the checkpoints
            with explaining(self.directory):
                for line in directory.restore(simulation):
                    say(f"fairwind: {line}")
                if not first:
                    return train_on_other_rank(simulation)
            err.print(f"going on at round {simulation.round} of {simulation.settings.rounds}")
            finish(directory, simulation, self.checkpoint_every, Tracking.resumed(self.directory))
        return None


def _begun(directory: RunDirectory, cache: Path | None) -> Simulation:
    """The simulation of a run that was begun, if its task still is what it was."""
    task = directory.task(cache)
    simulation = directory.recipe.build(task)
    differs = directory.recipe.differs(directory.recipe.with_digests(task, simulation))
    if differs and (is_reference(directory.recipe.setup) or differs.startswith("algorithm")):
        raise InputError(
            f"{directory.path} was started with a task that differs in its {differs}: "
            "restore it, or start in another directory"
        )
    return simulation
