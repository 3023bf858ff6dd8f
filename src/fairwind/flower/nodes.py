"""The nodes of a Flower federation: connected nodes, participants, and their replies."""

import logging
import secrets
import time
from collections.abc import Iterable, Iterator

from flwr.app import Message
from flwr.serverapp import Grid

from fairwind.data.counter import PARTICIPATE, fold, mix
from fairwind.errors import whole

LOG = logging.getLogger("flwr")
PAUSE = 0.5  # seconds between looks for replies
AT_ONCE = 16  # replies that are fetched together


class Nodes:
    """Which nodes take part in a round, and which message each of them replies to."""

    def __init__(self, seed: int, per_round: int | None, fewest: int, *, secret: bool = False):
        """Where it must be `secret` who takes part, they are not drawn by the seed, which clients know."""
        whole(1, min_nodes=fewest, **({} if per_round is None else {"clients_per_round": per_round}))
        self.seed, self.per_round, self.fewest, self.secret = seed, per_round, fewest, secret
        self.connected = 0  # nodes, when those of a round were drawn
        self.sent_to: dict[str, int] = {}  # nodes, by the messages that are under way

    def wait(self, grid: Grid) -> list[int]:
        """All nodes, once there are enough."""
        while len(nodes := sorted(grid.get_node_ids())) < self.fewest:
            LOG.info("waiting for nodes: %d of %d are there", len(nodes), self.fewest)
            time.sleep(PAUSE)
        return nodes

    def sample(self, grid: Grid, server_round: int, attempt: int = 0) -> list[int]:
        """Those that train in a round; a further attempt draws others."""
        nodes = self.wait(grid)
        self.connected = len(nodes)
        if self.per_round is None or self.per_round >= len(nodes):
            return nodes
        if self.secret:
            return sorted(secrets.SystemRandom().sample(nodes, self.per_round))
        key = fold(PARTICIPATE, self.seed, server_round - 1, *([attempt] if attempt else ()))
        return sorted(sorted(nodes, key=lambda node: mix(key, node))[: self.per_round])

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
