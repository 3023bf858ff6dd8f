"""The simulation: rounds of all runs, evaluated and resumable."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairwind.aggregation import advance, advance_seeing, first_state, refuses
from fairwind.contract import CohortAlgorithm, GramAlgorithm, PooledAlgorithm, SumAlgorithm
from fairwind.data.counter import fold
from fairwind.data.federation import Federation
from fairwind.engine.builder import BuiltEngine, build_engine, fine_tuned_engine, pooled_engine
from fairwind.engine.checkpoint import Checkpoint
from fairwind.engine.checks import build, check_runs, check_shapes, check_shared
from fairwind.engine.evaluation import (
    Curves,
    EvaluatedModel,
    Evaluation,
    Models,
    fine_tuned,
    judge_views,
    own_scores,
    recomputed,
    split,
    training_losses,
    views_of,
)
from fairwind.engine.executor import RoundSums, Run, in_order
from fairwind.engine.layout import ALL_SHARED, Division, Sharing
from fairwind.engine.local import local_part, trains_alone
from fairwind.engine.losses.loss import cross_entropy
from fairwind.engine.machine import matmul_precision
from fairwind.engine.plan import ExecutionPlan
from fairwind.engine.ranks import ALONE, Ranks
from fairwind.engine.round_updates import RoundUpdates
from fairwind.engine.settings import Model, Settings
from fairwind.engine.stopping import Stopping
from fairwind.errors import InputError
from fairwind.metrics import history_line, model_metrics
from fairwind.robust.attacks import build_attack
from fairwind.robust.defence import build_defence
from fairwind.robust.rounds import lying_sums
from fairwind.runs.schema import HistoryLine, Part, Stopped

PER_RUN = "x", "loss0", "left_out", "stalled", "lowest"  # a row for each run
OWN_PER_RUN = "trained", "averages"  # the same of clients' own parts, if there are any
OF_SOME = "memory", "error", "own", "state", "mean"  # of the runs that have them, by kind


class Final(NamedTuple):
    """The results after a round, of test samples."""

    round: int
    evaluation: Evaluation
    of_new_clients: Evaluation | None
    fine_tuned: dict[int, Tensor]  # by run, the clients' models (K, ·)


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
        sharing: Sharing = ALL_SHARED,
        ranks: Ranks = ALONE,
        name: str = "",
        plan: ExecutionPlan | None = None,
    ):
        """`loss`, `score`, `augment` and `sharing` as users give them: see `Task`.

        `plan` is decided unless given.
        """
        self.attack = None if settings.attack is None else build_attack(settings.attack)
        self.defence = None if settings.defence is None else build_defence(settings.defence)
        lying = self.attack is not None or self.defence is not None
        self.ranks, self.name = ranks, name
        self.runs = [run._replace(held=lying and not trains_alone(run)) for run in in_order(runs)]
        check_runs(self.runs, settings, in_one_place=True)
        settings.solver.check_rates(settings.rounds)
        if self.attack is not None:
            federation = self.attack.poisoned(federation)
        if not federation.test.any():
            raise InputError("no client has test samples; give clients more samples or a smaller train share")
        models = {run.seed: build(model, run.seed) for run in self.runs}
        own_names = Division.of(next(iter(models.values())), sharing).own.names
        check_shared(models, set(own_names))
        task: dict[str, Any] = {"loss": loss, "score": score, "augment": augment, "ranks": ranks}
        task["sharing"] = sharing
        federated = [run for run in self.runs if not isinstance(run.algorithm, PooledAlgorithm)]
        pooled, resolved = self.runs[len(federated) :], settings
        if pooled and own_names:
            raise InputError(
                f"{pooled[0].label} has no clients, of which each keeps a part of the model: leave it out, "
                "or personal and batch_norm"
            )
        self.engines: list[BuiltEngine] = []
        if federated:
            self.engines.append(build_engine(models, federation, federated, settings, plan=plan, **task))
            resolved, plan = self.engines[0].settings, None
        if pooled:
            self.engines.append(pooled_engine(models, federation, pooled, resolved, plan=plan, **task))
        self.engine = self.engines[0]
        engine, compression = self.engine, self.engine.compression
        self.plan, self.planner, self.executor = engine.plan, engine.planner, engine.executor
        self.plain, self.stacked = engine.plain, engine.stacked
        self.memories, self.own = engine.memories, engine.own
        self.left_out_of_updates = {} if compression is None else compression.errors.values
        own = {name: getattr(settings, name) for name in ("solver", "participation", "clients_per_round")}
        self.settings = replace(self.engine.settings, **own)
        self.federation = self.engine.federation if federated else self.engine.place(federation)
        self.x = torch.cat([engine.x for engine in self.engines])
        self._models, self._task = models, task
        self.layout = self.plain.layout
        self.scores = self.plain.judges
        self.settings.check_target(self.scores[0])
        clients = len(self.federation)
        states = [first_state(run.algorithm, x, clients) for run, x in zip(self.runs, self.x, strict=True)]
        # Written in place: no two may share memory, or a replayed round would use stale values.
        self.states = [type(state)(*(t.to(self.x.device, copy=True) for t in state)) for state in states]
        shape = len(self.runs), clients
        self.loss0 = torch.full(shape, torch.nan, dtype=torch.float64, device=self.x.device)
        self.left_out, self.stalled = torch.zeros(2, shape[0], dtype=torch.int64, device=self.x.device)
        # (P,) by run, the last round's mean contribution, where the defence follows it
        follows = self.defence is not None and self.defence.follows
        self.means = {r: torch.zeros_like(x, dtype=torch.float64) for r, x in enumerate(self.x) if follows}
        self.lowest = torch.full(shape[:1], torch.inf, dtype=torch.float64, device=self.x.device)
        self.watched: Part = "validation" if self.federation.validation.any() else "test"
        self.views = views_of(self.runs)
        self.final_views = [*self.views, *(fine_tuned(self.views) if settings.finetune else ())]
        self.round = 0
        self.client_steps = 0
        self.seconds = 0.0
        self.history: list[HistoryLine] = []
        self.curves = Curves()
        self.stopping = Stopping(self.settings, self.scores[0].sign, self.history, len(self.views))
        found = torch.full((1 + len(self.scores), len(self.views), clients), torch.nan, dtype=torch.float64)
        # (views, K) each, of the watched part: losses, main score, other scores
        self.loss, self.score, *self.other_scores = found
        # Recomputed statistics, and the round that they are of
        self._recomputed: tuple[int, dict[EvaluatedModel, Tensor]] | None = None
        self._final: Final | None = None

    def start(self) -> None:
        """Evaluates the initial models: every client's F_k(x⁰), and its scores."""
        asking = [r for r, run in enumerate(self.runs) if run.algorithm.probe != "none"]
        first: dict[int, int] = {}  # by seed, the run whose model is measured for all of that seed
        for r in asking:
            first.setdefault(self.runs[r].seed, r)
        if first:
            with matmul_precision(self.settings.precision, self.x.device):
                mine = list(first.values())
                x = torch.cat([self.x[mine], self.own.start[mine]], 1)
                losses = training_losses(self.engine.prober, self.federation, x, self.ranks)
            for r in asking:
                self.loss0[r] = losses[list(first).index(self.runs[r].seed)]
            self._check_losses(self.loss0)
        self.evaluate()

    @property
    def done(self) -> bool:
        return self.round >= self.settings.rounds or self.stopping.stopped is not None

    def step(self) -> None:
        """One round of every run, and an evaluation if one is due; calls `start` before the first."""
        if not self.history:
            self.start()
        began = time.perf_counter()
        with (
            self.engine.threads(self.executor.threads),
            matmul_precision(self.settings.precision, self.x.device),
        ):
            self.client_steps += sum(engine.executor.prepare(self.round) for engine in self.engines)
            first = 0
            for engine in self.engines:
                mine = slice(first, first + len(engine.x))
                advance = partial(self._advance, mine)
                engine.executor.round(self.x[mine], self.loss0[mine], self._shared, advance)
                first = mine.stop
        self.round += 1
        if self.round % self.settings.eval_every == 0 or self.done:
            self.evaluate()
        self.seconds += time.perf_counter() - began

    def _shared(self, r: int) -> Tensor:
        """What the server of a run adds to every step."""
        shared = local_part(self.runs[r], "training").shared
        assert shared is not None
        return shared(self.states[r])

    def _stepped(self, r: int, i: int, outcome: RoundSums) -> tuple[Tensor, Any, Tensor]:
        """A run's next model and state, and whether it moved; it is the i-th of the outcome."""
        algorithm, x, state = self.runs[r].algorithm, self.x[r], self.states[r]
        if trains_alone(self.runs[r]):  # and its clients moved
            return x, state, outcome.used[i] > 0
        if isinstance(algorithm, CohortAlgorithm | GramAlgorithm):
            held = outcome.held[i]
            return advance_seeing(algorithm, x, state, held.cohort(), held.gram, held.summed)
        if i in outcome.held:
            return self._stepped_lying(r, algorithm, outcome.held[i])
        more = (outcome.more[i],) if i in outcome.more else ()
        return advance(algorithm, x, state, outcome.total[i], outcome.sums[i], outcome.used[i], *more)

    def _stepped_lying(
        self, r: int, algorithm: SumAlgorithm, held: RoundUpdates
    ) -> tuple[Tensor, Any, Tensor]:
        """The same where clients lie, or are defended against."""
        x, state = self.x[r], self.states[r]
        found = lying_sums(
            algorithm,
            held.cohort(),
            held.vectors(),
            attack=self.attack,
            defence=self.defence,
            key=fold(self.runs[r].seed, self.round),
            clients=len(self.federation),
            last=self.means.get(r, torch.zeros_like(x, dtype=torch.float64)),
        )
        if r in self.means:
            self.means[r].copy_(found.mean)
        self.left_out[r] += found.left_out
        used = torch.tensor(found.used, device=x.device)
        return advance(algorithm, x, state, found.total, found.sums, used)

    @torch.no_grad()
    def _advance(self, mine: slice, outcome: RoundSums) -> None:
        """The steps of the servers of some runs, in place."""
        stepped = []
        for i, r in enumerate(range(mine.start, mine.stop)):
            stepped.append(self._stepped(r, i, outcome))
            check_shapes(self.runs[r].label, self.states[r], stepped[-1][1])
        for r, (x, state, moved) in enumerate(stepped, mine.start):
            self.x[r] = x
            for old, new in zip(self.states[r], state, strict=True):
                old.copy_(new)
            self.stalled[r] += ~moved
        self.own.average()
        self.left_out[mine] += outcome.left_out
        self.lowest[mine] = torch.fmin(self.lowest[mine], outcome.lowest)

    def run(
        self,
        save: Callable[[], None] | None = None,
        *,
        every: float = 30,
        after_round: Callable[[], None] | None = None,
    ) -> None:
        """Trains the remaining rounds, then reads the test samples.

        `save` is called every so many seconds, and after the last round.
        """
        saved = time.monotonic()
        while not self.done:
            self.step()
            if after_round is not None:
                after_round()
            if save is not None and (self.done or time.monotonic() - saved >= every):
                save()
                saved = time.monotonic()
        self.final()  # here, because it is work that ranks share

    def stop(self, request: Stopped) -> None:
        """Ends training after this round, which is evaluated, unless no round is left anyway."""
        if not self.done:
            self.stopping.request = request
            if self.curves.rounds[-1:] != [self.round]:
                self.evaluate()

    def evaluate(self) -> None:
        """Every client's loss and scores now, of the watched part, added to the history."""
        self._check_losses(self.lowest[:, None])
        self._final = None
        now = self._judged(self.watched)
        self.loss, self.score, self.other_scores = now.loss, now.score, now.other_scores
        self.curves.add(self.round, self.score)
        self.history += now.lines
        self.stopping.add(now.lines)

    def final(self) -> Evaluation:
        """The results, of test samples: the newest evaluation, unless that was of validation samples.

        Fine-tuned models follow the others; they are evaluated only now.
        """
        return self._finish().evaluation

    def final_of_new_clients(self) -> Evaluation | None:
        """The same of clients that took no part in training, for the models that need not know a client."""
        return self._finish().of_new_clients

    def _finish(self) -> Final:
        """Evaluates what is evaluated after the last round, unless it was."""
        if self._final is None or self._final.round != self.round:
            if self.watched == "test":
                newest = self.history[-len(self.views) :]
                now = Evaluation(self.views, newest, self.loss, self.score, self.other_scores)
            else:
                now = self._judged("test")
            now, models = self._with_fine_tuned(now, self.federation)
            new = self.federation.new_clients
            self._final = Final(self.round, now, None if new is None else self._on_new_clients(new), models)
        return self._final

    def _on_new_clients(self, new: Federation) -> Evaluation | None:
        """How these models do on these clients; none, if all models are single clients'."""
        shared = [view for view in self.views if view.model != "personal"]
        new = self.engine.place(new)
        return self._with_fine_tuned(self._judged("test", shared, new), new)[0] if shared else None

    def _with_fine_tuned(
        self, now: Evaluation, federation: Federation
    ) -> tuple[Evaluation, dict[int, Tensor]]:
        """An evaluation, with what clients make of the models by fine-tuning; and these, by run (K, ·)."""
        views = self.final_views[len(self.views) :]
        if not views:
            return now, {}
        runs, x = [self.runs[view.run] for view in views], self.x[[view.run for view in views]]
        begin, every = self._now()._replace(new=federation is not self.federation), range(len(federation))
        first = [begin.whole(view._replace(model="global"), torch.tensor(every)) for view in views]
        with matmul_precision(self.settings.precision, x.device):
            given = self._models, federation, runs, first, x, self.round, self.settings
            engine = fine_tuned_engine(*given, **self._task)
            trained, models = engine.federation, engine.memories.values
            sizes, pick = split(trained, "test")
            scorer = engine.stacked or engine.plain
            judged = [
                own_scores(
                    scorer, trained, partial(engine.memories.take, i), sizes, pick, x.device, self.ranks
                )
                for i in range(len(views))
            ]
        tuned = self._evaluation(views, tuple(torch.stack(judged, 1).cpu()), federation, "test")
        both = Evaluation(
            now.views + tuned.views,
            now.lines + tuned.lines,
            torch.cat([now.loss, tuned.loss]),
            torch.cat([now.score, tuned.score]),
            [torch.cat(pair) for pair in zip(now.other_scores, tuned.other_scores, strict=True)],
        )
        return both, {view.run: models[i] for i, view in enumerate(views)}

    @torch.no_grad()
    def _judged(
        self, part: Part, views: list[EvaluatedModel] | None = None, federation: Federation | None = None
    ) -> Evaluation:
        """How the models do now on a part of the samples; some models, or other clients, if given."""
        models = self._now()._replace(new=federation is not None)
        views, federation = views or self.views, federation or self.federation
        sizes, pick = split(federation, part)
        with matmul_precision(self.settings.precision, self.x.device):
            scorers = self.engine.scorer, self.stacked or self.plain
            judged = judge_views(views, models, scorers, federation, sizes, pick, self.ranks)
        return self._evaluation(views, judged, federation, part)

    def _evaluation(
        self, views: list[EvaluatedModel], judged: tuple[Tensor, ...], federation: Federation, part: Part
    ) -> Evaluation:
        """From each view's losses and scores of the clients (views, K)."""
        loss, score, *other_scores = judged
        _, sizes = federation.part(part)
        lines = []
        for i, view in enumerate(views):
            # Scalars of the server's state; before the first round they have no meaning.
            state = self.states[view.run]._asdict() if self.round else {}
            scalars = {k: float(v) for k, v in state.items() if v.ndim == 0}
            metrics = {
                each.name: model_metrics(values[i], loss[i], sizes, each.kind, federation.groups)
                for each, values in zip(self.scores, judged[1:], strict=True)
            }
            line = history_line(view.label, view.seed, self.round, metrics, scalars)
            lines.append(line if part == "test" else {**line, "part": part})
        return Evaluation(views, lines, loss, score, other_scores)

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

    def _now(self) -> Models:
        """The models now."""
        models = Models(self.runs, self.x, self.states, self.memories, self.own, {})
        if not self.own.recomputed:
            return models
        if self._recomputed is None or self._recomputed[0] != self.round:
            found = recomputed(self.plain, models, self.views, self.federation)
            self._recomputed = self.round, found
        return models._replace(recomputed=self._recomputed[1])

    def own_names(self, i: int) -> tuple[str, ...]:
        """The tensors of the i-th view's model that each client has for itself."""
        division = self.plain.division
        return division.whole.names if self.final_views[i].model == "personal" else division.kept_names

    def state_dict(self, i: int) -> dict[str, Tensor]:
        """The state dict of the user's module in the i-th view; what each client has for itself is (K, …).

        Views are those at the end.
        """
        view, models, whole = self.final_views[i], self._now(), self.plain.whole
        tuned = self._finish().fine_tuned[view.run] if view.baseline == "finetuned" else None
        every = models.whole(view, torch.arange(len(self.federation))) if tuned is None else tuned
        found = self.plain.state_dict(every[0])
        own = set(self.own_names(i))
        if not own:
            return found
        further = {name for names in whole.all_names if names[0] in own for name in names}
        shared = {name: value for name, value in found.items() if name not in further}
        parts = whole.unflatten(every)
        return shared | {name: value.to(found[name].dtype) for name, value in parts.items() if name in own}

    def checkpoint(self) -> Checkpoint:
        """Everything that is needed to resume."""
        tensors = self._tensors() | {"loss": self.loss, "score": self.score, "curves": self.curves.tensor()}
        tensors |= {f"score.{s.name}": f for s, f in zip(self.scores[1:], self.other_scores, strict=True)}
        record: dict[str, Any] = {
            "history": list(self.history),
            "evaluated": list(self.curves.rounds),
            "client_steps": self.client_steps,
            "seconds": self.seconds,
        }
        if self.stopping.request is not None:
            record["stopped"] = self.stopping.request
        # Copies, because everything is updated in place.
        return Checkpoint(self.round, {name: t.clone() for name, t in tensors.items()}, record)

    def checkpoint_of(self, runs: Sequence[int]) -> Checkpoint:
        """The same of some of the runs, for a simulation of these alone."""
        whole, views = self.checkpoint(), self._views_of(runs)
        tensors: dict[str, Tensor] = {}
        for name, value in whole.tensors.items():
            kind, _, rest = name.partition(".")
            if kind in OF_SOME:
                run, _, rest = rest.partition(".")
                if int(run) in runs:
                    tensors[".".join(filter(None, (kind, str(runs.index(int(run))), rest)))] = value
            elif kind == "curves":
                tensors[name] = value[:, views] if value.numel() else value
            else:
                tensors[name] = value[views if kind in ("loss", "score") else list(runs)]
        lines = whole.record["history"]
        history = [
            lines[first + i] for first in range(0, len(lines), len(self.views)) for i in views
        ]  # of each evaluation
        return Checkpoint(whole.round, tensors, {**whole.record, "history": history})

    def checkpoint_from(self, parts: Sequence[tuple[Checkpoint, Sequence[int]]]) -> Checkpoint:
        """The reverse: a checkpoint of all runs, from others of the same round, each of some of them."""
        tensors: dict[str, Tensor] = {}
        kept = set.intersection(*({line["round"] for line in part.record["history"]} for part, _ in parts))
        drawn = [
            n for n in parts[0][0].record["evaluated"] if all(n in p.record["evaluated"] for p, _ in parts)
        ]
        lines: dict[tuple[int, int], HistoryLine] = {}  # by round and view
        for part, runs in parts:
            views = self._views_of(runs)
            own = [line for line in part.record["history"] if line["round"] in kept]
            lines |= {(line["round"], views[i % len(views)]): line for i, line in enumerate(own)}
            for name, value in part.tensors.items():
                kind, _, rest = name.partition(".")
                if kind in OF_SOME:
                    run, _, rest = rest.partition(".")
                    tensors[".".join(filter(None, (kind, str(runs[int(run)]), rest)))] = value.cpu()
                elif kind == "curves":
                    value = value[[part.record["evaluated"].index(n) for n in drawn]]
                    _fill(tensors, name, value.transpose(0, 1), views, len(self.views))
                elif kind in ("loss", "score"):
                    _fill(tensors, name, value, views, len(self.views))
                elif name in (*PER_RUN, *OWN_PER_RUN):
                    _fill(tensors, name, value, runs, len(self.runs))
        tensors["curves"] = tensors["curves"].transpose(0, 1)
        record = {name: sum(part.record[name] for part, _ in parts) for name in ("client_steps", "seconds")}
        record |= {"history": [lines[key] for key in sorted(lines)], "evaluated": drawn}
        return Checkpoint(parts[0][0].round, tensors, record)

    def _views_of(self, runs: Sequence[int]) -> list[int]:
        return [i for r in runs for i, view in enumerate(self.views) if view.run == r]

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {name: getattr(self, name) for name in PER_RUN}
        tensors |= {f"memory.{r}": kept for r, kept in self.memories.values.items()}
        tensors |= self.own.tensors()
        tensors |= {f"error.{r}": left_out for r, left_out in self.left_out_of_updates.items()}
        tensors |= {f"mean.{r}": mean for r, mean in self.means.items()}
        for r, state in enumerate(self.states):
            tensors |= {f"state.{r}.{name}": value for name, value in state._asdict().items()}
        return tensors

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resumes from a checkpoint of the same simulation, or of one with fewer rounds.

        An evaluation that was made only because training ended there is dropped if it goes on.
        """
        for name, place in self._tensors().items():
            if place.shape != checkpoint.tensors[name].shape:  # it would be broadcast
                raise ValueError(f"the checkpoint's {name} is of another shape")
            place.copy_(checkpoint.tensors[name])
        self.score, self.loss = checkpoint.tensors["score"], checkpoint.tensors["loss"]
        self.other_scores = [checkpoint.tensors[f"score.{score.name}"] for score in self.scores[1:]]
        self.curves = Curves(checkpoint.record["evaluated"], checkpoint.tensors["curves"])
        self.round = checkpoint.round
        self.history = list(checkpoint.record["history"])
        if self.round < self.settings.rounds and self.round % self.settings.eval_every:
            self.history = [line for line in self.history if line["round"] < self.round]
            self.curves.drop(self.round)
        self.stopping = Stopping(self.settings, self.scores[0].sign, self.history, len(self.views))
        self._final = self._recomputed = None
        self.client_steps, self.seconds = checkpoint.record["client_steps"], checkpoint.record["seconds"]


def _fill(tensors: dict[str, Tensor], name: str, rows: Tensor, places: Sequence[int], count: int) -> None:
    """Puts rows into their places in a tensor of so many."""
    whole = tensors.setdefault(name, torch.empty(count, *rows.shape[1:], dtype=rows.dtype))
    whole[list(places)] = rows.cpu()
