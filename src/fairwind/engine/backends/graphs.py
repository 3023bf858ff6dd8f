"""CUDA graphs: repeated work on a GPU is recorded once and then replayed.

Launching small kernels one by one takes longer than running them. A graph repeats the same kernels on the
same memory, so everything that changes between replays must be written into existing tensors.
"""

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fairwind.errors import SlowPathWarning, first_line


class Graphs:
    """Runs a piece of work normally the first time, records it the second time, and then replays it.

    Graphs share a memory pool, because only one is replayed at a time.
    """

    def __init__(self, device: torch.device, *, on: bool):
        self.device, self.on = device, on
        self.stream: torch.cuda.Stream | None = None
        self.forget()

    def forget(self) -> None:
        """Drops all graphs, because tensors have moved."""
        self.recorded: dict[Hashable, torch.cuda.CUDAGraph | None] = {}  # None: done once, not recorded yet
        self.pool: Any = None

    def do(self, what: Hashable, work: Callable[[], None]) -> None:
        """Does the work, which `what` identifies."""
        if not self.on or recording():
            return work()
        if what not in self.recorded:  # the first time chooses and compiles kernels
            self.recorded[what] = None
            return work()
        graph = self.recorded[what] or self._record(what, work)
        return graph.replay() if graph else work()

    def _record(self, what: Hashable, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        if self.stream is None:  # the allocator keeps memory per stream, so sharing needs a single one
            self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a graph has its own memory pool, and cannot use the allocator's cache
        failed = None
        try:
            with torch.cuda.stream(self.stream), _no_garbage_collection():
                graph.capture_begin(pool=self.pool)
                try:
                    work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            failed = first_line(error.__context__ or error)  # what ended the recording
        if failed is not None:  # outside the handler, which keeps tensors alive
            self.on = False
            self.forget()
            del graph
            torch.cuda.empty_cache()
            why = f"rounds are slower without CUDA graphs: {failed}"
            warnings.warn(why, SlowPathWarning, stacklevel=2)
            return None
        self.recorded[what] = graph
        return graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Postpones garbage collection of graphs, which would invalidate a recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def renew(place: Tensor, value: Tensor) -> None:
    """Copies a value from the host to where graphs read it, without waiting for a GPU."""
    place.copy_(value.pin_memory() if place.is_cuda else value, non_blocking=True)


def recording() -> bool:
    """Whether a CUDA graph is being recorded."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
