"""The results of a comparison in Python: metrics, curves, trained models, the report page."""

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fairwind.data.values import ColumnNames
from fairwind.engine.evaluation import EvaluatedModel
from fairwind.engine.modules import COLUMNS
from fairwind.engine.simulation import Simulation
from fairwind.errors import InputError, first_line, in_range, needs_extra, python_numbers, unknown, whole
from fairwind.intervals import Interval, paired_differences
from fairwind.metrics import Floats
from fairwind.runs.directory import RunDirectory
from fairwind.runs.files import CLIENTS, MODELS, RESULTS
from fairwind.runs.folder import resuming
from fairwind.runs.gains import Joining, alone_label, joining
from fairwind.runs.growth import finished_at
from fairwind.runs.references import is_reference
from fairwind.runs.results import final_metrics
from fairwind.runs.schema import Baseline, GroupAverage, HistoryLine, Metrics, Plan, Results, RunRow
from fairwind.runs.seals import check_whole, read_history, read_results, with_history
from fairwind.serving.export import ONNX, check_format, write_model, write_state
from fairwind.serving.model import outputs_of, read_inputs, samples_of, trained
from fairwind.task import Task

if TYPE_CHECKING:
    import pandas

    from fairwind.report.record import Record


@dataclass(frozen=True)
class NewClients:
    """How a model does on clients that took no part in training."""

    metrics: Metrics[float | None]  #: By name, as those of the others.
    score: Tensor  #: (N,) Each client's test score.
    loss: Tensor  #: (N,) Each client's mean test loss.
    scores: dict[str, Tensor]  #: (N,) Every score by name.
    clients: list[str]  #: Their names.


