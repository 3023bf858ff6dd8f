"""resume: a comparison that was stopped goes on."""

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from fairwind.cli.options import Directory, Seconds, described
from fairwind.cli.report import show
from fairwind.cli.terminal import err, note
from fairwind.errors import in_range
from fairwind.runs.directory import RunDirectory
from fairwind.runs.session import Session
from fairwind.setups import Where


@described
@dataclass(frozen=True)
class Resume:
    """Go on with a comparison that was stopped or killed; the results are the same bits."""

    directory: Directory
    """The comparison's directory."""
    checkpoint_every: Seconds = 30
    """Time between checkpoints: what a kill may cost."""
    cache: Path | None = None
    """Folder of prepared data (the one the comparison began with if not given)."""

    def run(self) -> None:
        in_range(0, math.inf, checkpoint_every=self.checkpoint_every)
        RunDirectory.open(self.directory)  # a folder that holds no run is not locked, which would make it
        trained = Session(
            path=self.directory,
            find=RunDirectory.open,
            where=Where(cache=self.cache),
            every=self.checkpoint_every,
            again=shlex.join(["fairwind", "resume", str(self.directory)]),
            say=note,
            console=err,
            finished=show,
        ).run()
        if trained is None:
            err.print("finished: nothing is left to train")
