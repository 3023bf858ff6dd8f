"""The command line: compare, resume, report, paper, sweep, data, list."""

import io
import json
import os
import signal
import sys
import time
import warnings
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors import SafetensorError

from fairwind import __version__, algorithms, setups
from fairwind.comparison import Recipe, RunDirectory, environment, settings_of
from fairwind.data import store
from fairwind.data.federation import Federation
from fairwind.data.source import Source
from fairwind.engine.precision import Precision
from fairwind.engine.ranks import find
from fairwind.engine.simulation import Engine, Simulation, Switch
from fairwind.errors import InputError, first_line, unknown
from fairwind.files import RESULTS, write_json
from fairwind.paper import theory
from fairwind.paper.studies import STUDIES, THEORY, Scale, scaled
from fairwind.setups import Where
from fairwind.spec import Parameters, parameters
from fairwind.study import Finished, Panel, Study, choose, missing, narrowed, read_runs, read_study
from fairwind.study import run as train_job

out = Console(highlight=False)


class Messages(Console):
    """Standard error: shows what users wrote as they did, and falls silent where nobody reads it."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # training goes on


err = Messages(stderr=True, highlight=False, markup=False, emoji=False)

PATIENCE = 10  # seconds
SETTINGS = (  # options of a comparison
    *(
        "rounds",
        "solver",
        "momentum",
        "lr",
        "batch_size",
        "weight_decay",
        "epochs",
        "participation",
        "probe_samples",
    ),
    *("eval_every", "engine", "device", "compile", "precision", "memory"),
)


@dataclass(frozen=True)
class Compare:
    """Train with several algorithms under several seeds, and show how each client fares.

    All runs are stacked and train at once. Results, curves and a report page go into a directory; a
    comparison that was stopped, or killed, goes on with 'fairwind resume DIR'.
    """

    setup: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SETUP")] = "synthetic"
    """Data, model and solver that belong together; parameters follow a colon, as in
    synthetic:classes=5,sizes=li. 'fairwind list' shows all."""
    data_dir: Path | None = None
    """Folder with the setup's files. If not given, data that was prepared before is used, or the Hugging Face
    hub's is downloaded."""
    glove: Path | None = None
    """File, or folder, of GloVe's word vectors for sent140 (the data folder is searched if not given)."""
    cache: Path | None = None
    """Folder of prepared data (XDG_CACHE_HOME/fairwind, or ~/.cache/fairwind, if not given)."""
    clients: int | None = None
    """Number of clients; the same as SETUP:clients=…"""
    algorithms: tuple[str, ...] = algorithms.PAPER
    """Algorithms to compare; parameters follow a colon, as in adafedadam:alpha=2,warmup=0."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of initial weights, batch order and participation; every algorithm runs under each."""
    rounds: int | None = None
    """Communication rounds (the setup's own if not given)."""
    alpha: float | None = None
    """AdaFedAdam's fairness: 0 weighs clients by size alone, larger is fairer (its default is 1)."""
    solver: Literal["sgd", "momentum", "nesterov"] | None = None
    """How clients train (the setup's own if not given)."""
    momentum: float | None = None
    """Momentum of --solver momentum or nesterov (0.9 if not given)."""
    lr: float | None = None
    """Local learning rate (the setup's own if not given)."""
    batch_size: int | None = None
    """Local batch size (the setup's own if not given)."""
    weight_decay: float | None = None
    """Local weight decay (the setup's own if not given)."""
    epochs: int | tuple[int, int] | None = None
    """Local epochs a round; two numbers, as in --epochs 1 3, are drawn between for each client and round."""
    participation: int | float = 1.0
    """Clients in a round: a share with a point, as in 0.1, or a number, as in 10; 1.0 is all."""
    probe_samples: int | None = None
    """Samples on which clients measure loss and gradient before training (all if not given)."""
    eval_every: int = 10
    """Rounds between evaluations of all clients' test accuracy."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto takes a GPU where there is one."""
    engine: Engine = "stacked"
    """stacked trains all clients of all runs at once; loop, one after another, is for reference."""
    compile: Switch = "auto"
    """Compile the local step; auto does where a compiler is found and the run is long enough."""
    precision: Precision = "auto"
    """How local steps are computed: float32 is exact; tf32 rounds the factors of products, bf16 all but
    weights and sums, both for speed on a GPU. auto is tf32 on a GPU, float32 on a CPU."""
    memory: float | None = None
    """GiB that clients training at once may take; the rest wait (if not given: on a CPU 1/32, which stays
    near its cache; on a GPU a quarter of its memory)."""
    out: Path | None = None
    """Directory for the results (runs/SETUP-TIME if not given)."""
    checkpoint_every: float = 30
    """Seconds between checkpoints: what a kill may cost."""

    def run(self) -> None:
        recipe = self.recipe()
        recipe.check()
        path = self.out or Path("runs") / f"{self.setup.partition(':')[0]}-{datetime.now():%Y%m%d-%H%M%S}"
        if find().first:
            RunDirectory.check_free(path)
        where = Where(self.data_dir, self.glove, self.cache)
        federation = _load(recipe.setup, where)
        simulation = recipe.build(federation)
        if not simulation.ranks.first:
            return _help(simulation)
        # with nothing left open
        recipe = replace(recipe, settings=simulation.settings, data=federation.origin.get("digest"))
        directory = RunDirectory.create(path, recipe, where)
        with directory.locked():
            directory.write_history(simulation)
            _train(directory, simulation, self.checkpoint_every)
        return None

    def recipe(self) -> Recipe:
        """What the options amount to."""
        spec = setups.with_clients(self.setup, self.clients)
        given = {name: getattr(self, name) for name in SETTINGS}
        settings = settings_of(spec, **{name: value for name, value in given.items() if value is not None})
        specs = tuple(self._with_alpha(algorithm) for algorithm in self.algorithms)
        if self.alpha is not None and specs == self.algorithms:
            raise InputError("--alpha is AdaFedAdam's, and no adafedadam without its own alpha is compared")
        return Recipe(spec, specs, self.seeds, settings)

    def _with_alpha(self, spec: str) -> str:
        name, colon, rest = spec.partition(":")
        if self.alpha is None or name != "adafedadam" or "alpha=" in rest:
            return spec
        return f"{name}:alpha={self.alpha:g}" + ("," + rest if colon else "")


