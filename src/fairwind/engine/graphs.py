"""CUDA graphs: on a GPU, what is done again and again is recorded once and then replayed as a whole.

Launched one by one, small kernels wait for the host. A graph repeats the same kernels on the same memory:
whatever changes between two replays must lie in a tensor that stays in its place.
"""

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

from fairwind.errors import first_line


class Graphs:
    """Does a piece of work as it is the first time, and replays its graph from the second time on.

    Graphs share memory: one's is free when another is replayed.
    """

    def __init__(self, device: torch.device):
        self.on = device.type == "cuda"
        # Memory is kept by stream, so it takes one and the same to share it.
        self.stream = torch.cuda.Stream(device) if self.on else None  # type: ignore[no-untyped-call]
        self.forget()

    def forget(self) -> None:
        """Drops all graphs, because tensors have moved."""
        self.recorded: dict[Hashable, torch.cuda.CUDAGraph | None] = {}  # None: done once, not recorded yet
        # Also while recording is off: whoever turns it on again wants graphs to share memory.
        self.pool = torch.cuda.graph_pool_handle() if self.stream else None

    def do(self, what: Hashable, work: Callable[[], None]) -> None:
        """Does the work; `what` names it."""
        if not self.on or recording():
            return work()
        if what not in self.recorded:  # the first time chooses and compiles kernels
            self.recorded[what] = None
            return work()
        graph = self.recorded[what] or self._record(what, work)
        return graph.replay() if graph else work()

    def _record(self, what: Hashable, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a graph takes memory of its own, and cannot take what is kept
        failed = None
        try:
            with torch.cuda.stream(self.stream), _no_garbage_collection():
                graph.capture_begin(pool=self.pool)
                try:
                    work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            failed = first_line(error.__context__ or error)  # what ended the recording, not its ending
        if failed is not None:  # outside the handler, which holds on to memory
            self.on = False
            self.forget()
            del graph
            torch.cuda.empty_cache()
            warnings.warn(f"rounds run slower, because they cannot be recorded: {failed}", stacklevel=2)
            return None
        self.recorded[what] = graph
        return graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Within, graphs that nobody needs are not freed: that would spoil a recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def recording() -> bool:
    """Whether what is done now is being recorded."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
