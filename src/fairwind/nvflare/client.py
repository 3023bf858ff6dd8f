"""An NVFLARE executor that trains a task's client as the simulator does."""

from collections.abc import Mapping
from typing import Any

from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fairwind import algorithms, setups
from fairwind.errors import first_line
from fairwind.exchange.client import LocalClient
from fairwind.exchange.kept import Kept, kept_file, load_kept, save_kept
from fairwind.exchange.message import told_of
from fairwind.nvflare.models import SAID, as_model, failed, request_of
from fairwind.runs.recipe import build_algorithm
from fairwind.runs.references import is_reference, load_task
from fairwind.task import Task


def find_task(text: str) -> Task:
    """The task of a setup's spec, or of a reference such as PACKAGE.MODULE:NAME."""
    return load_task(text) if is_reference(text) else setups.task(text)


class AlgorithmExecutor(Executor):
    """The client's side of a training; the server's is `AlgorithmController`."""

    def __init__(self, task: str, number: int, algorithm: str | None = None, state: str | None = None):
        """`number` is which of all clients a site is; a task with the site's own data alone is enough.

        The algorithm is what the server says, unless it is one of your own, by a reference. What the client
        keeps between rounds is in a file in the folder `state`, or forgotten when the job's process ends.
        """
        super().__init__()
        self.task, self.number, self.algorithm, self.state = task, number, algorithm, state
        self.clients: dict[tuple[Any, ...], LocalClient] = {}
        self.kept = Kept()

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Trains, or evaluates the model received."""
        try:
            model, site = FLModelUtils.from_shareable(shareable), fl_ctx.get_identity_name()
            client = self._client(model.meta[SAID])
            file = None if self.state is None else kept_file(self.state, self.number)
            kept = self.kept if file is None else load_kept(file)
            if task_name == AppConstants.TASK_VALIDATION:
                answer = as_model(client.judge(request_of(model, site, "evaluate"), kept))
            else:
                reply, self.kept = client.reply(request_of(model, site, "train"), kept)
                if file is not None:
                    save_kept(file, self.kept)
                answer = as_model(reply)
        except Exception as error:  # whatever a user's model or data raise
            self.log_exception(fl_ctx, f"{task_name} failed: {first_line(error)}")
            answer = failed(told_of(error))
        return FLModelUtils.to_shareable(answer)

    def _client(self, said: Mapping[str, Any]) -> LocalClient:
        key = said["algorithm"], said["sends"], said["seed"], said.get("codec")
        if key not in self.clients:
            task = find_task(self.task)
            own = self.algorithm
            self.clients[key] = LocalClient(
                task,
                # A server's word is a spec: references, which load code, are the site's own.
                algorithms.build(str(said["algorithm"])) if own is None else build_algorithm(own),
                self.number if len(task.federation) > 1 else None,
                number=self.number,
                seed=int(said["seed"]),
                sends="sums" if said["sends"] == "sums" else "report",
                codec=None if key[3] is None else str(key[3]),
                columns=said.get("columns"),
            )
        return self.clients[key]