@dataclass(frozen=True)
class Result:
    """A trained model, and each client's results with it."""

    algorithm: str  #: Its spec, or the name it was given.
    seed: int  #: Of initial weights, batch order and participation.
    metrics: Metrics[float | None]  #: By name, as in docs/metrics.md; accuracies in percent.
    score: Tensor  #: (K,) Each client's test score, accuracies in percent; NaN without test samples.
    loss: Tensor  #: (K,) Each client's mean test loss.
    scores: dict[str, Tensor]  #: (K,) Every score by name.
    rounds: list[int]  #: The evaluated rounds.
    curve: Tensor  #: (evaluated rounds, K) Each client's score; on validation samples, if there are any.
    history: list[HistoryLine]  #: The metrics after each evaluated round, likewise.
    state_dict: dict[str, Tensor]  #: Of the trained model.
    left_out: int  #: Contributions left out because a number was not finite.
    stalled_rounds: int  #: Rounds in which the model stayed because no client was usable.
    groups: dict[str, GroupAverage[float | None]] = field(default_factory=dict)  #: By label: clients, avg.
    worst_group: str | None = None  #: Of groups, the one with the worst average.
    clients: list[str] = field(default_factory=list, repr=False)  #: Their names.
    baseline: Baseline | None = None
    """What it is, if not an algorithm's own model: local, pooled or finetuned."""
    new_clients: NewClients | None = field(default=None, repr=False)
    """The same of clients that took no part in training, if there are any, and the model fits them."""
    personal: bool = False  #: Whether each client has a model: what is its own in `state_dict` is (K, …).
    task: Task | None = field(default=None, repr=False, compare=False)
    """The task, if it was given; else a comparison's directory may say which it is."""
    path: Path | None = field(default=None, repr=False, compare=False)
    """The comparison's directory, if it was kept in one."""
    columns: ColumnNames = field(default_factory=dict, repr=False)
    """The names of the columns that the model was trained on, and of classes, where they have names."""

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, a module on the CPU in evaluation mode."""
        if self.personal:
            raise InputError(f"{self.algorithm} has a model for each client: take result.model_of(client)")
        return self._made(None)

    def model_of(self, client: str | int) -> nn.Module:
        """A client's own model, by its name or index; the model of all if clients have none of their own."""
        return self._made(client)

    def predict(
        self,
        data: Any,
        *,
        client: str | int | None = None,
        batch_size: int = 256,
        device: str | torch.device = "auto",
    ) -> Any:
        """The model's outputs, such as logits, for a client's test samples, or for inputs that are given.

        `data` is a client's name or index, or inputs as the task's: a batch, as a tensor, an array, a data
        frame (whose columns are matched by name), or a tuple or dict of these. Outputs are on the CPU, in the
        order of the samples; of logits, classes are `argmax(1)`. Where each client has a model of its own,
        `client` says whose predicts; without it, a client's samples are predicted by its own.
        """
        federation = self._task.federation
        if isinstance(data, str | int | np.integer):
            name = self.clients[self._index(data if isinstance(data, str) else int(data))]
            if name not in federation.names:
                raise InputError(f"the task has no samples of client {name!r}: give the inputs themselves")
            inputs = samples_of(federation, federation.names.index(name))
            client = name if self.personal and client is None else client
        else:
            inputs = read_inputs(data, federation.inputs, self._columns)
        model = self._made(client) if self.personal or client is not None else self._shared
        return outputs_of(model, inputs, federation.inputs, batch_size=batch_size, device=str(device))

    def save(self, to: str | Path, *, client: str | int | None = None) -> Path:
        """Writes the model to a file: its state dict (NAME.safetensors, NAME.pt) or a graph (NAME.onnx).

        Of personal models, that of a `client`. ONNX needs the extra fairwind[onnx].
        """
        to = Path(to)
        check_format(to)
        if client is None and not self.personal and to.suffix != ONNX:
            return write_state(self._weights(), to)  # which needs no task
        return write_model(self._made(client), to, self._task.federation)

    @cached_property
    def _shared(self) -> nn.Module:
        """The model of all, which no user has in hands."""
        return self._made(None)

    def _made(self, client: str | int | None) -> nn.Module:
        """The model of a client, or of all."""
        if self.personal and client is None:
            whose = f"client={self.clients[0]!r}"
            raise InputError(f"{self.algorithm} has a model for each client: say whose, as in {whose}")
        k = None if client is None else self._index(client)
        made = trained(self._task, self.seed, self._weights(), k if self.personal else None)
        setattr(made, COLUMNS, self._columns)
        return made

    @property
    def _columns(self) -> ColumnNames:
        return self.columns or self._task.federation.meanings

    def _weights(self) -> dict[str, Tensor]:
        if not self.state_dict:
            raise InputError("no trained models were kept, as in a study: train with fairwind compare")
        return self.state_dict

    @cached_property
    def _task(self) -> Task:
        """The task that was given, or that the directory names, with its columns in the order of training."""
        task = self.task or self._found_task()
        federation = task.federation.arranged(self.columns, "those of training")
        return replace(task, federation=federation) if federation is not task.federation else task

    def _found_task(self) -> Task:
        if self.path is None:
            raise InputError("a result that was pickled has lost its task: predict where it was trained")
        try:
            directory = RunDirectory.open(self.path)
            if is_reference(directory.recipe.setup):
                warnings.warn(
                    f"{self.path} names the code of its task, which is run now: {directory.code[0]}; "
                    f"give the task to have another: fairwind.load({str(self.path)!r}, task=task)",
                    stacklevel=3,
                )
            return directory.task()
        except InputError as error:
            again = f"fairwind.load({str(self.path)!r}, task=task)"
            raise InputError(f"{self.path} does not lead to its task ({error}): give it, {again}") from None

    def _index(self, client: str | int) -> int:
        """A client's index among the results."""
        if isinstance(client, str):
            if client not in self.clients:
                raise unknown("client", client, self.clients)
            return self.clients.index(client)
        k: int = python_numbers(client)
        whole(0, client=k)
        in_range(0, len(self.clients), client=k)
        return k

    def __getstate__(self) -> dict[str, Any]:
        """Without the task and the module made from it, which need not be picklable."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"task": None}

    def __repr__(self) -> str:
        numbers = {"avg": self.metrics["avg"], "worst30": self.metrics["worst30"]}
        shown = ", ".join(f"{k} –" if v is None else f"{k} {v:.4g}" for k, v in numbers.items())
        return f"<Result of {self.algorithm}, seed {self.seed}: {shown}>"


@dataclass(frozen=True)
class Comparison:
    """Several algorithms under several seeds on one task, trained."""

    results: Results  #: The content of results.json.
    runs: list[Result]  #: One for each algorithm and seed.
    clients: list[str]  #: Their names.
    path: Path | None = None
    """The directory, if it was kept in one."""
    groups: list[str] = field(default_factory=list)
    """The clients' group labels, if they have any."""
    test_size: list[int] = field(default_factory=list)
    """The clients' test samples."""

    @property
    def plan(self) -> Plan:
        """How it was computed, part by part: its `value` and `why`; `fairwind compare --explain` shows it."""
        return self.results.get("plan", {})

    def __getitem__(self, key: Any) -> Result:
        """A run: by its index, its algorithm (with the first seed), or (algorithm, seed)."""
        key = python_numbers(key)
        if isinstance(key, int):
            return self.runs[key]
        label, seed = key if isinstance(key, tuple) else (key, None)
        for run in self.runs:
            if run.algorithm == label and seed in (None, run.seed):
                return run
        raise unknown("run", str(key), [f"{r.algorithm}, seed {r.seed}" for r in self.runs])

    def __iter__(self) -> Iterator[Result]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __repr__(self) -> str:
        try:
            from rich.console import Console

            from fairwind.report.table import new_clients_table, summary_table
        except ModuleNotFoundError:  # without the extra for the command line
            return "\n".join(map(repr, self.runs))
        console = Console(width=80, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(summary_table(self.results, self.ahead()))
            if (new := new_clients_table(self.results)) is not None:
                console.print(new)
        return capture.get().rstrip()

    def to_pandas(self) -> "pandas.DataFrame":
        """One row for each run: algorithm, seed and metrics."""
        pandas = _pandas()
        rows = [{"algorithm": run.algorithm, "seed": run.seed, **run.metrics} for run in self.runs]
        frame = pandas.DataFrame(rows)
        return frame.assign(worst_group=[run.worst_group for run in self.runs]) if self.groups else frame

    def groups_to_pandas(self) -> "pandas.DataFrame":
        """One row for each group of each run: its clients and their average score."""
        if not self.groups:
            raise InputError("the clients are in no groups: give Federation.from_clients(…, groups=…)")
        rows = [
            {"algorithm": run.algorithm, "seed": run.seed, "group": label, **group}
            for run in self.runs
            for label, group in run.groups.items()
        ]
        return _pandas().DataFrame(rows)

    def clients_to_pandas(self) -> "pandas.DataFrame":
        """One row for each client of each run: its scores and loss."""
        pandas = _pandas()
        frames = []
        for run in self.runs:
            groups = {"group": self.groups} if self.groups else {}
            scores = {name: value.numpy() for name, value in run.scores.items()}
            frame = pandas.DataFrame({"client": self.clients, **groups, **scores, "loss": run.loss.numpy()})
            frames.append(frame.assign(algorithm=run.algorithm, seed=run.seed))
        return pandas.concat(frames, ignore_index=True)

    def history_to_pandas(self) -> "pandas.DataFrame":
        """One row for each run and evaluated round."""
        return _pandas().DataFrame([line for run in self.runs for line in run.history])

    def difference(self, one: str, other: str) -> Mapping[str, Interval]:
        """Average, STD and worst 30 % of one algorithm minus those of another.

        With 95 % confidence intervals, paired by client and seed, as on the page: those of one algorithm
        with each other one hold together. With one seed they are of these models, over clients alone.
        """
        a, b = (self._scores_of(label) for label in (one, other))
        if a.shape != b.shape:
            raise InputError(f"{one} and {other} were not trained under the same seeds")
        comparisons = max(1, len(self.results["summary"]) - 1)
        return paired_differences(a, b, kind=self.results["scores"][0]["kind"], comparisons=comparisons)

    def joining(self) -> list[Joining]:
        """By algorithm, who gains from joining: each client's score less that of training alone.

        For a comparison with the algorithm "local".
        """
        rows = self.results["runs"]
        if alone_label(rows) is None:
            raise InputError("training alone is not compared: add 'local' to the algorithms")
        score = torch.stack([run.score for run in self.runs])
        return joining(rows, score, self.results["scores"][0]["kind"])

    def new_clients_to_pandas(self) -> "pandas.DataFrame":
        """One row for each run: its metrics over the clients that took no part in training."""
        rows = [
            {"algorithm": run.algorithm, "seed": run.seed, **run.new_clients.metrics}
            for run in self.runs
            if run.new_clients is not None
        ]
        if not rows:
            raise InputError("there are no new clients: give Federation.from_clients(…, new_clients=0.2)")
        return _pandas().DataFrame(rows)

    def report(self) -> Path:
        """Writes the report page and figures into the directory; returns the page's path."""
        if self.path is None:
            raise InputError("this comparison was not kept: give compare(…, out='runs/NAME') for a report")
        try:
            from fairwind.report import write_report
        except ModuleNotFoundError as error:
            raise needs_extra("a report page", error, "cli") from None
        return write_report(self.path)[0]

    def _repr_html_(self) -> str:
        """A table, in a notebook."""
        try:
            from fairwind.report.html import measures_table
            from fairwind.report.table import FIRST, measures
        except ModuleNotFoundError:
            return f"<pre>{escape(repr(self))}</pre>"
        return measures_table(self.results, measures(self.results)[: len(FIRST)], ahead=self.ahead())

    def ahead(self) -> dict[str, str]:
        """By measure, the algorithm that is shown to be the best."""
        from fairwind.report.finding import best_shown
        from fairwind.report.paired import paired

        record = self._record()
        return best_shown(record, paired(record))

    def _record(self) -> "Record":
        """As the report reads it from a directory."""
        from fairwind.report.record import Record

        score, loss = (
            np.stack([getattr(run, n).float().numpy() for run in self.runs]) for n in ("score", "loss")
        )
        history = [line for run in self.runs for line in run.history]
        sizes = np.asarray(self.test_size, dtype=np.int64)
        new = [run.new_clients for run in self.runs if run.new_clients is not None]
        return Record(
            self.results,
            history,
            score,
            sizes,
            sizes,
            self.clients,
            loss=loss,
            new_score=torch.stack([each.score for each in new]).float().numpy() if new else None,
            new_names=tuple(new[0].clients) if new else (),
        )

    def _scores_of(self, label: str) -> Floats:
        mine = [run.score.double().numpy() for run in self.runs if run.algorithm == label]
        if not mine:
            raise unknown("algorithm", label, dict.fromkeys(run.algorithm for run in self.runs))
        return np.stack(mine)


def of_simulation(simulation: Simulation, results: Results, path: Path | None, task: Task) -> Comparison:
    """The comparison of a simulation."""
    names = [score.name for score in simulation.scores]
    curves, final = simulation.curves.tensor(), simulation.final()
    runs, watched = [], len(simulation.views)
    for r, run in enumerate(final.views):
        line, kept = final.lines[r], r < watched
        scores = [final.score[r], *(values[r] for values in final.other_scores)]
        runs.append(
            Result(
                algorithm=run.label,
                seed=run.seed,
                metrics=final_metrics(line),
                score=final.score[r],
                loss=final.loss[r],
                scores=dict(zip(names, scores, strict=True)),
                rounds=list(simulation.curves.rounds) if kept else [],
                curve=curves[:, r] if kept else curves[:0, 0],
                history=simulation.history[r::watched] if kept else [],
                state_dict={k: v.cpu() for k, v in simulation.state_dict(r).items()},
                left_out=int(simulation.left_out[run.run]),
                stalled_rounds=int(simulation.stalled[run.run]),
                groups=line.get("groups", {}),
                worst_group=line.get("worst_group"),
                clients=list(simulation.federation.names),
                baseline=run.baseline,
                new_clients=_on_new_clients(simulation, run),
                personal=bool(simulation.own_names(r)),
                task=task,
                path=path,
                columns=results["federation"].get("columns", {}),
            )
        )
    federation = simulation.federation
    sizes = federation.test.tolist()
    return Comparison(results, runs, list(federation.names), path, list(federation.groups), sizes)


def _on_new_clients(simulation: Simulation, view: EvaluatedModel) -> NewClients | None:
    """How a model of a simulation does on clients that took no part in training."""
    now, new = simulation.final_of_new_clients(), simulation.federation.new_clients
    if now is None or new is None or view not in now.views:
        return None
    i = now.views.index(view)
    values = [values[i] for values in (now.score, *now.other_scores)]
    scores = dict(zip([score.name for score in simulation.scores], values, strict=True))
    return NewClients(final_metrics(now.lines[i]), now.score[i], now.loss[i], scores, list(new.names))


def load(path: str | Path, *, task: Task | None = None) -> Comparison:
    """A finished comparison, read back from its directory.

    To predict with its models, give the `task`, unless it is a setup or was named on the command line.
    """
    path = Path(path)
    files = finished_at(path)
    if task is not None and not isinstance(task, Task):
        raise InputError(f"task is a {type(task).__name__}: give the fairwind.Task that was trained")
    if not (files / RESULTS).exists():
        raise InputError(
            f"{path} holds no finished comparison: there is no {RESULTS} in it; "
            f"finish one that was begun there with {resuming(path)}"
        )
    check_whole(files)
    try:
        results = read_results(files)
        with safe_open(files / CLIENTS, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        models = load_file(files / MODELS) if (files / MODELS).exists() else {}
        history = read_history(files, results)
        names = [score["name"] for score in results["scores"]]
        rows, clients = results["runs"], json.loads(metadata["names"])
        own_parts = bool(results["sharing"]["personal"]) if "sharing" in results else False
        rounds, watched = json.loads(metadata["rounds"]), len(with_history(rows))
        new = [row for row in rows if "new_clients" in row]

        def on_new_clients(row: RunRow) -> NewClients | None:
            if row not in new:
                return None
            i = new.index(row)
            scores = {n: tensors["new.score" if n == names[0] else f"new.score.{n}"][i] for n in names}
            own, loss = scores[names[0]], tensors["new.loss"][i]
            return NewClients(
                final_metrics(row["new_clients"]), own, loss, scores, json.loads(metadata["new_names"])
            )

        runs = [
            Result(
                algorithm=row["algorithm"],
                seed=row["seed"],
                metrics=row["final"],
                score=tensors["score"][r],
                loss=tensors["loss"][r],
                scores={n: tensors["score" if n == names[0] else f"score.{n}"][r] for n in names},
                rounds=rounds if r < watched else [],
                curve=tensors["curves"][:, r] if r < watched else tensors["curves"][:0, 0],
                history=history[r::watched] if r < watched else [],
                state_dict=_of(models, f"{row['algorithm']}/{row['seed']}/"),
                left_out=row["left_out"],
                stalled_rounds=row["stalled_rounds"],
                groups=row.get("groups", {}),
                worst_group=row.get("worst_group"),
                clients=clients,
                baseline=row.get("baseline"),
                new_clients=on_new_clients(row),
                personal=row.get("model") == "personal" or own_parts,
                task=task,
                path=path,
                columns=results["federation"].get("columns", {}),
            )
            for r, row in enumerate(rows)
        ]
        groups = json.loads(metadata.get("groups", "[]"))
        sizes = tensors["test_size"].tolist()
        return Comparison(results, runs, clients, path, groups, sizes)
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise InputError(
            f"{path} cannot be read ({first_line(error)}): mend it with {resuming(path)}"
        ) from error


def _of(models: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in models.items() if name.startswith(prefix)}


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise InputError("pandas is not installed: pip install pandas") from None
    return pandas