@dataclass(frozen=True)
class Resume:
    """Go on with a comparison that was stopped or killed; it ends as if it never had been."""

    directory: tyro.conf.Positional[Path]
    """The comparison's directory."""
    checkpoint_every: float = 30
    """Seconds between checkpoints: what a kill may cost."""
    cache: Path | None = None
    """Folder of prepared data (the one the comparison began with if not given)."""

    def run(self) -> None:
        directory = RunDirectory.open(self.directory)
        if (self.directory / RESULTS).exists():
            err.print("finished: nothing is left to train")
            return _show(self.directory) if find().first else None
        for change in directory.changed():
            err.print(f"fairwind: {change}; the last bits of the results may change with it", soft_wrap=True)
        simulation = directory.recipe.build(directory.federation(self.cache))
        ranks = simulation.ranks
        with directory.locked() if ranks.first else nullcontext():
            ranks.meet()  # from here on no other process changes the checkpoints
            for refusal in directory.restore(simulation):
                err.print(f"fairwind: {refusal}; an earlier one is used", soft_wrap=True)
            if not ranks.first:
                return _help(simulation)
            err.print(f"going on at round {simulation.round} of {simulation.settings.rounds}")
            _train(directory, simulation, self.checkpoint_every)
        return None


@dataclass(frozen=True)
class Report:
    """Write a finished comparison's report page and figures anew, and show its table."""

    directory: tyro.conf.Positional[Path]
    """The comparison's directory."""

    def run(self) -> None:
        RunDirectory.open(self.directory)
        if not (self.directory / RESULTS).exists():
            raise InputError(
                f"{self.directory} has no results yet: finish it with 'fairwind resume {self.directory}'"
            )
        _show(self.directory)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the runs of a study are trained, and where they go."""

    data_dir: Path | None = None
    """Folder with the setups' files, each in a folder of its name (femnist, cifar10, sent140, glove)."""
    cache: Path | None = None
    """Folder of prepared data (XDG_CACHE_HOME/fairwind, or ~/.cache/fairwind, if not given)."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto takes a GPU where there is one."""
    compile: Switch = "auto"
    """Compile the local step; auto does where a compiler is found and the runs are long enough."""
    precision: Precision = "auto"
    """How local steps are computed, unless a panel says so itself: float32, tf32, bf16 or auto."""
    setups: tuple[str, ...] = ()
    """Train only these setups, such as synthetic or cifar10:beta=0.1 (all if not given)."""
    seeds: tuple[int, ...] = ()
    """Train only these seeds (all if not given)."""
    runs: tuple[Path, ...] = ()
    """Further folders of finished comparisons; what they hold is not trained again."""
    report_only: bool = False
    """Train nothing: write the pages from the runs at hand."""
    checkpoint_every: float = 30
    """Seconds between checkpoints: what a kill may cost."""

    def where(self, setup: str) -> Where:
        """Where the files of a setup are."""
        name = setup.partition(":")[0]
        if self.data_dir is None or not isinstance(setups.find(setup).data, Source):
            return Where(cache=self.cache)
        own, glove = self.data_dir / name, self.data_dir / "glove"
        reads_glove = name == "sent140" and glove.is_dir()
        return Where(own if own.is_dir() else self.data_dir, glove if reads_glove else None, self.cache)

    def do(self, chosen: list[Study], out_dir: Path, again: str) -> None:
        """Trains what is missing of the studies, and writes their pages."""
        for study in chosen:
            for panel in study.panels:
                panel.check()
        finished, refused = read_runs(out_dir, *self.runs)
        for line in refused:
            _say(line)
        options = {"device": self.device, "compile": self.compile, "precision": self.precision}
        panels = narrowed([p for study in chosen for p in study.panels], self.setups, self.seeds)
        jobs = [] if self.report_only else missing(panels, finished, self.where, **options)
        failed = []
        for number, job in enumerate(jobs, 1):
            recipe = job.recipe
            _say(f"{number} of {len(jobs)}: {', '.join(recipe.algorithms)} on {recipe.setup}")
            try:
                train_job(job, out_dir, lambda d, s: _advance(d, s, self.checkpoint_every, again), _say)
            except InputError as error:
                failed.append(f"{recipe.setup}: {error}")
                _say(f"left out: {failed[-1]}")
        finished, _ = read_runs(out_dir, *self.runs)
        for study in chosen:
            self.show(study, finished, out_dir)
        if failed:
            raise InputError(f"{len(failed)} of {len(jobs)} could not be trained; the first, {failed[0]}")

    def show(self, study: Study, finished: list[Finished], out_dir: Path) -> None:
        from fairwind.report import write_study  # charts need a second to load

        def find_data(panel: Panel) -> Federation | None:
            digest = next((r.digest for runs in choose(panel, finished).values() for r in runs), None)
            entry = store.find(digest, self.cache) if digest else None
            return entry.load() if entry else None

        write_study(study, finished, out_dir / study.name, find_data)
        out.print(f"{study.title}: {out_dir / study.name / 'index.html'}", soft_wrap=True, markup=False)


