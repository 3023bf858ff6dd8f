"""The server of a real federation: a running sum of replies, checked and capped, and the algorithm's step."""

import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairwind.aggregation import (
    advance,
    contribute,
    counts_clients,
    first_state,
    makes_finite,
    refuses,
    usable_clients,
)
from fairwind.contract import (
    AnyAlgorithm,
    CohortAlgorithm,
    GradientAlgorithm,
    GramAlgorithm,
    LocalAlgorithm,
    MemoryAlgorithm,
    PersonalAlgorithm,
    Report,
)
from fairwind.engine.checkpoint import Checkpoint
from fairwind.engine.layout import Division, Layout
from fairwind.engine.memory import COUNTER, counters, mean_statistics
from fairwind.errors import InputError, whole
from fairwind.exchange.accounting import ALL, Accountant
from fairwind.exchange.bounds import UNBOUNDED, Bounds, Seen, within
from fairwind.exchange.capping import Capped, CappedSum, DefendedSum, Term
from fairwind.exchange.holding import HeldReplies, HeldReply
from fairwind.exchange.message import (
    AVERAGED,
    FIRST,
    FIRST_MODEL,
    GRADIENT,
    LOST,
    NAMED,
    SHARED,
    WEIGHTS,
    Arrays,
    Bytes,
    Phase,
    RefusedError,
    Reply,
    Request,
    Sends,
    Tag,
    array_bytes,
    arrays_of,
    check_one_sum,
    check_statistics,
    codec_for,
    corrects,
    gradient_form,
    keeps,
    report_form,
    second_vector,
    sums_form,
    sums_record,
    to_report,
    vector_of,
)
from fairwind.exchange.privacy import Privacy, PrivateSum
from fairwind.exchange.releases import Release, Releases
from fairwind.robust.defence import defended
from fairwind.runs.rehearsal import fingerprint

MANY = 10  # clients that are capped in a round: then they are counted in its log, not named


@dataclass
class Round:
    """The outcome of a round."""

    number: int  # from 0
    used: int = 0  # clients that counted
    refused: dict[str, str] = field(default_factory=dict)  # by client: why its reply does not count
    bounded: dict[str, list[str]] = field(default_factory=dict)  # by client: numbers that were clamped
    lost: dict[str, int] = field(default_factory=dict)  # by client: the round whose vector it has lost
    capped: dict[str, dict[str, float]] = field(default_factory=dict)  # by what, and client: the cap's factor
    moved: bool = False  # whether the model did
    stalled: bool = False  # whether too few replied, so that the next round has the same number
    blame: str = ""  # why the model did not move

    def counts(self) -> dict[str, int]:
        """How many clients counted, and how."""
        capped = {client for each in self.capped.values() for client in each}
        return {
            "used": self.used,
            "refused": len(self.refused),
            "bounded": len(self.bounded),
            "capped": len(capped),
            "moved": int(self.moved),
        }

    def lines(self, kind: str = "") -> list[str]:
        """Log messages, one for each client and reason; `kind` is what clients are called, such as "node"."""
        found = [f"{client} is left out: {why}" for client, why in self.refused.items()]
        found += [f"{client} is not believed: {', '.join(what)}" for client, what in self.bounded.items()]
        for client, number in self.lost.items():
            found.append(f"{client} has lost what it kept of round {number + 1}, and begins again without")
        for what, factors in self.capped.items():
            if len(factors) <= MANY:
                found += [f"{who} is capped: its {what} counts {f:.2g} times" for who, f in factors.items()]
        found = [f"{kind} {line}" if kind else line for line in found]
        for what, factors in self.capped.items():
            if len(factors) > MANY:
                low, high = min(factors.values()), max(factors.values())
                those = f"{len(factors)} {kind or 'client'}s are capped"
                found.append(f"{those}: their {what} counts {low:.2g} to {high:.2g} times")
        return found if self.moved else [*found, f"the model stays as it was: {self.blame}"]


class StalledError(RuntimeError):
    """A training stopped because too few clients replied, round after round."""


