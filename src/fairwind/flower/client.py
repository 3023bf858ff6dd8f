"""A Flower client app that trains a task's client as the simulator does."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Message, MetricRecord
from flwr.clientapp import ClientApp

from fairwind import algorithms
from fairwind.contract import AnyAlgorithm
from fairwind.engine.settings import Settings
from fairwind.errors import InputError
from fairwind.exchange.client import LocalClient
from fairwind.flower.records import SHARED, arrays_in, config_of, judged_content, to_content
from fairwind.task import Task

KEPT = 16  # clients that a process has ready, where it is several nodes
MEMORY = "fairwind"  # the record of a node's state
PARTITION = "partition-id"  # of a node's config: which of the clients it is


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
    server says, unless it is one of your own.
    """
    client_of = local_clients(task, algorithm, settings)
    app = evaluating(client_of, mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config = config_of(message.content)
        trained = client_of(context, config).train(
            arrays_in(message.content),
            int(config["round"]),
            first_loss=remembered(context, config),
            shared=arrays_in(message.content, SHARED) if SHARED in message.content else None,
        )
        remember(context, trained.first_loss)
        return Message(to_content(trained.reply), reply_to=message)

    return app


def local_clients(
    task: Task | Callable[[Context], Task], algorithm: AnyAlgorithm | None, settings: Settings | None
) -> Callable[[Context, Mapping[str, Any]], LocalClient]:
    """A function that gives a node's client, made once, for what the server says."""
    made: dict[tuple[Any, ...], LocalClient] = {}  # the newest last

    def client_of(context: Context, config: Mapping[str, Any]) -> LocalClient:
        said = str(config["algorithm"]), str(config["sends"]), int(config["seed"])
        key = context.node_id, *said
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
            )
        return made[key]

    return client_of


def evaluating(
    client_of: Callable[[Context, Mapping[str, Any]], LocalClient], mods: Sequence[Any] = ()
) -> ClientApp:
    """An app that evaluates, and does not train yet."""
    app = ClientApp(mods=list(mods))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = client_of(context, config_of(message.content))
        judged = client.evaluate(arrays_in(message.content))
        return Message(judged_content(judged), reply_to=message)

    return app


def remembered(context: Context, config: Mapping[str, Any]) -> float | None:
    """The first loss that a node remembers, or is told by the server."""
    memory: Any = context.state.get(MEMORY) or {}
    found = memory.get("first-loss", config.get("first-loss"))
    return None if found is None else float(found)


def remember(context: Context, first_loss: float | None) -> None:
    """Keeps a node's first loss for later rounds."""
    if first_loss is not None:
        context.state[MEMORY] = MetricRecord({"first-loss": first_loss})