@dataclass(frozen=True, kw_only=True)
class Paper(Training):
    """Reproduce the paper: its tables, figures and theory, beside the published numbers.

    Runs that are finished are not run again, and what was stopped goes on: give the same command. Runs of
    other machines join by themselves when their folders lie in --out, or are named by --runs.
    """

    studies: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="STUDY")] = ()
    """Studies, or all; --list shows them."""
    list: bool = False
    """Show the studies, and how many of their runs are there."""
    scale: Scale = "full"
    """full is the paper's; reduced takes fewer rounds; smoke only shows that everything runs."""
    out: Path = Path("runs") / "paper"
    """Directory for the runs, pages, figures and LaTeX tables."""

    def run(self) -> None:
        known = {name: scaled(study, self.scale) for name, study in STUDIES.items()}
        if self.list or not self.studies:
            return self._list(known)
        names = [*known, THEORY] if self.studies == ("all",) else list(self.studies)
        for name in names:
            if name not in (*known, THEORY):
                raise unknown("study", name, [*known, THEORY, "all"])
        if THEORY in names:
            self._theory()
        studies = [known[name] for name in names if name != THEORY]
        if studies:
            words = " ".join(["fairwind paper", *self.studies, f"--scale {self.scale} --out {self.out}"])
            self.do(studies, self.out, words)
        return None

    def _theory(self) -> None:
        from fairwind.report import write_theory

        _say("checking the theory")
        checks = theory.study(self.scale)
        found = {"scale": self.scale, "environment": environment("cpu"), "checks": checks}
        (self.out / THEORY).mkdir(parents=True, exist_ok=True)
        write_json(self.out / THEORY / "theory.json", found)
        write_theory(self.out / THEORY, found)
        out.print(f"Theory: {self.out / THEORY / 'index.html'}", soft_wrap=True, markup=False)

    def _list(self, known: dict[str, Study]) -> None:
        finished, _ = read_runs(self.out, *self.runs)
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


