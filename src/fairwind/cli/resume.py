"""resume: a comparison that was stopped goes on, or grows."""

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from fairwind.algorithms import with_sets
from fairwind.cli.options import Directory, Names, Seconds, Time, described
from fairwind.cli.report import nothing_left, show
from fairwind.cli.terminal import err, note
from fairwind.errors import in_range, whole
from fairwind.runs.directory import RunDirectory
from fairwind.runs.duration import seconds_of
from fairwind.runs.growth import growing
from fairwind.runs.recipe import Recipe
from fairwind.runs.session import Session
from fairwind.setups import Where


@described
@dataclass(frozen=True)
class Resume:
    """Go on with a comparison that was stopped or killed, with the same bits; or let a finished one grow.

    Of more rounds, seeds or algorithms only what is missing is trained, and the results so far stay until it
    is. More rounds end in the same bits as one comparison with all of them; so do runs that are added, up to
    rounding where they are stacked.

    For example: fairwind resume runs/mine --rounds 500 --seeds 3 4
    """

    directory: Directory
    """The comparison's directory."""
    rounds: int | None = None
    """Rounds of training in all (as many as before if not given)."""
    seeds: tuple[int, ...] = ()
    """Seeds that are added to those it has."""
    algorithms: Names = ()
    """Algorithms that are added to those it has, as in 'fairwind compare'."""
    time_budget: Time = None
    """Time of training after which it stops, such as 10m or 2h, with that before this command."""
    checkpoint_every: Seconds = 30
    """Time between checkpoints: what a kill may cost."""
    cache: Path | None = None
    """Folder of prepared data (the one the comparison began with if not given)."""

    def run(self) -> None:
        in_range(0, math.inf, checkpoint_every=self.checkpoint_every)
        budget = None if self.time_budget is None else seconds_of(self.time_budget, "time_budget")
        begun = RunDirectory.open(
            self.directory
        )  # a folder that holds no run is not locked, which would make it
        newest = growing(self.directory) or begun
        for name in dict.fromkeys([*begun.code, *newest.code]):
            note(f"{self.directory} names code, which is run now: {name}")
        trained = Session(
            recipe=self._larger(newest.recipe),
            load=lambda: begun.task(self.cache),
            path=self.directory,
            find=RunDirectory.open,
            where=Where(cache=self.cache),
            every=self.checkpoint_every,
            again=shlex.join(["fairwind", "resume", str(self.directory)]),
            say=note,
            console=err,
            time_budget=budget,
            finished=show,
        ).run()
        if trained is None:
            err.print(nothing_left(self.directory))

    def _larger(self, recipe: Recipe) -> Recipe | None:
        """What the comparison is to grow into, if that was asked for."""
        if self.rounds is None and not self.seeds and not self.algorithms:
            return None
        if self.rounds is not None:
            whole(1, rounds=self.rounds)
        rounds = recipe.settings.rounds if self.rounds is None else self.rounds
        larger = replace(
            recipe,
            settings=replace(recipe.settings, rounds=rounds),
            algorithms=tuple(dict.fromkeys((*recipe.algorithms, *with_sets(self.algorithms)))),
            seeds=tuple(dict.fromkeys((*recipe.seeds, *self.seeds))),
        )
        larger.check(recipe.algorithms)
        return larger
