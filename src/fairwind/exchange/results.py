"""The directory of a real federation's training: checkpoints, and at the end what a comparison leaves."""

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fairwind.data.values import ColumnNames
from fairwind.engine.checkpoint import load_checkpoint, save_checkpoint
from fairwind.engine.settings import NUMBERS
from fairwind.errors import InputError, damaged
from fairwind.exchange.evaluation import Evaluations
from fairwind.exchange.releases import FILES
from fairwind.exchange.server import Aggregator
from fairwind.runs.environment import environment
from fairwind.runs.files import (
    HISTORY,
    MODELS,
    RECIPE,
    read_sealed,
    sealed,
    write_atomic,
    write_json,
)
from fairwind.runs.folder import CHECKPOINTS, FEDERATED, held
from fairwind.runs.recipe import algorithm_digest
from fairwind.runs.rehearsal import GIVEN, STARTS, Rehearsal
from fairwind.runs.results import results_of, run_row, timing
from fairwind.runs.schema import FederatedConfig, FederationFacts, ResultsFile, TotalCost
from fairwind.runs.seals import finish, history_lines


def owner_of(
    aggregator: Aggregator,
    evaluations: Evaluations,
    *,
    task: str,
    clients_per_round: int | None,
    columns: ColumnNames | None = None,
) -> FederatedConfig:
    """Everything that determines the numbers of a training, from the model that it starts with."""
    layout, privacy = aggregator.layout, aggregator.privacy
    owner: FederatedConfig = {
        "algorithm": evaluations.label,
        "algorithm_digest": algorithm_digest(aggregator.algorithm),
        "seed": evaluations.seed,
        "task": task,
        "parameters": dict(zip(layout.names, map(list, layout.shapes), strict=True)),
        "sends": aggregator.sends,
        "bounds": {name: str(value) for name, value in vars(aggregator.bounds).items()},
        "clients_per_round": clients_per_round,
        "start": aggregator.start,
        "scores": [score.name for score in evaluations.scores],
        "numbers": NUMBERS,
    }
    if columns:
        owner["columns"] = _named(columns)
    if aggregator.clients is not None:
        owner["clients"] = aggregator.clients
    if aggregator.codec:
        owner["codec"] = aggregator.codec.name
    if aggregator.defence_spec:
        owner["defence"] = aggregator.defence_spec
    if privacy:
        owner["privacy"] = privacy.described()
    return owner