@dataclass(frozen=True, kw_only=True)
class Sweep(Training):
    """Run a study of your own: a grid of setups, algorithms, settings and seeds from a TOML file."""

    file: tyro.conf.Positional[Path]
    """The study, as in docs/studies.md."""
    out: Path | None = None
    """Directory for the runs and the page (runs/NAME, from the file's name, if not given)."""

    def run(self) -> None:
        study = read_study(self.file)
        path = self.out or Path("runs") / study.name
        self.do([study], path, f"fairwind sweep {self.file} --out {path}")


@dataclass(frozen=True)
class Data:
    """Prepare a setup's data: download or read it, check it, deal it to clients, and keep that in a cache.

    Shows what was made, and draws how labels are spread over the clients. Comparisons do this by themselves
    where it has not been done.
    """

    setup: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SETUP")]
    """The setup; parameters follow a colon, as in cifar10:beta=0.5."""
    data_dir: Path | None = None
    """Folder with the data set's files. If not given, data that was prepared before is shown, or the Hugging
    Face hub's is downloaded (to have the hub's beside another, name another --cache)."""
    glove: Path | None = None
    """File, or folder, of GloVe's word vectors for sent140 (the data folder is searched if not given)."""
    cache: Path | None = None
    """Where to keep it (XDG_CACHE_HOME/fairwind, or ~/.cache/fairwind, if not given)."""
    clients: int | None = None
    """Number of clients; the same as SETUP:clients=…"""

    def run(self) -> None:
        from fairwind.report import data_table, write_labels  # charts need a second to load

        spec = setups.with_clients(self.setup, self.clients)
        entry = setups.entry(spec, Where(self.data_dir, self.glove, self.cache), _say)
        federation = entry.load()
        out.print(data_table(spec, federation))
        for path in (entry.path, *write_labels(entry.path, federation)):
            out.print(str(path), soft_wrap=True, markup=False)


