"""The server of a real federation: a running sum of replies, checked and capped, and the algorithm's step."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fairwind.aggregation import advance, contribute, first_state
from fairwind.contract import AnyAlgorithm, LocalAlgorithm, Report
from fairwind.engine.checkpoint import Checkpoint
from fairwind.engine.layout import Layout
from fairwind.errors import InputError
from fairwind.exchange.accounting import Accountant
from fairwind.exchange.bounds import UNBOUNDED, Bounds, Seen, within
from fairwind.exchange.capping import Capped, CappedSum, Term
from fairwind.exchange.message import (
    FIRST,
    Arrays,
    RefusedError,
    Reply,
    Sends,
    arrays_of,
    check_type,
    report_form,
    sums_form,
    sums_record,
    to_report,
)
from fairwind.exchange.privacy import Privacy, PrivateSum


@dataclass
class Round:
    """The outcome of a round."""

    number: int  # from 0
    used: int = 0  # clients that counted
    refused: dict[str, str] = field(default_factory=dict)  # by client: why its reply does not count
    bounded: dict[str, list[str]] = field(default_factory=dict)  # by client: numbers that were clamped
    capped: dict[str, dict[str, float]] = field(default_factory=dict)  # by what, and client: the cap's factor
    moved: bool = False  # whether the model did
    blame: str = ""  # why it did not, where there was something to step with

    def lines(self) -> list[str]:
        """Log messages, one for each client and reason."""
        found = [f"{client} is left out: {why}" for client, why in self.refused.items()]
        found += [f"{client} is not believed: {', '.join(what)}" for client, what in self.bounded.items()]
        for what, factors in self.capped.items():
            found += [f"{client} is capped: its {what} counts {f:.2g} times" for client, f in factors.items()]
        if not self.moved:
            found.append(f"the model stays as it was: {self.blame or 'no reply could be used'}")
        return found


class Aggregator:
    """The server's side of any algorithm of one sum: x, its state, and what it knows of its clients."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        layout: Layout,
        x: Tensor,
        *,
        bounds: Bounds | None = None,
        sends: Sends = "report",
        privacy: Privacy | None = None,
    ):
        """From the model x (P,). `sends` is what clients are asked for; see the package.

        With `privacy`, bounds must be left out: they depend on other clients, and its own take their place.
        """
        self.algorithm, self.layout, self.sends = check_type(algorithm), layout, sends
        if privacy is not None and bounds not in (None, UNBOUNDED):
            raise InputError("bounds compare a client with others, which privacy forbids: leave them out")
        self.privacy, self.bounds = privacy, bounds or (UNBOUNDED if privacy else Bounds())
        self.accountant = None if privacy is None else Accountant(privacy)
        by_report = sends == "report"
        self.form = report_form(layout, algorithm.probe) if by_report else sums_form(layout, self.algorithm)
        self.sums = sums_record(self.algorithm)
        self.x = x.detach().cpu().clone()
        state = first_state(algorithm, self.x, 0)
        self.state: Any = type(state)(*(value.clone() for value in state))
        self.round = 0  # rounds that are over
        self.seen = Seen()
        self.first_losses: dict[str, float] = {}  # by client
        self.first_sum = 0.0, 0.0  # their sum and number in the last round, where only sums are sent
        self.left_out, self.stalled = 0, 0
        self.last: Round | None = None  # the round that ended last
        self.begin()

    def begin(self, drawn: tuple[int, int] | None = None) -> None:
        """Forgets what has arrived of the round that is under way.

        `drawn` is how many clients take part, and of how many. Only privacy asks for it; leave it out where
        they were not drawn evenly, or anybody may know who was.
        """
        self.current, self.drawn = Round(self.round), drawn
        shape = len(self.x), len(self.sums._fields)
        self.sum: CappedSum | PrivateSum = (
            PrivateSum(*shape, self.privacy) if self.privacy else CappedSum(*shape, self.bounds.share)
        )
        self.secret: Capped | None = None
        self.counted: set[str] = set()
        self.reported: dict[str, Report] = {}
        self.new_first_losses: dict[str, float] = {}
        self.new_first = 0.0, 0.0

    def weights(self) -> Arrays:
        """The model, as clients are sent it."""
        return arrays_of(self.layout, self.x)

    def shared(self) -> Arrays | None:
        """What clients add to every step, for algorithms that have it."""
        if not isinstance(self.algorithm, LocalAlgorithm) or self.algorithm.local.shared is None:
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
        summed, count = (sum(known), len(known)) if self.sends == "report" else self.first_sum
        return summed / count if count else None

    def accept(self, client: str, reply: Reply) -> str:
        """Adds a client's reply to the round; returns why it is refused, or nothing."""
        try:
            if client in self.current.refused or client in self.counted:
                raise RefusedError("it has replied to this round before")
            self._add(client, reply)
        except RefusedError as error:
            return self.refuse(client, str(error))
        return ""

    def refuse(self, client: str, why: str) -> str:
        """Records that a client's reply is refused; returns the reason."""
        self.current.refused.setdefault(client, why)
        return why

    def _add(self, client: str, reply: Reply) -> None:
        vector, length = self.form.vector(reply.arrays)
        numbers = self.form.checked(reply.numbers)
        if self.sends == "report":
            term = self._weighed(client, vector, numbers, length)
        else:
            term = Term(client, 1.0, vector, tuple(numbers[name] for name in self.sums._fields), length)
        if term.sums[0] < 0:
            raise RefusedError(f"its weight is {term.sums[0]:.3g}, which is negative")
        for name, value in zip(self.sums._fields[1:], term.sums[1:], strict=True):
            if self.privacy and value < 0:
                raise RefusedError(f"its {name} is {value:.3g}: with privacy, sums must not be negative")
        if not math.isfinite(term.sizes[1]):
            raise RefusedError(f"its update, of norm {length:.3g}, is too large to be weighed")
        self.sum.add(term)
        self.counted.add(client)
        self.current.used += 1
        if self.sends == "sums" and FIRST[0] in numbers:
            summed, count = self.new_first
            self.new_first = summed + numbers[FIRST[0]], count + numbers[FIRST[1]]

    def take_sum(self, total: Tensor, numbers: Mapping[str, float], clients: int) -> None:
        """Adds the secure sum of this many clients."""
        if self.privacy:
            raise InputError("with privacy the server clips each client, so it cannot take a secret sum")
        found = self.form.checked(numbers)
        sums = tuple(found[name] for name in self.sums._fields)
        self.secret = Capped(total, sums, clients, [{} for _ in (*sums, total)], "nobody who is known")
        self.current.used = clients
        if FIRST[0] in found:
            self.new_first = found[FIRST[0]], found[FIRST[1]]

    def _weighed(self, client: str, update: Tensor, numbers: Mapping[str, float], length: float) -> Term:
        """A client's contribution, computed from its report within the bounds."""
        report = to_report(numbers, length)
        if "loss0" in numbers and client in self.first_losses:  # it is held to what it said first
            report = report._replace(loss0=report.loss0.new_tensor(self.first_losses[client]))
        believed, notes = self.seen.bounded(client, report, self.bounds)
        part, usable = contribute(self.algorithm, believed)
        if not usable:
            raise RefusedError("what the algorithm makes of its numbers is not finite")
        if notes:
            self.current.bounded[client] = notes
        self.reported[client] = report
        if "loss0" in numbers:
            self.new_first_losses[client] = float(believed.loss0)
        return Term(client, float(part.coef), update, tuple(map(float, part.sums)), length)

    def finish(self) -> Round:
        """The algorithm's step with what has arrived, and the next round."""
        done, capped = self.current, self.secret or self.sum.finish()
        what = "weight", "update", *self.sums._fields[1:]
        done.capped = {name: each for name, each in zip(what, capped.factors, strict=True) if each}
        if self.accountant:
            self.accountant.release(self.drawn)
        done.blame = "" if capped.clients or not self.privacy else "the clients' weight is lost in the noise"
        if capped.clients:
            done.moved = self._advance(capped)
            who = f"; {capped.largest} has the largest share in it" if capped.largest else ""
            done.blame = "" if done.moved else f"the step is not finite{who}"
        for client, report in self.reported.items():
            self.seen.note(client, report)
        self.first_losses = self.new_first_losses | self.first_losses
        self.first_sum = self.new_first if self.new_first[1] else self.first_sum
        self.left_out += len(done.refused)
        self.stalled += not done.moved
        self.round += 1
        self.last = done
        self.begin()
        return done

    @torch.no_grad()
    def _advance(self, capped: Capped) -> bool:
        sums = self.sums(*(torch.tensor(s, dtype=torch.float64) for s in capped.sums))
        clients = torch.tensor(capped.clients)
        found = advance(self.algorithm, self.x, self.state, capped.total, sums, clients)
        self.x, self.state, moved = found
        return bool(moved)

    def counts(self) -> dict[str, float]:
        """The last round in numbers: clients, what the server adapts by, and the privacy spent so far."""
        done = self.last
        if done is None:
            return self.spent()
        capped = {client for each in done.capped.values() for client in each}
        clients = {
            "used": done.used,
            "refused": len(done.refused),
            "bounded": len(done.bounded),
            "capped": len(capped),
            "moved": int(done.moved),
        }
        state = {name: float(value) for name, value in self.state._asdict().items() if value.ndim == 0}
        return clients | state | self.spent()

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
        record = {
            "first_losses": self.first_losses,
            "first_sum": list(self.first_sum),
            "seen": self.seen.numbers,
            "left_out": self.left_out,
            "stalled": self.stalled,
            **({"releases": self.accountant.record()} if self.accountant else {}),
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
        if self.privacy:
            self.accountant = Accountant(self.privacy, record["releases"])
        self.round = checkpoint.round
        self.begin()
