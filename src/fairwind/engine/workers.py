"""Worker threads, one per core, which share the work.

They are parallel over rows or clients, not inside small kernels: threads that synchronise after every kernel
of microseconds gain little on an idle machine, and lose most of their time on a busy one.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

State = TypeVar("State")
Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@cache
def keep_memory() -> None:
    """Makes glibc keep freed memory for later allocations.

    By default it returns large blocks to the system at once. A model's gradients are such blocks, and cost
    thousands of page faults in every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        for parameter in (trim_threshold, mmap_threshold):
            mallopt(parameter, 1 << 30)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Limits PyTorch's kernels to this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Workers(Generic[State]):
    """One thread per state; each piece of work has exclusive use of one state."""

    def __init__(self, states: Sequence[State]):
        self.states = list(states)
        self._free: SimpleQueue[State] = SimpleQueue()
        for state in self.states:
            self._free.put(state)
        self._pool = (
            ThreadPoolExecutor(len(self.states), "fairwind", torch.set_num_threads, (1,))
            if len(self.states) > 1
            else None
        )

    def map(self, work: Callable[[Item, State], Result], items: Sequence[Item]) -> Iterator[Result]:
        """The results of the items, in order; only a few are started ahead."""
        if self._pool is None or len(items) == 1:
            for item in items:
                yield work(item, self.states[0])
            return
        ahead: deque[Future[Result]] = deque()
        try:
            for item in items:
                ahead.append(self._pool.submit(self._do, work, item))
                if len(ahead) > 2 * len(self.states):
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            wait(ahead)

    def _do(self, work: Callable[[Item, State], Result], item: Item) -> Result:
        state = self._free.get()
        try:
            return work(item, state)
        finally:
            self._free.put(state)