@dataclass(frozen=True)
class List:
    """Show the setups and the algorithms, with their parameters and where they come from."""

    def run(self) -> None:
        described = {}
        for name, s in setups.SETUPS.items():
            local = f"batch size {s.solver.batch_size}, epochs {s.solver.epochs}, lr {s.solver.lr}"
            text = f"{(s.builder.__doc__ or '').rstrip()} {s.rounds} rounds; local SGD, {local}."
            described[name] = (s.parameters, text)
        out.print(_listing("setups", described))
        builders = algorithms.REGISTRY.items()
        documents = {name: (parameters(b), _document(b)) for name, b in builders}
        out.print(_listing("algorithms", documents))


def _document(builder: Any) -> str:
    """What a builder makes, then its file's citation."""
    _, _, citation = (sys.modules[builder.__module__].__doc__ or "").partition("\n\n")
    return f"{(builder.__doc__ or '').partition(chr(10))[0]}\n\n{citation}"


def _listing(title: str, entries: dict[str, tuple[Parameters, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 1, 0))
    for name, (known, text) in entries.items():
        first, _, rest = text.partition("\n\n")
        given = ", ".join(f"{key}={_value(default)}" for key, (_, default) in known.items())
        source = " ".join(rest.split())
        table.add_row(f"[bold]{name}[/]", f"{first}\n[cyan]{given or 'no parameters'}[/]\n[dim]{source}[/]")
    return table


def _value(default: Any) -> str:
    return "none" if default is None else str(default)


def _say(text: str) -> None:
    err.print(text, soft_wrap=True)


def _load(spec: str, where: Where) -> Federation:
    """The data of a setup, with a line on what it is where it comes from files."""
    federation = setups.federation(spec, where, _say)
    if federation.origin:
        files = ", ".join(file["file"] for file in federation.origin["source"])
        _say("; ".join([f"{federation.name}, from {files}", *federation.origin.get("notes", [])]))
        _say("measuring every client's loss before training")
    return federation


def _train(directory: RunDirectory, simulation: Simulation, checkpoint_every: float) -> None:
    """The rounds that are left, then the results."""
    _advance(directory, simulation, checkpoint_every, f"fairwind resume {directory.path}")
    directory.write_models(simulation)
    directory.write_results(simulation)
    _show(directory.path)


def _advance(directory: RunDirectory, simulation: Simulation, checkpoint_every: float, again: str) -> None:
    """The rounds that are left, with a progress bar. Ctrl-C saves first, and says how to go on."""
    stop = Interrupt()
    written = len(simulation.history)
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=err,
    )
    settings, runs = simulation.settings, simulation.runs
    clients = len(simulation.federation)
    taking = simulation.schedule.participants
    some = f"{taking} of {clients}" if taking < clients else str(clients)
    compiling = " (compiling first)" if settings.compile == "on" and not simulation.done else ""
    err.print(
        f"{len(runs)} run{'s' * (len(runs) > 1)} × {some} clients on {settings.device}, into "
        f"{directory.path}{compiling}",
        soft_wrap=True,
    )

    def save() -> None:
        directory.save(simulation)
        if not err.is_terminal:
            err.print(f"round {simulation.round} of {settings.rounds}")

    with bar, stop:
        task = bar.add_task("rounds", total=settings.rounds, completed=simulation.round, rate="")

        def after_round() -> None:
            nonlocal written
            if len(simulation.history) > written:
                directory.write_history(simulation, since=written)
                written = len(simulation.history)
            rate = simulation.round / max(simulation.seconds, 1e-9)
            shown = f"{rate:.1f}/s" if rate >= 0.5 else f"{1 / rate:.0f} s each"
            bar.update(task, completed=simulation.round, rate=shown)
            if simulation.ranks.any(stop.asked) and not simulation.done:
                save()
                stop.saved = True
                raise KeyboardInterrupt

        try:
            simulation.run(save, every=checkpoint_every, after_round=after_round)
        except KeyboardInterrupt:
            bar.stop()
            where = f"stopped after round {simulation.round}" if stop.saved else "stopped"
            err.print(f"{where}; go on with: {again}", soft_wrap=True)
            raise