class Aggregator:
    """The server's side of any algorithm: x, its state, and what it knows of its clients."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        layout: Layout,
        x: Tensor,
        *,
        clients: int | None = None,
        bounds: Bounds | None = None,
        sends: Sends = "report",
        privacy: Privacy | None = None,
        min_replies: int = 1,
        max_stalled: int = 3,
        defence: str | None = None,
        division: Division | None = None,
        statistics: Tensor | None = None,
        codec: str | None = None,
    ):
        """From the model x (P,). `sends` is what clients are asked for; see the package.

        The `division` says what of the model is in x; `statistics` are those that are averaged, at first.

        `clients` is how many there are, whether or not they are there: some algorithms count on it. With
        `privacy`, bounds must be left out: they depend on other clients, and its own take their place. So
        must a `defence`, a robust sum such as "median" in the place of the sum over clients. By a `codec`,
        clients send their updates in fewer bytes.

        A round with fewer than `min_replies` usable replies does not count; after `max_stalled` of them in a
        row, `stopped` says so.
        """
        self.algorithm, self.layout, self.sends = algorithm, layout, sends
        if privacy is not None and bounds not in (None, UNBOUNDED):
            raise InputError("bounds compare a client with others, which privacy forbids: leave them out")
        if privacy is not None:
            check_one_sum(algorithm, "privacy is for one sum")
        if privacy is not None and defence is not None:
            raise InputError("a defence compares a client with others, which privacy forbids: leave it out")
        self.defence_spec = defence
        self.defence = None if defence is None else defended(algorithm, defence)
        if counts_clients(algorithm) and clients is None:
            raise InputError(f"{algorithm.name or 'it'} counts on all clients: say how many, as clients=")
        if clients is not None:
            whole(1, clients=clients)
        whole(1, min_replies=min_replies, max_stalled=max_stalled)
        self.min_replies, self.max_stalled, self.stalled_in_a_row = min_replies, max_stalled, 0
        self.clients = clients if counts_clients(algorithm) else None
        self.privacy, self.bounds = privacy, bounds or (UNBOUNDED if privacy else Bounds())
        self.accountant = None if privacy is None else Accountant(privacy)
        self.releases = Releases()
        self.statistics_layout = layout.part(slice(0, 0))
        if division is not None:
            check_statistics(division, sends, codec, private=privacy is not None)
            self.statistics_layout = division.averaged_part
        self.statistics = torch.empty(0) if statistics is None else statistics.detach().cpu().clone()
        self.counters = counters(self.statistics_layout)
        self.keeps = keeps(algorithm) or (division is not None and bool(division.kept))
        if codec is not None and privacy is not None:  # what was left out tells who took part before
            raise InputError("privacy is for clients that keep nothing between rounds: leave out codec")
        self.codec = None if codec is None else codec_for(codec, algorithm, sends)
        self.form = report_form(layout, algorithm.probe, keeps=self.keeps, codec=self.codec)
        self.sums: Any = None  # their type, where clients contribute to any
        if not isinstance(algorithm, CohortAlgorithm | GramAlgorithm):
            self.sums = sums_record(algorithm)
        if sends == "sums":
            self.form = sums_form(layout, check_one_sum(algorithm, "replies of sums have no more"))
        self.begin_from(x.detach().cpu().clone())
        self.training = secrets.token_hex(8)  # by which clients tell its rounds from those of others
        self.round = 0  # rounds that are over
        self.seen = Seen()
        self.first_losses: dict[str, float] = {}  # by client
        self.first_sum = 0.0, 0.0  # their sum and number in the last round of a secure sum
        self.kept: dict[str, int] = {}  # by client that keeps a vector: its last round that counted
        self.numbers: dict[str, int] = {}  # of clients, among all, as they came
        self.left_out, self.stalled = 0, 0
        self.scales: tuple[float, ...] | None = None  # of secure sums: what 1 stands for, once that is known
        self.bytes = Bytes()
        self.last: Round | None = None  # the round that ended last,
        self.told: dict[str, int] = {}  # and its numbers, which a checkpoint holds, too
        self.begin()

    def begin_from(self, x: Tensor) -> None:
        """Takes another first model (P,), before the first round."""
        self.x, self.start = x, fingerprint([x, self.statistics])
        self.first_model = x.clone() if isinstance(self.algorithm, PersonalAlgorithm) else None
        self.last_mean = torch.zeros(len(x), dtype=torch.float64)  # of the round before, for defences
        state = first_state(self.algorithm, x, self.clients or 0)
        self.state: Any = type(state)(*(value.clone() for value in state))

    def begin(self, drawn: tuple[int, int] | None = None) -> None:
        """Forgets what has arrived of the round that is under way.

        `drawn` is how many clients take part, and of how many. Only privacy asks for it; leave it out where
        they were not drawn evenly, or anybody may know who was. Where clients `remember`, it does not count.
        """
        self.current, self.drawn = Round(self.round), None if self.remembers else drawn
        sums = 1 if self.sums is None else len(self.sums._fields)
        self.sum = (
            PrivateSum(len(self.x), sums, self.privacy) if self.privacy else self._sum(sums, self.last_mean)
        )
        batches, others = int(self.counters.sum()), int((~self.counters).sum())
        self.statistics_sum = self._sum(1 + batches, torch.zeros(others, dtype=torch.float64))
        self.phase: Phase = "gradient" if corrects(self.algorithm) else "train"
        self.second = CappedSum(len(self.x), 1, self.bounds.limits)
        self.gradient: Capped | None = None  # the clients' gradients, where they correct steps
        self.measured: set[str] = set()  # clients that count in it
        self.held: HeldReplies | None = None
        if isinstance(self.algorithm, CohortAlgorithm | GramAlgorithm):
            self.held = HeldReplies(self.algorithm, self.bounds.limits)
        self.secret: Capped | None = None
        self.counted: set[str] = set()
        self.reported: dict[str, Report] = {}
        self.new_first_losses: dict[str, float] = {}
        self.new_first = 0.0, 0.0

    def _sum(self, sums: int, last: Tensor) -> CappedSum | DefendedSum:
        """A sum in which every client is limited; `last` (·,) is as in `DefendedSum`."""
        if self.defence:
            return DefendedSum(len(last), sums, self.bounds.limits, self.defence, last)
        return CappedSum(len(last), sums, self.bounds.limits)

    @property
    def remembers(self) -> bool:
        """Whether clients have anything from earlier rounds, which tells that they took part in these.

        Then no round's sampling is a secret of its own, and privacy assumes none.
        """
        return self.keeps or self.algorithm.probe != "none"  # the first loss, too

    def requests(
        self, clients: Iterable[str], phase: Phase | None = None, *, judging: bool = False
    ) -> dict[str, Request]:
        """What clients are asked in this phase of the round, or in another; their vectors are the same.

        With `judging`, also what they evaluate on the way, before they train.
        """
        phase = phase or self.phase
        vectors = {WEIGHTS: self.weights()}
        if phase == "train" and (shared := self.shared()) is not None:
            vectors[SHARED] = shared
        if phase == "train" and self.gradient is not None:
            vectors[GRADIENT] = arrays_of(self.layout, _mean(self.gradient))
        if (phase == "evaluate" or judging) and _averages(self.algorithm):
            vectors[AVERAGED] = arrays_of(self.layout, self.model(averaged=True))
        first = {} if self.first_model is None else {FIRST_MODEL: arrays_of(self.layout, self.first_model)}
        return {
            client: Request(
                phase,
                self.round,
                self.training,
                vectors if client in self.kept else vectors | first,
                self.first_loss(client) if self.round and phase == "train" else None,
                self.kept.get(client),
            )
            for client in clients
        }

    def weights(self) -> Arrays:
        """The model, as clients are sent it: also statistics that are averaged."""
        return arrays_of(self.layout, self.x) | arrays_of(self.statistics_layout, self.statistics)

    def model(self, *, averaged: bool = False) -> Tensor:
        """The model (P,), or the averaged one of an algorithm that has it."""
        if not averaged:
            return self.x
        assert isinstance(self.algorithm, CohortAlgorithm)
        assert self.algorithm.averaged_model is not None
        return self.algorithm.averaged_model(self.state).to(self.x.dtype)

    @torch.no_grad()
    def load(self, module: nn.Module, *, averaged: bool = False) -> None:
        """Puts the model into a module; what clients keep stays there as it is."""
        self.layout.load(self.model(averaged=averaged), module)
        self.statistics_layout.load(self.statistics, module)

    def shared(self) -> Arrays | None:
        """What clients add to every step, for algorithms that have it."""
        if not isinstance(self.algorithm, LocalAlgorithm | MemoryAlgorithm | GradientAlgorithm):
            return None
        if self.algorithm.local.shared is None:
            return None
        return arrays_of(self.layout, self.algorithm.local.shared(self.state))

    def first_loss(self, client: str) -> float | None:
        """What a client without memory is told: its own first loss, or the mean of those known, if any is.

        With privacy it is told of no other client, and measures its loss at the model it has received.
        """
        if client in self.first_losses:
            return self.first_losses[client]
        if self.privacy:
            return None
        known = within(list(self.first_losses.values()), self.bounds.loss0)
        summed, count = (sum(known), len(known)) if known else self.first_sum
        return summed / count if count else None

    def tag(self, phase: Phase | None = None) -> Tag:
        """What replies to this phase of the round carry, or to another."""
        return Tag(self.training, self.round, phase or self.phase)

    def sent(self, requests: Iterable[Request]) -> None:
        """Counts what clients are sent."""
        for request in requests:
            size = array_bytes(*request.vectors.values())
            self.bytes = self.bytes.plus(**{"evaluation" if request.phase == "evaluate" else "down": size})

    def accept(self, client: str, reply: Reply) -> str:
        """Adds a client's reply to this phase of the round; returns why it is refused, or nothing."""
        self.bytes = self.bytes.plus(up=reply.bytes)
        try:
            if reply.tag is not None:
                reply.tag.check(self.tag())
            if client in self.current.refused or client in self.counted:
                raise RefusedError("it has replied to this round before")
            self._check_number(client)
            if self.phase == "gradient":
                self._add_gradient(client, reply)
            else:
                self._add(client, reply)
            self.counted.add(client)
        except RefusedError as error:
            return self.refuse(client, str(error))
        return ""

    def refuse(self, client: str, why: str) -> str:
        """Records that a client's reply is refused; returns the reason, as it is shown."""
        why = str(RefusedError(why))
        self.current.refused.setdefault(client, why)
        return why

    def turn(self) -> set[str]:
        """Ends a phase of the round that another follows; returns which clients are asked in that one."""
        self.phase, self.gradient, self.measured = "train", self.second.finish(), self.counted
        self._note_caps(self.gradient, "gradient's weight", "gradient")
        self.counted, self.second = set(), CappedSum(len(self.x), 1, self.bounds.limits)
        return set(self.measured)

    def _check_number(self, client: str) -> None:
        """Refuses a client beyond those that the algorithm counts on."""
        known = {*self.numbers, *self.counted}
        if self.clients is not None and client not in known and len(known) >= self.clients:
            raise RefusedError(f"it is one more than the {self.clients} clients that there are")

    def _add_gradient(self, client: str, reply: Reply) -> None:
        """Adds what clients measure before they train."""
        form = gradient_form(self.layout)
        vector, length = form.vector(reply.arrays)
        report = to_report(form.checked(reply.numbers), math.nan)
        size = self.seen.bounded(client, report, self.bounds)[0].size  # noted when it reports
        self.second.add(_second_term(client, float(size), vector, length))

    def _add(self, client: str, reply: Reply) -> None:
        if self.gradient is not None and client not in self.measured:
            raise RefusedError("it sent no gradient before")
        statistics, batches = self._read_statistics(reply.arrays)
        others = {n: a for n, a in reply.arrays.items() if n not in self.statistics_layout.names}
        vector, length = self.form.update(others)
        numbers = self.form.checked(reply.numbers)
        second = self._read_second(reply.second)
        if self.sends == "sums":
            term = Term(client, 1.0, vector, tuple(numbers[name] for name in self.sums._fields), length)
            first = self._read_first(client, numbers)
            self.sum.add(self._checked(term))
            self.new_first_losses |= first
        else:
            said = to_report(numbers, length)
            if "loss0" in numbers and client in self.first_losses:  # it is held to what it said first
                said = said._replace(loss0=said.loss0.new_tensor(self.first_losses[client]))
            believed, notes = self.seen.bounded(client, said, self.bounds)
            added = None  # all terms are made before any is added, because each may be refused
            if second is not None:
                memory = isinstance(self.algorithm, MemoryAlgorithm)
                added = _second_term(client, 1.0 if memory else float(believed.size), *second)
            beside = _second_term(client, float(believed.size), statistics, float(statistics.norm()), batches)
            self._weigh(client, believed, vector, length)
            if added is not None:
                self.second.add(added)
            if len(self.statistics):
                self.statistics_sum.add(beside)
            if notes:
                self.current.bounded[client] = notes
            self.reported[client] = said
            if "loss0" in numbers:
                self.new_first_losses[client] = float(believed.loss0)
        if LOST in numbers and client in self.kept:
            self.current.lost[client] = self.kept[client]
        self.current.used += 1

    def _read_first(self, client: str, numbers: Mapping[str, float]) -> dict[str, float]:
        """The first loss beside a client's sums, where the algorithm has any."""
        if FIRST[0] not in numbers:
            return {}
        loss, count = (numbers[name] for name in FIRST)
        if count != 1:
            raise RefusedError(f"it tells of {count:.3g} first losses, and has one")
        if refuses(self.algorithm, loss0=loss):
            raise RefusedError(f"its first loss is {loss:.3g}, with which the algorithm can do nothing")
        return {client: loss}

    def _read_statistics(self, arrays: Arrays) -> tuple[Tensor, list[float]]:
        """By how much the averaged statistics in a reply differ from those sent; and numbers of batches."""
        if not len(self.statistics):
            return self.statistics, []
        found = vector_of(self.statistics_layout, arrays).double()
        for name, part in self.statistics_layout.unflatten(found).items():
            if name.endswith("running_var") and (part < 0).any():
                raise RefusedError(f"{name!r} is negative")
        change, said = found - self.statistics, found[self.counters]
        if bool(((change[self.counters] < 0) | (said != said.round()) | (said >= 2**53)).any()):
            raise RefusedError("its numbers of batches are not whole, or smaller than those that it was sent")
        return change[~self.counters], change[self.counters].tolist()

    def _weigh(self, client: str, report: Report, update: Tensor, length: float) -> None:
        """Adds a client's contribution, computed from its report within the bounds; or holds its update."""
        refused = RefusedError("what the algorithm makes of its numbers is not finite")
        if isinstance(self.algorithm, CohortAlgorithm | GramAlgorithm):
            assert self.held is not None
            alone = Report(*(number[None] for number in report))
            if not usable_clients(self.algorithm, alone)[0] or not makes_finite(self.algorithm, alone):
                raise refused
            self.held.replies[client] = HeldReply(report, update, length)
            return
        part, usable = contribute(self.algorithm, report)
        if not usable:
            raise refused
        sums = tuple(map(float, part.sums))
        self.sum.add(self._checked(Term(client, float(part.coef), update, sums, length)))

    def _checked(self, term: Term) -> Term:
        """A contribution that can be added up."""
        if term.sums[0] < 0:
            raise RefusedError(f"its weight is {term.sums[0]:.3g}, which is negative")
        for name, value in zip(self.sums._fields[1:], term.sums[1:], strict=True):
            if self.privacy and value < 0:
                raise RefusedError(f"its {name} is {value:.3g}: with privacy, sums must not be negative")
        if not math.isfinite(term.pull):
            raise RefusedError(f"its update, of norm {term.length:.3g}, is too large to be weighed")
        return term

    def _read_second(self, arrays: Arrays | None) -> tuple[Tensor, float] | None:
        """The second vector of a reply and its norm, where one is asked for."""
        what = second_vector(self.algorithm)
        if (arrays is None) != (not what):
            raise RefusedError(f"it sent no {what}" if what else "it sent a second vector, and was not asked")
        if arrays is None:
            return None
        try:
            return self.form.vector(arrays)
        except RefusedError as error:
            raise RefusedError(f"in its {what}, {error}") from None

    def take_sum(self, total: Tensor, numbers: Mapping[str, float], clients: int) -> None:
        """Adds the secure sum of this many clients."""
        if self.privacy:
            raise InputError("with privacy the server clips each client, so it cannot take a secret sum")
        if self.defence:
            raise InputError("a defence sees each client's update, so it cannot take a secret sum")
        found = self.form.checked(numbers)
        sums = tuple(found[name] for name in self.sums._fields)
        self.secret = Capped(total, sums, clients, [{} for _ in (*sums, total)], "nobody who is known")
        self.current.used = clients
        summed, count = (found.get(name, 0.0) for name in FIRST)
        if count > clients / 2 and not refuses(self.algorithm, loss0=summed / count):
            self.new_first = summed, count

    def finish(self) -> Round:
        """The algorithm's step with what has arrived, and the next round; or the same, if too few replied."""
        if self.current.used < self.min_replies:
            return self._stall()
        if self.accountant:  # counted before it is drawn
            self.releases.note(Release("noisy sum", self.round, self.drawn))
            self.accountant.release(self.drawn)
        done, capped = self.current, self.secret or self.sum.finish()
        if isinstance(self.sum, DefendedSum):
            self.last_mean = self.sum.mean
        if self.sums is not None:
            self._note_caps(capped, "weight", "update", *self.sums._fields[1:])
        done.blame = "the clients' weight is lost in the noise"
        moved: bool | None = None  # none where there is nothing to step with
        if self.held is not None and self.held.replies:
            moved, capped = self._advance_seeing(self.held)
        elif capped.clients:
            moved = self._advance(capped)
        if moved is not None:
            who = f"; {capped.largest} has the largest share in it" if capped.largest else ""
            done.moved, done.blame = moved, "" if moved else f"the step is not finite{who}"
        if len(self.statistics) and (found := self.statistics_sum.finish()).clients:
            names = (name for name in self.statistics_layout.names if name.endswith(COUNTER))
            self._note_caps(found, "statistics' weight", "statistics", *names)
            self._move_statistics(found)
        for client, report in self.reported.items():
            self.seen.note(client, report)
        self.first_losses = self.new_first_losses | self.first_losses
        self.first_sum = self.new_first if self.new_first[1] else self.first_sum
        self._number_clients()
        self.left_out += len(done.refused)
        self.stalled += not done.moved
        if self.keeps or self.codec:  # with the round's number: another try begins from the same
            self.kept |= dict.fromkeys(self.counted, self.round)
        self.round += 1
        self._end(done)
        self.stalled_in_a_row = 0
        self.begin()
        return done

    def _move_statistics(self, found: Capped) -> None:
        """Adds the mean of what clients' statistics differ by from the server's, unless it is not finite."""
        sums = torch.tensor(found.sums, dtype=torch.float64)
        weight, total = sums[0], sums[0] * self.statistics.double()
        total[~self.counters] += found.total
        total[self.counters] += sums[1:]
        mean = total / weight
        mean = mean_statistics(mean, torch.ones_like(weight), self.counters).to(self.statistics.dtype)
        for name, part in self.statistics_layout.unflatten(mean).items():
            if name.endswith("running_var"):
                part.clamp_(min=0)  # where rounding made it smaller
        if torch.isfinite(mean).all():
            self.statistics = mean

    def _stall(self) -> Round:
        """Ends a round in which too few replied, as if it had not been."""
        done = self.current
        done.stalled = True
        done.blame = f"usable replies: {done.used}, and at least {self.min_replies} must be"
        self.left_out += len(done.refused)
        self.stalled += 1
        self._end(done)
        self.stalled_in_a_row += 1
        self.begin()
        return done

    def _end(self, done: Round) -> None:
        """Notes a round that is over, and its numbers."""
        known = self.bytes.up > 0  # not of secret sums
        sent = {"bytes_up": self.bytes.up, "bytes_down": self.bytes.down} if known else {}
        self.last, self.told = done, done.counts() | sent

    @property
    def stopped(self) -> str:
        """Why training stops, if too many rounds in a row had too few replies; else nothing."""
        if self.last is None or self.stalled_in_a_row < self.max_stalled:
            return ""
        why = [f"{client}: {reason}" for client, reason in self.last.refused.items()]
        named = f" ({'; '.join([*why[:NAMED], *['…'][: len(why) > NAMED]])})" if why else ""
        return (
            f"training stops in round {self.round + 1}, which was tried {self.stalled_in_a_row} times: "
            f"{self.last.blame}{named}"
        )

    def _note_caps(self, capped: Capped, *what: str) -> None:
        """Notes whose contributions a cap has cut."""
        names = zip(what, capped.factors, strict=True)
        self.current.capped |= {name: factors for name, factors in names if factors}

    def _number_clients(self) -> None:
        """Gives those that reported for the first time the next numbers."""
        new = sorted(self.counted - set(self.numbers)) if self.clients is not None else []
        self.numbers |= {client: len(self.numbers) + k for k, client in enumerate(new)}

    @torch.no_grad()
    def _advance(self, capped: Capped) -> bool:
        assert not isinstance(self.algorithm, CohortAlgorithm | GramAlgorithm)
        sums = self.sums(*(torch.tensor(s, dtype=torch.float64) for s in capped.sums))
        clients = torch.tensor(capped.clients)
        second = self.gradient
        if what := second_vector(self.algorithm):
            second = self.second.finish()
            self._note_caps(second, f"{what}'s weight", what)
        more = [] if second is None else [second.total]
        if second is not None and isinstance(self.algorithm, GradientAlgorithm):
            more = [_mean(second)]
        found = advance(self.algorithm, self.x, self.state, capped.total, sums, clients, *more)
        self.x, self.state, moved = found
        return bool(moved)

    @torch.no_grad()
    def _advance_seeing(self, held: HeldReplies) -> tuple[bool, Capped]:
        self._number_clients()
        (self.x, self.state, moved), capped = held.advance(self.x, self.state, self.numbers)
        self._note_caps(capped, "weight", "update")
        self.current.capped |= {"norm": held.clipped} if held.clipped else {}
        return bool(moved), capped

    def counts(self) -> dict[str, float]:
        """The last round in numbers: clients, what the server adapts by, and the privacy spent so far."""
        if not self.told:
            return self.spent()
        state = {name: float(value) for name, value in self.state._asdict().items() if value.ndim == 0}
        return self.told | state | self.spent()

    def spent(self) -> dict[str, float]:
        """What privacy was spent so far, and its settings; nothing without privacy."""
        if self.accountant is None:
            return {}
        privacy = self.accountant.privacy
        epsilon = {"epsilon": self.accountant.epsilon(), "delta": privacy.delta}
        return epsilon | {"clip": privacy.clip, "noise": privacy.noise}

    def checkpoint(self) -> Checkpoint:
        """All that the rounds to come depend on; what has arrived of the round under way is not in it."""
        tensors = {"x": self.x} | {f"state.{n}": value for n, value in self.state._asdict().items()}
        tensors |= {} if self.first_model is None else {FIRST_MODEL: self.first_model}
        tensors |= {"statistics": self.statistics} if len(self.statistics) else {}
        tensors |= {} if self.defence is None else {"last_mean": self.last_mean}
        record = {
            "first_losses": self.first_losses,
            "first_sum": list(self.first_sum),
            "seen": self.seen.numbers,
            "left_out": self.left_out,
            "stalled": self.stalled,
            "bytes": self.bytes,
            "told": self.told,
            "training": self.training,
            "kept": self.kept,
            "numbers": self.numbers,
            **({"releases": self.accountant.record()} if self.accountant else {}),
            **({"scales": self.scales} if self.scales else {}),
        }
        copied = {name: value.clone() for name, value in tensors.items()}
        return Checkpoint(self.round, copied, json.loads(json.dumps(record)))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores from a checkpoint of the same algorithm and model."""
        tensors, record = checkpoint.tensors, checkpoint.record
        self.x = tensors["x"].to(self.x.dtype)
        self.state = type(self.state)(*(tensors[f"state.{name}"] for name in self.state._fields))
        self.first_losses, first_sum = dict(record["first_losses"]), record["first_sum"]
        self.first_sum = float(first_sum[0]), float(first_sum[1])
        self.seen = Seen(record["seen"])
        self.left_out, self.stalled = record["left_out"], record["stalled"]
        self.bytes, self.told = Bytes(*record.get("bytes", ())), dict(record.get("told", {}))
        self.training = record.get("training", self.training)  # checkpoints of version 0.1 have none
        self.kept, self.numbers = dict(record.get("kept", {})), dict(record.get("numbers", {}))
        if self.first_model is not None:
            self.first_model = tensors[FIRST_MODEL].to(self.x.dtype)
        if len(self.statistics):
            self.statistics = tensors["statistics"].to(self.statistics.dtype)
        self.scales = tuple(record["scales"]) if record.get("scales") else None
        if self.defence:
            self.last_mean = tensors["last_mean"]
        if self.privacy:
            self._count_at_least(record["releases"])
        self.round = checkpoint.round
        self.begin()

    def keep_releases(self, folder: Path) -> list[str]:
        """Counts releases in a folder's files from now on, and those in them; returns what to say of it."""
        lines = self.releases.keep_in(folder)
        if self.privacy:
            secret = (None if self.remembers else made.drawn for made in self.releases.made)
            counted = [(*(drawn or ALL), 1) for drawn in secret]
            self.accountant = Accountant(self.privacy, counted)
        return lines

    def _count_at_least(self, counted: list[tuple[int, int, int]]) -> None:
        """Compares what a checkpoint counts with the files, which may count more, and must not count less."""
        assert self.privacy is not None
        there, known = len(self.releases.made), sum(count for *_, count in counted)
        if there >= known:
            return
        if there:
            raise InputError(
                f"a checkpoint counts {known} releases, and the files of releases only {there}: they are "
                "damaged; put back a copy, or begin anew in another directory"
            )
        drawn = [(a, b) for a, b, count in counted for _ in range(count)]
        self.releases.begin_with(Release("noisy sum", None, each) for each in drawn)
        self.accountant = Accountant(self.privacy, counted)


def _averages(algorithm: AnyAlgorithm) -> bool:
    """Whether there is an averaged model to evaluate, too."""
    return isinstance(algorithm, CohortAlgorithm) and algorithm.averaged_model is not None


def _second_term(
    client: str, weight: float, vector: Tensor, length: float, numbers: Sequence[float] = ()
) -> Term:
    """A client's second vector, to be added up, with further numbers that are averaged."""
    if not math.isfinite(weight * max(length, *numbers, 0.0)):
        raise RefusedError(f"its second vector, of norm {length:.3g}, is too large to be weighed")
    return Term(client, weight, vector, (weight, *(weight * number for number in numbers)), length)


def _mean(gradients: Capped) -> Tensor:
    """The clients' mean gradient (P,), by their sizes."""
    return gradients.total / max(gradients.sums[0], 1.0)
