"""A Flower client app that trains a task's client as the simulator does."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode

from fairwind import algorithms
from fairwind.contract import AnyAlgorithm
from fairwind.engine.settings import Settings
from fairwind.errors import InputError
from fairwind.exchange.client import LocalClient
from fairwind.exchange.kept import Kept, kept_file, load_kept, save_kept
from fairwind.exchange.message import told_of
from fairwind.flower.records import (
    JUDGED,
    asks_to_judge,
    config_of,
    judged_content,
    keep_in,
    kept_in,
    request_of,
    to_content,
)
from fairwind.task import Task

LOG = logging.getLogger("flwr")
KEPT = 16  # clients that a process has ready, where it is several nodes
# Of a node's config: which of the clients it is, and the folder of what it keeps
PARTITION, FOLDER = "partition-id", "state"
SECURE = "secure-aggregation"  # of a run config


ClientOf = Callable[[Context, Mapping[str, Any]], LocalClient]  # a node's client, for what the server says


def client_app(
    task: Task | Callable[[Context], Task],
    algorithm: AnyAlgorithm | None = None,
    *,
    settings: Settings | None = None,
    mods: Sequence[Any] = (),
) -> ClientApp:
    """The client's side of a training; the server's is `AlgorithmStrategy`.

    `task` holds all clients, of which a node is the one numbered by `partition-id` in its config; or it is a
    function of the node's context that gives a task with the node's own data alone. The algorithm is what the
    server says, unless it is one of your own. What a client keeps between rounds is in the state that Flower
    has of the node for as long as a run goes on; or in a file, in the folder `state` of the node's config.
    With `secure-aggregation` in the run config, what leaves a client is masked, whatever the server asks for.
    """
    client_of = local_clients(task, algorithm, settings)
    app = evaluating(client_of, mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if is_secure(context.run_config):
            from fairwind.flower.secure import masked  # nobody else needs Flower's cryptography

            return masked(message, context, client_of)
        client = client_of(context, config_of(message.content))
        request, before = request_of(message.content, "train"), recalled(context)
        reply, kept = client.reply(request, before)
        content = to_content(reply)
        if asks_to_judge(message.content):
            content.update(judged_content(client.judge(request, before), JUDGED))
        keep(context, kept)
        return Message(content, reply_to=message)

    return app


def is_secure(run_config: Mapping[str, Any]) -> bool:
    """Whether a run config asks for secure aggregation."""
    said = run_config.get(SECURE, "")
    if said not in ("", True, False):
        raise InputError(f"{SECURE}={said!r} is neither true nor false")
    return said is True


def local_clients(
    task: Task | Callable[[Context], Task], algorithm: AnyAlgorithm | None, settings: Settings | None
) -> ClientOf:
    """A function that gives a node's client, made once, for what the server says."""
    made: dict[tuple[Any, ...], LocalClient] = {}  # the newest last

    def client_of(context: Context, config: Mapping[str, Any]) -> LocalClient:
        said = str(config["algorithm"]), str(config["sends"]), int(config["seed"]), config.get("codec")
        columns = str(config.get("columns", "{}"))
        key = context.node_id, *said, columns
        if key not in made:
            while len(made) >= KEPT:
                del made[next(iter(made))]
            mine = task(context) if callable(task) else task
            number: Any = context.node_config.get(PARTITION)
            if number is None and len(mine.federation) > 1:
                raise InputError(
                    f"the task has {len(mine.federation)} clients: say which of them a node is, with "
                    f"--node-config '{PARTITION}=0'"
                )
            made[key] = LocalClient(
                mine,
                algorithm or algorithms.build(said[0]),
                int(number) if len(mine.federation) > 1 else None,
                number=int(context.node_id % 2**31 if number is None else number),
                seed=said[2],
                settings=settings,
                sends="sums" if said[1] == "sums" else "report",
                codec=None if said[3] is None else str(said[3]),
                columns=json.loads(columns),
            )
        return made[key]

    return client_of


def evaluating(client_of: ClientOf, mods: Sequence[Any] = ()) -> ClientApp:
    """An app that evaluates, and does not train yet."""
    app = ClientApp(mods=[discreet, *mods])

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = client_of(context, config_of(message.content))
        judged = client.judge(request_of(message.content, "evaluate"), recalled(context))
        return Message(judged_content(judged), reply_to=message)

    return app


def discreet(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A mod that leaves an error's text in the node's own log: Flower would send it, with what it quotes."""
    try:
        return call_next(message, context)
    except Exception as error:  # whatever a user's model or data raise
        LOG.exception("%s failed", message.metadata.message_type)
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, told_of(error)), reply_to=message)


def recalled(context: Context) -> Kept:
    """What a node keeps between rounds."""
    file = _file(context)
    return kept_in(context.state) if file is None else load_kept(file)


def keep(context: Context, kept: Kept) -> None:
    """Keeps it for later rounds."""
    file = _file(context)
    if file is None:
        keep_in(context.state, kept)
    else:
        save_kept(file, kept)


def _file(context: Context) -> Path | None:
    """Where a node keeps it, if its config names a folder."""
    folder, number = context.node_config.get(FOLDER), context.node_config.get(PARTITION, context.node_id)
    return None if folder is None else kept_file(str(folder), int(number))