def _help(simulation: Simulation) -> None:
    """The rounds that are left, on a rank that only trains: rank 0 speaks, writes and stops for all."""
    stop = Interrupt()

    def after_round() -> None:
        if simulation.ranks.any(stop.asked) and not simulation.done:
            stop.saved = True
            raise KeyboardInterrupt

    with stop:
        try:
            simulation.run(after_round=after_round)
        except KeyboardInterrupt:
            if not stop.saved:
                raise


def _show(path: Path) -> None:
    """The table on the terminal, and the page."""
    from fairwind.report import summary_table, write_report  # charts need a second to load

    try:
        out.print(summary_table(json.loads((path / RESULTS).read_text())))
        write_report(path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(f"the report of {path} cannot be written: {first_line(error)}") from error
    out.print(f"report: {path / 'report.html'}", soft_wrap=True, markup=False)


class Interrupt:
    """Turns Ctrl-C, or a request to terminate, into a wish to stop after this round; a second stops now."""

    def __init__(self) -> None:
        self.asked = self.saved = False

    def __enter__(self) -> "Interrupt":
        self.before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        err.print("stopping after this round (again to stop now)")


def _refuse(command: Any, word: str) -> InputError:
    """What to say of a word that the command does not know."""
    if not word.startswith("-"):
        return InputError(f"unexpected argument {word!r}: see --help for what goes where")
    positional = ("setup", "directory", "studies", "file")
    names = [f.name.replace("_", "-") for f in fields(command) if f.name not in positional]
    return unknown("option", word, ["--" + name for name in names] + ["--help"])


COMMANDS = ("compare", "resume", "report", "paper", "sweep", "data", "list")
Command = (
    Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Resume, tyro.conf.subcommand("resume")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Paper, tyro.conf.subcommand("paper")]
    | Annotated[Sweep, tyro.conf.subcommand("sweep")]
    | Annotated[Data, tyro.conf.subcommand("data")]
    | Annotated[List, tyro.conf.subcommand("list")]
)


def _parse() -> tuple[Any, list[str]]:
    """The command the user typed, and the words it does not know."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(
                Command,
                prog="fairwind",
                description="Fast, fair federated learning.",
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if stop.code != 2:
            raise
        # The parser draws a box over several lines; its first sentence names the argument.
        inside = [line.strip("│ ") for line in said.getvalue().splitlines() if line.startswith("│")]
        message = (
            " ".join(inside).partition(" Got errors")[0].partition(" ──")[0].partition(" For ")[0].strip()
        )
        raise InputError(f"{message.rstrip('.')}; see 'fairwind {sys.argv[1]} --help'") from None


def _fail(message: str) -> NoReturn:
    """One line of error and exit code 2; what rank 0 stumbles over too, it alone says."""
    if err.quiet:
        time.sleep(PATIENCE)  # when rank 0 fails, torchrun ends this rank meanwhile
        err.quiet = False
    err.print(f"fairwind: error: {message}", style="red", soft_wrap=True)
    sys.exit(2)


def main() -> NoReturn:
    """Runs a command; a user's mistake is one line and exit code 2."""
    if not find().first:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        err.quiet = True
    warnings.showwarning = lambda message, *_: err.print(f"fairwind: {message}", soft_wrap=True)
    try:
        if not (words := sys.argv[1:]):
            sys.argv.append("--help")
        if words == ["--version"]:
            out.print(f"fairwind {__version__}")
            sys.exit(0)
        if words and not words[0].startswith("-") and words[0] not in COMMANDS:
            raise unknown("command", words[0], COMMANDS)
        command, rest = _parse()
        if rest:
            raise _refuse(command, rest[0])
        if find().first or isinstance(command, Compare | Resume):
            command.run()
    except InputError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.strerror}: {error.filename}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
