"""The nodes of a Flower federation: connected nodes, participants, and their replies."""

import logging
import math
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping

import torch
from flwr.app import Message
from flwr.serverapp import Grid

from fairwind.data.counter import PARTICIPATE, draw, fold, mix
from fairwind.errors import InputError, in_range, whole

LOG = logging.getLogger("flwr")
PAUSE = 0.5  # seconds between looks for replies
AT_ONCE = 16  # replies that are fetched together


def select(nodes: list[int], count: int, key: int, sizes: Mapping[str, float] | None = None) -> list[int]:
    """Some of the nodes, drawn as in the simulator; one of unknown size has the mean of the known ones."""
    weights = None
    if sizes is not None:
        mean = sum(sizes.values()) / len(sizes) if sizes else 1.0
        weights = torch.tensor([float(sizes.get(str(node), mean)) for node in nodes], dtype=torch.float64)
    chosen = draw(torch.tensor([mix(key, node) for node in nodes]), count, weights)
    return [nodes[place] for place in chosen.tolist()]


class Nodes:
    """Which nodes take part in a round, and which message each of them replies to."""

    def __init__(
        self, seed: int, per_round: int | None, fewest: int, *, secret: bool = False, spare: float = 0.0
    ):
        """Where it must be `secret` who takes part, they are not drawn by the seed, which clients know.

        A share of nodes is asked to `spare`: a round ends when as many as are wanted have replied.
        """
        whole(1, min_nodes=fewest, **({} if per_round is None else {"clients_per_round": per_round}))
        in_range(0, 100, over_selection=spare)
        if spare and per_round is None:
            raise InputError("over_selection needs clients_per_round: how many replies end a round")
        if spare and secret:
            raise InputError("with privacy, who counts must not depend on who is first: no over_selection")
        self.seed, self.per_round, self.fewest, self.secret = seed, per_round, fewest, secret
        self.spare = spare
        self.connected = 0  # nodes, when those of a round were drawn
        self.sent_to: dict[str, int] = {}  # nodes, by the messages that are under way

    def wait(self, grid: Grid) -> list[int]:
        """All nodes, once there are enough."""
        while len(nodes := sorted(grid.get_node_ids())) < self.fewest:
            LOG.info("waiting for nodes: %d of %d are there", len(nodes), self.fewest)
            time.sleep(PAUSE)
        return nodes

    @property
    def wanted(self) -> int | None:
        """How many replies end a phase of a round, if not all."""
        return self.per_round if self.spare else None

    def sample(
        self, grid: Grid, server_round: int, attempt: int = 0, sizes: Mapping[str, float] | None = None
    ) -> list[int]:
        """Those that train in a round; a further attempt draws others.

        They are drawn by their `sizes` where these are given, as far as they are known.
        """
        nodes = self.wait(grid)
        self.connected = len(nodes)
        if self.per_round is None:
            return nodes
        count = math.ceil(self.per_round * (1 + self.spare))
        if self.secret:
            return sorted(secrets.SystemRandom().sample(nodes, min(count, len(nodes))))
        key = fold(PARTICIPATE, self.seed, server_round - 1, *([attempt] if attempt else ()))
        return select(nodes, count, key, sizes)

    def replies(self, grid: Grid, messages: Iterable[Message], timeout: float) -> Iterator[Message]:
        """Yields replies as they arrive, a few at a time to limit memory, until all have replied."""
        messages = list(messages)
        nodes = [message.metadata.dst_node_id for message in messages]
        pushed = zip(grid.push_messages(messages), nodes, strict=False)
        self.sent_to = {sent: node for sent, node in pushed if sent}
        del messages
        waiting, end = list(self.sent_to), time.monotonic() + timeout
        while waiting:
            there = set()
            for begin in range(0, len(waiting), AT_ONCE):
                for message in grid.pull_messages(waiting[begin : begin + AT_ONCE]):
                    there.add(message.metadata.reply_to_message_id)
                    yield message
            waiting = [sent for sent in waiting if sent not in there]
            if not waiting or time.monotonic() > end:
                return
            time.sleep(PAUSE)

    def sender(self, message: Message) -> int:
        """The node of a reply: the one that the message was sent to, not the one that the reply names."""
        return int(self.sent_to.get(message.metadata.reply_to_message_id, message.metadata.src_node_id))
