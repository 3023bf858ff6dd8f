"""paper and sweep: studies of many runs, the paper's or one's own."""

import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from fairwind import setups
from fairwind.cli.options import Folders, Names, Seconds, described, options_of, values
from fairwind.cli.terminal import err, out, say
from fairwind.data import store
from fairwind.data.federation import Federation
from fairwind.data.source import Source
from fairwind.engine.machine import find_machine
from fairwind.engine.ranks import find
from fairwind.engine.settings import Settings
from fairwind.errors import InputError, in_range, unknown
from fairwind.paper import theory
from fairwind.paper.studies import STUDIES, THEORY, Scale, scaled
from fairwind.runs.environment import environment
from fairwind.runs.files import write_json
from fairwind.runs.folder import BusyError
from fairwind.runs.references import is_reference
from fairwind.runs.schema import TheoryFile
from fairwind.setups import Where
from fairwind.study import Finished, Panel, Study, choose, clear, missing, narrowed, read_runs, read_study
from fairwind.study import run as train_job
from fairwind.study.job import Job
from fairwind.study.panel import own_task


@described
@dataclass(frozen=True, kw_only=True)
class Training:
    """How the runs of a study are trained, and where they go."""

    data_dir: Path | None = None
    """Folder with the setups' files, each in a folder of its name (femnist, cifar10, sent140, glove)."""
    cache: Path | None = None
    """Folder of prepared data (XDG_CACHE_HOME/fairwind, or ~/.cache/fairwind, if not given)."""
    setups: Names = ()
    """Train only these setups, such as synthetic or cifar10:beta=0.1 (all if not given)."""
    seeds: tuple[int, ...] = ()
    """Train only these seeds (all if not given)."""
    runs: Folders = ()
    """Further folders of finished comparisons; what they hold is not trained again."""
    report_only: bool = False
    """Train nothing: write the pages from the runs at hand."""
    checkpoint_every: Seconds = 30
    """Time between checkpoints: what a kill may cost."""
    settings: dict[str, Any] = field(default_factory=dict, metadata=options_of("machine", "rounding"))

    def where(self, setup: str) -> Where:
        """Where the files of a setup are."""
        source = None if is_reference(setup) else setups.find(setup).data
        if self.data_dir is None or not isinstance(source, Source):
            return Where(cache=self.cache)
        own, glove = self.data_dir / source.folder, self.data_dir / "glove"
        reads_glove = source.vectors and glove.is_dir()
        return Where(own if own.is_dir() else self.data_dir, glove if reads_glove else None, self.cache)

    def digest(self, setup: str) -> str | None:
        """Of the data in --data-dir: runs on other data of the same setup do not count."""
        if self.data_dir is None or is_reference(setup) or not isinstance(setups.find(setup).data, Source):
            return None
        try:
            return str(setups.entry(setup, self.where(setup), say).manifest["digest"])
        except InputError:
            return None  # said when its runs are to be trained

    def do(self, chosen: list[Study], out_dir: Path) -> None:
        """Trains what is missing of the studies, and writes their pages."""
        for folder in self.runs:
            if not folder.is_dir():
                raise InputError(f"--runs {folder} is no folder; name one that holds finished comparisons")
        _make(out_dir)
        if find().world > 1:
            raise InputError("a study is trained by one process: start it without torchrun")
        for study in chosen:
            for panel in study.panels:
                panel.check()
        clear(out_dir)
        finished, passed = read_runs(out_dir, *self.runs)
        for each in passed:
            if each.damaged and self.report_only:
                raise InputError(f"{each.file} {each.why}: without --report-only its runs are trained again")
            say(str(each))
        panels = narrowed([p for study in chosen for p in study.panels], self.setups, self.seeds)
        digest = cache(self.digest)
        jobs = [] if self.report_only else missing(panels, finished, self.where, digest, **self.settings)
        if jobs:  # what this machine has not is refused before the first of them
            find_machine(Settings(**self.settings))
        failed = self._train(jobs, out_dir)
        finished, _ = read_runs(out_dir, *self.runs)
        for study in chosen:
            self.show(study, finished, out_dir, digest)
        if failed:
            raise InputError(f"{len(failed)} of {len(jobs)} could not be trained; the first, {failed[0]}")

    def _train(self, jobs: list[Job], out_dir: Path) -> list[str]:
        """Trains them, those of other processes last; says what could not be trained."""
        again = shlex.join(["fairwind", *sys.argv[1:]])
        failed: list[str] = []
        left, wait = list(enumerate(jobs, 1)), False
        while left:
            busy = []
            for number, job in left:
                recipe = job.recipe
                say(f"{number} of {len(jobs)}: {', '.join(recipe.algorithms)} on {recipe.setup}")
                try:
                    train_job(job, out_dir, say, err, every=self.checkpoint_every, again=again, wait=wait)
                except BusyError:
                    busy.append((number, job))
                    say("another process trains it, and is waited for when the others are done")
                except InputError as error:
                    failed.append(f"{recipe.setup}: {error}")
                    say(f"left out: {failed[-1]}")
            left, wait = busy, True
        return failed

    def show(
        self, study: Study, finished: list[Finished], out_dir: Path, digest: Callable[[str], str | None]
    ) -> None:
        from fairwind.report import write_study  # charts need a second to load

        def find_data(panel: Panel) -> Federation | None:
            if is_reference(panel.setup):
                data = own_task(panel.setup).federation
                return data if data.has_labels else None
            chosen = choose(panel, finished, digest(panel.setup))
            used = next((run.digest for runs in chosen.values() for run in runs), None)
            entry = store.find(used, self.cache) if used else None
            return entry.load() if entry else None

        write_study(study, finished, out_dir / study.name, find_data, digest)
        out.print(f"{study.title}: {out_dir / study.name / 'index.html'}", soft_wrap=True, markup=False)


