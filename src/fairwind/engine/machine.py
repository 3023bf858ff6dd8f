"""What is known of the machine, gathered once, and what PyTorch does otherwise on another device."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import NamedTuple

import torch

from fairwind.engine.backends.native import compiler
from fairwind.engine.ranks import ALONE, Ranks
from fairwind.engine.settings import Precision, Settings
from fairwind.engine.workers import cores
from fairwind.errors import InputError, first_line
from fairwind.layers.gpu.sixteen_bits import has_shared_memory

CPP_COMPILER, TRITON = "a C++ compiler (g++ or clang++)", "Triton"


class Machine(NamedTuple):
    """The facts of a machine that decide how a comparison is computed."""

    device: str  # "cpu", "cuda", "cuda:1", …
    memory: int  # bytes of the device
    cores: int  # for the worker threads of this process; 1 with a GPU
    missing: str  # what compiling needs and was not found; empty if nothing
    runs_kernels: bool  # whether the GPU has the memory that our kernels need
    world: int  # processes that share the rows

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


def find_machine(settings: Settings, ranks: Ranks = ALONE) -> Machine:
    """The facts of this machine; refuses settings that ask for what it does not have."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise InputError(f"device {device!r} is neither cpu nor cuda: give 'cpu', 'cuda', 'cuda:1' or 'auto'")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used here: {first_line(error)}") from None
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if ranks.world > 1 else 1
    if ranks.world > 1:
        _check_ranks(settings, device, here)
    on_gpu = kind == "cuda"
    if settings.precision == "tf32" and not on_gpu:
        raise InputError("precision tf32 needs a GPU; on a CPU use float32")
    if settings.precision == "bf16" and settings.engine == "loop":
        raise InputError("precision bf16 needs the stacked engine; with engine=loop use float32 or tf32")
    if on_gpu and (settings.workers or 1) > 1:
        raise InputError("workers are CPU threads; on a GPU leave them out")
    found = torch.device(device)
    return Machine(
        device if on_gpu else "cpu",  # there is one, also called cpu:0
        device_memory(found),
        1 if on_gpu else max(1, cores() // here),
        missing_compiler(found),
        on_gpu and has_shared_memory(),
        ranks.world,
    )


def _check_ranks(settings: Settings, device: str, here: int) -> None:
    """Refuses settings that several processes cannot share, of which so many are on this machine."""
    if settings.engine == "loop":
        raise InputError("the loop runs in one process: start it without torchrun, or use the stacked engine")
    gpus = torch.cuda.device_count()
    if device.startswith("cuda:"):
        raise InputError(f"{device!r} is one GPU for all processes: give 'cuda', and each takes its own")
    if device == "cuda" and here > gpus:
        raise InputError(
            f"{here} processes cannot share {gpus} GPU(s): start one for each, or give device 'cpu'"
        )


def device_memory(device: torch.device) -> int:
    """Bytes that a device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**34


def missing_compiler(device: torch.device) -> str:
    """What compiling for a device needs and was not found; empty if nothing."""
    if device.type == "cuda":
        return "" if find_spec("triton") else TRITON
    return "" if compiler() else CPP_COMPILER


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds PyTorch's generators of the host and a device; `torch.manual_seed` takes some 400 µs for all."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def without_cudnn(device: torch.device) -> AbstractContextManager[None]:
    """Within, recurrent layers have a backward pass in evaluation mode, which cuDNN's do not."""
    if device.type != "cuda":
        return nullcontext()
    off: AbstractContextManager[None] = torch.backends.cudnn.flags(enabled=False)
    return off


def waits(work: Callable[[], object], device: torch.device) -> bool:
    """Whether the host waits for a GPU within some work, as for a copy, which no CUDA graph can record.

    The work must have been done before: kernels are chosen in the first call.
    """
    if device.type != "cuda":
        return False
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says that some kinds of waiting are not found
            torch.cuda.set_sync_debug_mode("error")
        work()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def compute_type(precision: Precision) -> torch.dtype | None:
    """The type of a local step's activations and gradients; None is the model's own."""
    return torch.bfloat16 if precision == "bf16" else None


@contextmanager
def matmul_precision(precision: Precision, device: torch.device) -> Iterator[None]:
    """Allows TF32 products of float32 matrices on a GPU, unless the precision is float32."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
