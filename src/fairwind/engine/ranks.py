"""Ranks: the processes that torchrun starts, which share the rows and exchange sums."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fairwind.engine import tuning
from fairwind.errors import InputError, first_line


class Ranks(NamedTuple):
    """The index of this process; 0 of 1, unless torchrun started it."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes files."""
        return self.rank == 0

    def share(self, costs: Tensor) -> Tensor:
        """This rank's share of items with these costs, in order; all shares cost about the same."""
        if self.world == 1:
            return torch.arange(len(costs))
        dearest_first = torch.argsort(costs, descending=True, stable=True)
        return dearest_first[self.rank :: self.world].sort().values

    def sum(self, *parts: Tensor) -> list[Tensor]:
        """The parts summed over ranks in one all-reduce: the same bits on every rank."""
        if self.world == 1:
            return list(parts)
        flat = torch.cat([part.double().reshape(-1) for part in parts])
        _all_reduce(flat)
        summed = torch.split(flat, [part.numel() for part in parts])
        return [s.view_as(part).to(part.dtype) for s, part in zip(summed, parts, strict=True)]

    def fill(self, rows: Tensor) -> None:
        """Adds up matrices (n, …) in place: rows that one rank has, and that are zero on the others."""
        if self.world > 1 and rows.numel():
            at_once = max(1, tuning.MAX_EXCHANGED_NUMBERS // max(1, rows[0].numel()))
            for block in torch.split(rows, at_once):
                block.copy_(self.sum(block)[0])

    def lowest(self, values: Tensor) -> Tensor:
        """The lowest of each value over ranks."""
        if self.world > 1:
            values = values.clone()
            _all_reduce(values, dist.ReduceOp.MIN)
        return values

    def any(self, wish: bool) -> bool:
        """Whether it is true on any rank."""
        if self.world == 1:
            return wish
        wishes = torch.tensor([float(wish)])
        _all_reduce(wishes)
        return bool(wishes)

    def meet(self) -> None:
        """Waits until every rank is here."""
        self.any(False)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Runs the block on rank 0 first, then on the others."""
        if not self.first:
            self.meet()
        yield
        if self.first:
            self.meet()


ALONE = Ranks()


def find() -> Ranks:
    """This process's rank, whether or not it has joined the others."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():  # torchrun's
        return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return Ranks()


def join() -> Ranks:
    """Joins the other ranks, if there are any, and gives each its own GPU as "cuda"."""
    ranks = find()
    if ranks.world == 1 or (dist.is_available() and dist.is_initialized()):
        return ranks
    if not dist.is_available():
        raise InputError("this PyTorch cannot join processes (torch.distributed): start only one")
    # Imported later, it would keep the group as a default argument, and gloo's threads beyond Python's end,
    # where they abort the process now and then.
    import_module("torch.distributed.nn")
    gpu = int(os.environ["LOCAL_RANK"])
    if gpu < torch.cuda.device_count():
        torch.cuda.set_device(gpu)
    both = torch.cuda.is_available() and dist.is_nccl_available()
    # Rank 0 may take long to prepare data, and torchrun notices a rank that fails.
    dist.init_process_group("cpu:gloo,cuda:nccl" if both else "gloo", timeout=timedelta(days=1))
    atexit.register(dist.destroy_process_group)
    return ranks


def _all_reduce(values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    try:
        dist.all_reduce(values, operation)
    except RuntimeError as error:
        raise InputError(f"another rank has failed, or cannot be reached: {first_line(error)}") from error