@described
@dataclass(frozen=True, kw_only=True)
class Paper(Training):
    """Reproduce the paper: its tables, figures and theory, beside the published numbers.

    Finished runs are not trained again, and a study that was stopped goes on: give the same command. Runs of
    other machines are picked up from --out, and from the folders named by --runs.
    """

    studies: Annotated[tuple[str, ...], tyro.conf.Positional, values(str, metavar="STUDY", count="*")] = ()
    """Studies, or all; without any they are listed. There are convergence, alpha, resources, heterogeneity,
    solvers, readings, controls, tuned, precision, parts, cost, pooled, features and theory."""
    list: bool = False
    """Show the studies, and how many of their runs are there."""
    scale: Scale = "full"
    """full is the paper's; reduced takes fewer rounds; smoke only shows that everything runs."""
    out: Path = Path("runs") / "paper"
    """Directory for the runs, pages, figures and LaTeX tables."""

    def run(self) -> None:
        in_range(0, math.inf, checkpoint_every=self.checkpoint_every)
        known = {name: scaled(study, self.scale) for name, study in STUDIES.items()}
        if self.list or not self.studies:
            return self._list(known)
        names = [*known, THEORY] if "all" in self.studies else list(self.studies)
        for name in names:
            if name not in (*known, THEORY):
                raise unknown("study", name, [*known, THEORY, "all"])
        if THEORY in names:
            self._theory()
        studies = [known[name] for name in names if name != THEORY]
        if studies:
            self.do(studies, self.out)
        return None

    def _theory(self) -> None:
        from fairwind.report import write_theory

        _make(self.out / THEORY)
        say("checking the theory")
        checks = theory.study(self.scale)
        content: TheoryFile = {"scale": self.scale, "environment": environment("cpu"), "checks": checks}
        write_json(self.out / THEORY / "theory.json", content)
        write_theory(self.out / THEORY, content)
        out.print(f"Theory: {self.out / THEORY / 'index.html'}", soft_wrap=True, markup=False)

    def _list(self, known: dict[str, Study]) -> None:
        finished, passed = read_runs(self.out, *self.runs)
        for each in passed:
            say(str(each))
        table = Table(show_header=True, box=None, padding=(0, 2, 1, 0))
        for name in ("study", "runs there", "what it asks"):
            table.add_column(name)
        for name, study in known.items():
            wanted = sum(len(panel.algorithms) * len(panel.seeds) for panel in study.panels)
            there = sum(len(runs) for p in study.panels for runs in choose(p, finished).values())
            table.add_row(f"[bold]{name}[/]", f"{there} of {wanted}", study.question)
        table.add_row(
            f"[bold]{THEORY}[/]", "", "Do the theorems hold on convex problems with known constants?"
        )
        out.print(table)


@described
@dataclass(frozen=True, kw_only=True)
class Sweep(Training):
    """Run a study of your own: a grid of tasks, algorithms, settings and seeds from a TOML file."""

    file: Annotated[Path, tyro.conf.Positional, values(Path, metavar="FILE.toml")]
    """The study: a title, and a [[grid]] of setups, or tasks of your own (FILE.py:NAME), algorithms, seeds
    and settings; lists are varied."""
    out: Path | None = None
    """Directory for the runs and the page (runs/NAME, from the file's name, if not given)."""

    def run(self) -> None:
        in_range(0, math.inf, checkpoint_every=self.checkpoint_every)
        study = read_study(self.file)
        self.do([study], self.out or Path("runs") / study.name)


def _make(folder: Path) -> None:
    """Makes a folder for results, so that a bad name is refused before anything is trained."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}; give another --out") from None
