"""Flower without a network: a grid that hands messages, as bytes, to client apps of this process."""

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Meddle = Callable[[Message], Message | None]  # what becomes of a reply on its way; None where it is lost


def through_bytes(message: Message) -> Message:
    return message_from_proto(MessageProto.FromString(message_to_proto(message).SerializeToString()))


class InProcessGrid(Grid):
    """Nodes 100, 101, … with a client app each, and what they do to their replies."""

    def __init__(self, app: ClientApp, nodes: int, meddle: dict[int, Meddle] | None = None):
        # What Flower's processes are told when they begin
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.meddle = app, meddle or {}
        self.contexts = {100 + k: self.context(k) for k in range(nodes)}
        self.replies: dict[str, Message] = {}
        self.sent = 0
        self.bytes = 0

    @staticmethod
    def context(number: int) -> Context:
        return Context(1, 100 + number, {"partition-id": number}, RecordDict(), {})

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            self.sent += 1
            message.metadata.__dict__["_message_id"] = f"message {self.sent}"
            ids.append(message.metadata.message_id)
            node = message.metadata.dst_node_id
            received = through_bytes(message)
            try:
                reply = self.app(received, self.contexts[node])
            except Exception as error:  # as a SuperNode does
                reason = f"{type(error)}:<'{error}'>"
                reply = Message(Error(code=1, reason=reason), reply_to=received)
            meddled = self.meddle.get(node, lambda reply: reply)(reply)  # type: ignore[no-untyped-call]
            if meddled is not None:
                self.bytes += len(message_to_proto(meddled).SerializeToString())
                self.replies[ids[-1]] = through_bytes(meddled)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(each) for each in list(message_ids) if each in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Any:
        return self.pull_messages(self.push_messages(messages))
