"""The simulation: rounds of all runs, evaluated and resumable."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairwind.aggregation import first_state, refuses
from fairwind.data.federation import Federation
from fairwind.data.samples import cast
from fairwind.engine.builder import build_executor, chunk_numbers
from fairwind.engine.checkpoint import Checkpoint
from fairwind.engine.checks import build, check_room, check_runs, check_shapes, check_shared, placed
from fairwind.engine.evaluation import Curves, Scorer, averaged, judge_views, split, training_losses, views_of
from fairwind.engine.executor import RoundSums, Run
from fairwind.engine.losses.loss import cross_entropy
from fairwind.engine.memory import Memories
from fairwind.engine.plain import PlainModel
from fairwind.engine.plan import choose
from fairwind.engine.precision import products
from fairwind.engine.ranks import ALONE, Ranks
from fairwind.engine.schedule import Planner
from fairwind.engine.server import Server
from fairwind.engine.settings import Model, Settings, resolve
from fairwind.engine.workers import keep_memory, threads
from fairwind.errors import InputError
from fairwind.metrics import history_line, model_metrics
from fairwind.runs.schema import HistoryLine

LONG = 10**7  # operations of a sample's forward pass


class Simulation:
    """All runs of a comparison, and their state at some round."""

    def __init__(
        self,
        model: Model,
        federation: Federation,
        runs: Sequence[Run],
        settings: Settings,
        *,
        loss: Any = cross_entropy,
        score: Any = None,
        augment: Any = None,
        ranks: Ranks = ALONE,
        name: str = "",
    ):
        """`loss`, `score` and `augment` as users give them: see `Task`."""
        self.ranks, self.runs, self.name = ranks, list(runs), name
        self.settings = resolve(settings, ranks)
        check_runs(self.runs, self.settings, ranks)
        if not federation.test.any():
            raise InputError("no client has test samples; give clients more samples or a smaller train share")
        models = {run.seed: build(model, run.seed) for run in self.runs}
        first = next(iter(models.values()))
        check_shared(models)
        dtype = next((p.dtype for p in first.parameters() if p.requires_grad), torch.float32)
        inputs = cast(federation.inputs, dtype)
        self.federation = placed(replace(federation, inputs=inputs), self.settings)
        s = self.settings
        self.planner = Planner(
            self.federation, s.solver, s.participation, s.clients_per_round, s.probe_samples
        )
        with self._threads(1):
            self.plain = PlainModel(first, self.federation, loss, score, s.solver.batch_size, augment)
            self.scores = self.plain.judges
            rows = self.planner.participants * len(self.runs)
            self.choice = choose(first, self.plain, self.federation, self.settings, ranks, rows)
        self.settings.check_target(self.scores[0])
        self.settings = replace(self.settings, engine=self.choice.engine)
        self.layout = self.plain.layout

        start = {seed: self.layout.flatten(m).to(self.settings.device) for seed, m in models.items()}
        self.x = torch.stack([start[run.seed] for run in self.runs])  # (R, P)
        clients = len(self.federation)
        states = [first_state(run.algorithm, x, clients) for run, x in zip(self.runs, self.x, strict=True)]
        # Written in place: no two may share memory, or a replayed round would use stale values.
        self.states = [type(state)(*(t.to(self.x.device, copy=True) for t in state)) for state in states]
        self.server = Server(self.runs, self.x, workers=self.settings.workers or 1)
        shape = len(self.runs), clients
        self.loss0 = torch.full(shape, torch.nan, dtype=torch.float64, device=self.x.device)
        self.left_out, self.stalled = torch.zeros(2, shape[0], dtype=torch.int64, device=self.x.device)
        self.lowest = torch.full(shape[:1], torch.inf, dtype=torch.float64, device=self.x.device)
        if self.settings.device == "cpu":
            keep_memory()
        check_room(self.runs, self.planner.participants * self.x[0].nbytes, self.x.device)
        room = chunk_numbers(self.settings, self.x.element_size())
        self.memories = Memories(self.runs, self.x, clients, room=room)
        self.executor, self.settings, self.plan = build_executor(
            self.choice,
            self.plain,
            self.federation,
            self.planner,
            self.runs,
            self.memories,
            settings,
            self.settings,
            ranks,
        )
        self.test = split(self.federation, "test")
        self.views = views_of(self.runs)
        self.round = 0
        self.client_steps = 0
        self.seconds = 0.0
        self.history: list[HistoryLine] = []
        self.curves = Curves()
        found = torch.full((1 + len(self.scores), len(self.views), clients), torch.nan, dtype=torch.float64)
        self.loss, self.score, *self.other_scores = (
            found  # (views, K) each: test losses, main score, other scores
        )

    def start(self) -> None:
        """Evaluates the initial models: every client's F_k(x⁰), and its test scores."""
        asking = [r for r, run in enumerate(self.runs) if run.algorithm.probe != "none"]
        first: dict[int, int] = {}  # by seed, the run whose model is measured for all of that seed
        for r in asking:
            first.setdefault(self.runs[r].seed, r)
        if first:
            with products(self.settings.precision, self.x.device):
                x = self.x[list(first.values())]
                losses = training_losses(self._scorer, self.federation, x, self.ranks)
            for r in asking:
                self.loss0[r] = losses[list(first).index(self.runs[r].seed)]
            self._check_losses(self.loss0)
        self.evaluate()

    @property
    def _scorer(self) -> Scorer:
        """The scorer for models that share samples."""
        # With many operations per sample, one model fills a GPU, and PyTorch's own kernels are faster.
        one_by_one = self.x.is_cuda and self.plain.flops >= LONG
        return self.plain if one_by_one or self.choice.stacked is None else self.choice.stacked

    def _threads(self, count: int) -> AbstractContextManager[None]:
        """Sets the number of threads of kernels on a CPU; has no effect on a GPU."""
        return threads(count) if self.settings.device == "cpu" else nullcontext()

    @property
    def done(self) -> bool:
        return self.round >= self.settings.rounds or self._reached()

    def _reached(self) -> bool:
        """Whether every run's average was at the target when it was last evaluated."""
        target, sign = self.settings.target, self.scores[0].sign
        newest = self.history[-len(self.views) :]
        if target is None or not newest:
            return False
        return all(line["avg"] is not None and sign * line["avg"] >= sign * target for line in newest)

    def step(self) -> None:
        """One round of every run, and an evaluation if one is due; calls `start` before the first."""
        if not self.history:
            self.start()
        began = time.perf_counter()
        with self._threads(self.executor.threads), products(self.settings.precision, self.x.device):
            self.client_steps += self.executor.prepare(self.round)
            self.executor.round(self.x, self.loss0, self.states, self._advance)
        self.round += 1
        if self.round % self.settings.eval_every == 0 or self.done:
            self.evaluate()
        self.seconds += time.perf_counter() - began

    @torch.no_grad()
    def _advance(self, outcome: RoundSums) -> None:
        """The servers' steps, in place."""
        stepped = []
        for r, run in enumerate(self.runs):
            stepped.append(self.server.advance(r, self.x[r], self.states[r], outcome))
            check_shapes(run.label, self.states[r], stepped[-1][1])
        for r, (x, state, moved) in enumerate(stepped):
            self.x[r] = x
            for old, new in zip(self.states[r], state, strict=True):
                old.copy_(new)
            self.stalled[r] += ~moved
        self.left_out += outcome.left_out
        self.lowest.copy_(torch.fmin(self.lowest, outcome.lowest))

    def run(
        self,
        save: Callable[[], None] | None = None,
        *,
        every: float = 30,
        after_round: Callable[[], None] | None = None,
    ) -> None:
        """Trains the remaining rounds; `save` is called every so many seconds, and at the end."""
        saved = time.monotonic()
        while not self.done:
            self.step()
            if after_round is not None:
                after_round()
            if save is not None and (self.done or time.monotonic() - saved >= every):
                save()
                saved = time.monotonic()

    def evaluate(self) -> None:
        """Every client's test loss and scores now, added to the history."""
        self._check_losses(self.lowest[:, None])
        trained = self.views, self.runs, self.x, self.states, self.memories
        with products(self.settings.precision, self.x.device):
            scorers = self._scorer, self.choice.stacked or self.plain
            judged = judge_views(*trained, scorers, self.federation, *self.test, self.ranks)
        self.loss, self.score, *self.other_scores = judged
        self.curves.add(self.round, self.score)
        for i, view in enumerate(self.views):
            # Scalars of the server's state; before the first round they have no meaning.
            state = self.states[view.run]._asdict() if self.round else {}
            scalars = {k: float(v) for k, v in state.items() if v.ndim == 0}
            test, groups = self.federation.test, self.federation.groups
            metrics = {
                score.name: model_metrics(values[i], self.loss[i], test, score.kind, groups)
                for score, values in zip(self.scores, (self.score, *self.other_scores), strict=True)
            }
            self.history.append(history_line(view.label, view.seed, self.round, metrics, scalars))

    def _check_losses(self, losses: Tensor) -> None:
        """Refuses negative losses (R, K) if an algorithm cannot use them."""
        for run, lowest in zip(self.runs, losses, strict=True):
            if run.algorithm.probe != "none" and (lowest < 0).any() and refuses(run.algorithm, loss=-1):
                k = int(lowest.nan_to_num(torch.inf).argmin())
                who = f"client {self.federation.names[k]!r}" if len(lowest) > 1 else "a client"
                raise InputError(
                    f"{run.label}: the loss of {who} is {float(lowest[k]):.3g}, and the algorithm needs "
                    "losses that are not negative; add a constant to the loss, which changes no gradient"
                )

    def state_dict(self, i: int) -> dict[str, Tensor]:
        """The state dict of the user's module in the i-th view, with parameters (K, …) of personal models."""
        _, _, r, model = self.views[i]
        if model == "personal":
            return self.layout.unflatten(self.memories.values[r])
        x = self.x[r] if model == "global" else averaged(self.runs[r], self.states[r])
        return self.plain.state_dict(x)

    def checkpoint(self) -> Checkpoint:
        """Everything that is needed to resume."""
        tensors = self._tensors() | {"loss": self.loss, "score": self.score, "curves": self.curves.tensor()}
        tensors |= {f"score.{s.name}": f for s, f in zip(self.scores[1:], self.other_scores, strict=True)}
        record = {
            "history": list(self.history),
            "evaluated": list(self.curves.rounds),
            "client_steps": self.client_steps,
            "seconds": self.seconds,
        }
        # Copies, because everything is updated in place.
        return Checkpoint(self.round, {name: t.clone() for name, t in tensors.items()}, record)

    def _tensors(self) -> dict[str, Tensor]:
        names = "x", "loss0", "left_out", "stalled", "lowest"
        tensors = {name: getattr(self, name) for name in names}
        tensors |= {f"memory.{r}": kept for r, kept in self.memories.values.items()}
        for r, state in enumerate(self.states):
            tensors |= {f"state.{r}.{name}": value for name, value in state._asdict().items()}
        return tensors

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resumes from a checkpoint of the same simulation."""
        for name, place in self._tensors().items():
            place.copy_(checkpoint.tensors[name])
        self.score, self.loss = checkpoint.tensors["score"], checkpoint.tensors["loss"]
        self.other_scores = [checkpoint.tensors[f"score.{score.name}"] for score in self.scores[1:]]
        self.curves = Curves(checkpoint.record["evaluated"], checkpoint.tensors["curves"])
        self.round = checkpoint.round
        self.history = list(checkpoint.record["history"])
        self.client_steps, self.seconds = checkpoint.record["client_steps"], checkpoint.record["seconds"]