class FederatedRun:
    """The directory of one training, unfinished or finished."""

    def __init__(self, path: Path, owner: FederatedConfig, aggregator: Aggregator, evaluations: Evaluations):
        """`owner` is what `owner_of` says; the directory of another training is refused."""
        self.aggregator, self.evaluations = aggregator, evaluations
        self.path = path
        self.owner: FederatedConfig = json.loads(json.dumps(owner))
        self.began = time.monotonic()
        self.before = 0.0  # seconds until a resumption
        self.stack = ExitStack()
        self.stack.enter_context(held(path))
        try:
            self._open()
            self.messages = aggregator.keep_releases(path)
        except InputError:
            self.close()
            raise

    def _open(self) -> None:
        """Begins a training, or finds that it is this one."""
        recipe = self.path / RECIPE
        if not recipe.exists() and any(self.path.iterdir()):
            raise InputError(f"{self.path} is not empty: give another place, so that nothing is overwritten")
        if recipe.exists():
            with damaged(lambda: f"{recipe} cannot be read", "put a copy of it there, or give another place"):
                content = read_sealed(recipe)
            begun: Any = content.get(FEDERATED) or {}
            starts = [Rehearsal(GIVEN, {STARTS: each.get("start", [])}) for each in (begun, self.owner)]
            if {**begun, "start": None} != {**self.owner, "start": None} or starts[0].differs(starts[1]):
                raise InputError(f"{self.path} holds another training: give another place")
            self.owner = begun  # whose start is the same up to rounding
        else:
            write_json(recipe, sealed({FEDERATED: self.owner}))

    def close(self) -> None:
        """Releases the lock on the directory."""
        self.stack.close()

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.began

    def restore(self) -> list[str]:
        """Goes back to the newest good checkpoint; returns what there is to say."""
        checkpoint, refused = load_checkpoint(self.path / CHECKPOINTS, self._name)
        messages = [*self.messages, *refused]
        if checkpoint is None:
            self._check_counted()
            return messages
        self.aggregator.restore(checkpoint)
        self.evaluations.restore(checkpoint.record["evaluations"])
        self.before = checkpoint.record["seconds"]
        return [*messages, f"goes on after round {checkpoint.round}, from {self.path}"]

    def _check_counted(self) -> None:
        """Refuses to begin again where noisy sums were released, and nothing says how many."""
        begun = (self.path / HISTORY).exists() or any((self.path / CHECKPOINTS).glob("*"))
        if self.aggregator.privacy and begun and not self.aggregator.releases.made:
            raise InputError(
                f"{self.path} has neither a usable checkpoint nor {FILES[0]}, so the privacy that was spent "
                "is not known: put back a copy of that file, or begin anew in another directory"
            )

    def save(self) -> None:
        """A checkpoint of the rounds that are over."""
        made = self.aggregator.checkpoint()
        record = {**made.record, "evaluations": self.evaluations.record(), "seconds": self.seconds}
        save_checkpoint(self.path / CHECKPOINTS, made._replace(record=record), self._name)
        write_atomic(self.path / HISTORY, history_lines(self.evaluations.history).encode())

    @property
    def _name(self) -> str:
        return json.dumps(self.owner, sort_keys=True)

    def export(self, module: nn.Module, *, engine: str, columns: ColumnNames | None = None) -> bool:
        """Writes results and models; the models alone, and returns False, if no client was ever evaluated.

        The final metrics are those of the models, or missing if nobody has evaluated these.
        """
        if evaluated := bool(self.evaluations.last):
            if not self.evaluations.are_of(self.aggregator.round):
                self.evaluations.add(self.aggregator.round, {}, self.aggregator.counts())
            self.finish(module, engine=engine, columns=columns)
        elif trained := self._trained(module):
            write_atomic(self.path / MODELS, save(trained))
        return evaluated

    def finish(self, module: nn.Module, *, engine: str, columns: ColumnNames | None = None) -> ResultsFile:
        """Results, scores of clients and the trained module, in the form of a comparison's."""
        aggregator, evaluations, task = self.aggregator, self.evaluations, self.owner["task"]
        clients = evaluations.of_clients()
        metadata = {"names": json.dumps(evaluations.clients), "rounds": json.dumps(evaluations.rounds)}
        rows = [
            run_row(
                line,
                aggregator.round,
                left_out=aggregator.left_out,
                stalled=aggregator.stalled,
                cost=cast(TotalCost, aggregator.bytes.named()) if aggregator.bytes.up else None,
                model=view.model,
                privacy=aggregator.accountant.described() if aggregator.accountant else None,
            )
            for view, line in zip(evaluations.views, evaluations.newest, strict=True)
        ]
        results = results_of(
            setup=task,
            task=task,
            command="",
            config=self.owner,
            scores=evaluations.scores,
            environment=environment("cpu"),
            federation=_described(task, clients, columns or {}),
            data=None,
            runs=rows,
            timing=timing(self.seconds, aggregator.round, 1, client_steps=None),
            engine=engine,
        )
        numbers = {name: t.float() if t.is_floating_point() else t for name, t in clients.items()}
        return finish(self.path, results, evaluations.history, numbers, metadata, self._trained(module))

    def _trained(self, module: nn.Module) -> dict[str, Tensor]:
        """The models, by algorithm, seed and the names in their state dicts."""
        trained: dict[str, Tensor] = {}
        for view in self.evaluations.views:
            if view.model == "personal":  # these stay with the clients
                continue
            self.aggregator.load(module, averaged=view.model == "averaged")
            for name, value in module.state_dict().items():
                trained[f"{view.label}/{view.seed}/{name}"] = value.detach().cpu().clone().contiguous()
        self.aggregator.load(module)
        return trained


def _described(name: str, clients: dict[str, Tensor], columns: ColumnNames) -> FederationFacts:
    """A federation as far as its clients told of it."""
    train = clients["train_size"]
    known = train if len(train) else torch.zeros(1, dtype=torch.int64)
    facts: FederationFacts = {
        "name": name,
        "clients": len(train),
        "classes": None,
        "train_samples": int(train.sum()),
        "test_samples": int(clients["test_size"].sum()),
        "smallest": int(known.min()),
        "median": float(known.double().quantile(0.5)),
        "largest": int(known.max()),
    }
    if columns:
        facts["columns"] = _named(columns)
    return facts


def _named(columns: ColumnNames) -> dict[str, list[str]]:
    return {place: list(names) for place, names in columns.items()}
