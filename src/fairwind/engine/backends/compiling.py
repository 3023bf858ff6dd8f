"""Compiled steps, and everything that depends on PyTorch internals.

On a CPU a step is compiled ahead of time into a library, and a C++ driver runs all steps of a chunk in one
call, without the GIL: entering compiled code through Python costs more than a small step. On a GPU, where
steps are replayed as CUDA graphs, `torch.compile` is used.
"""

import ctypes
import os
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from fairwind.data import samples
from fairwind.engine.backends.graphs import out_of_memory
from fairwind.engine.backends.native import build, library, named, source
from fairwind.engine.stacked.gradients import Product
from fairwind.engine.stacked.steps import Batches, Rows, Step
from fairwind.errors import SlowPathWarning, first_line
from fairwind.layers import tracing
from fairwind.runs import cache

DRIVER = "driver.cpp", "subnormal.h"
Group = Literal["rows", "offsets", "table", "samples"]  # of tensors whose first sizes are one number
# Sizes of the example that a step is traced with: all different, so that none is mistaken for another.
SIZES: dict[Group, int] = {"rows": 7, "offsets": 13, "table": 29, "samples": 41}
OPTIONS = {"cpp.threads": 1}  # a worker has one core
INDUCTOR, KEPT = "TORCHINDUCTOR_CACHE_DIR", ("??/*", "precompiled_headers/*.*")
CODES = {  # of types, in C++
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
}


class Library:
    """A step compiled for a CPU, for any number of rows, batches and samples."""

    def __init__(self, step: Step, rows: Rows, batches: Batches, inputs: Any, targets: Any):
        """Compiled for tensors of these types and shapes, or taken from the cache."""
        graph, self.shared, self.parts, example, sizes = traced(step, rows, batches, inputs, targets)
        self.strides = [t.stride() for t in (*example, *self.shared)]
        sizes += [0] * len(self.shared)
        self.step, self.steps = _build(graph, [*example, *self.shared], sizes), _driver()

    def driver(self) -> "Driver":
        return Driver(self)


class Driver:
    """Runs the steps of one chunk after another; used by one thread at a time."""

    def __init__(self, library: Library):
        self.shared, self.parts, self.strides = library.shared, library.parts, library.strides
        self._library, self._driver = library.step, library.steps
        self._container = ctypes.c_void_p()
        create = self._library.AOTInductorModelContainerCreateWithDevice
        _done(create(ctypes.byref(self._container), ctypes.c_size_t(1), b"cpu", None))
        self._run = ctypes.cast(self._library.AOTInductorModelContainerRunSingleThreaded, ctypes.c_void_p)

    def __del__(self) -> None:
        if getattr(self, "_container", None):
            self._library.AOTInductorModelContainerDelete(self._container)

    def __call__(self, rows: Rows, batches: Batches, inputs: Any, targets: Any, counts: list[int]) -> None:
        """Lets rows take steps, each by the first so many."""
        tensors = [*_tensors(rows, batches, inputs, targets), *self.shared]
        described: list[int] = []
        for t, stride in zip(tensors, self.strides, strict=True):
            assert t.stride() == stride  # compiled code is specialised to these strides
            described += [t.data_ptr(), CODES[t.dtype], t.ndim, *t.shape, *t.stride()]
        begin = len(rows.weights) if rows.kept else 0  # products are added to what is kept, or to weights
        _done(
            self._driver.take_steps(
                self._run,
                self._container,
                *_numbers(described),
                ctypes.c_int64(len(tensors)),
                ctypes.c_int64(len(rows.tensors())),
                *_numbers(counts),
                *_numbers([begin + part for part in self.parts]),
            )
        )


def _tensors(rows: Rows, batches: Batches, inputs: Any, targets: Any) -> list[Tensor]:
    """A step's arguments, in PyTorch's order."""
    return [*rows.tensors(), *rows.offset, *batches, *samples.tensors((inputs, targets))]


def _varying(rows: Rows, batches: Batches, inputs: Any, targets: Any) -> list[Group | None]:
    """What the first size of each argument counts; None if it is the same in every call."""
    by_row: list[Group | None] = ["rows"] * len(rows.tensors())
    tables: list[Group | None] = ["table", "table", *[None] * (len(batches) - 2)]
    data: list[Group | None] = ["samples"] * len(samples.tensors((inputs, targets)))
    offsets: list[Group | None] = ["offsets"] * len(rows.offset)
    return [*by_row, *offsets, *tables, *data]


def _numbers(values: list[int]) -> tuple[Any, Any]:
    return (ctypes.c_int64 * max(1, len(values)))(*values), ctypes.c_int64(len(values))


def _done(code: int) -> None:
    if code:
        raise RuntimeError("a compiled step failed; with compile=off it need not be compiled")


def _resized(tensor: Tensor, size: int) -> Tensor:
    """A tensor of zeros with the same memory layout, and another size in its first dimension."""
    if not size:
        return torch.zeros_like(tensor)
    shape, kind = (size, *tensor.shape[1:]), tensor.dtype
    return torch.empty_strided(shape, tensor.stride(), dtype=kind, device=tensor.device).zero_()


class Traced(NamedTuple):
    """A step as a graph of PyTorch's operations on its arguments, and on the tensors that all rows share."""

    graph: GraphModule
    shared: list[Tensor]
    parts: list[int]  # to which its products belong
    example: list[Tensor]  # arguments
    sizes: list[int]  # first ones, where they differ between calls; else 0


def traced(step: Step, rows: Rows, batches: Batches, inputs: Any, targets: Any) -> Traced:
    """A step traced for tensors of these types and shapes; an error if it fixes one of the varying sizes."""
    # PyTorch's compiler takes seconds to import.
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    varying = _varying(rows, batches, inputs, targets)
    sizes = [0 if group is None else SIZES[group] for group in varying]
    given = _tensors(rows, batches, inputs, targets)
    example = [_resized(t, n) for t, n in zip(given, sizes, strict=True)]
    _, structure = tree_flatten((rows, batches, inputs, targets))
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = []
    for i, (tensor, group) in enumerate(zip(example, varying, strict=True)):
        dynamic = [DimDynamic.STATIC] * tensor.ndim
        if group is not None:
            dynamic[0] = DimDynamic.DUCK  # equal sizes are one
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        fakes.append(mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(f"t{i}")))
    parts: list[int] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        left: dict[int, Product] = step(*tree_unflatten(list(tensors), structure))
        parts[:] = list(left)
        return [factor for product in left.values() for factor in product]

    def trace(contiguous: bool) -> GraphModule:
        with torch.no_grad(), tracing(contiguous=contiguous):
            return make_fx(flat, tracing_mode="symbolic")(*fakes)

    try:
        graph = trace(False)
    except RuntimeError:  # of a `view` in the user's module
        graph = trace(True)
    for fake, group in zip(fakes, varying, strict=True):
        size: Any = fake.shape[0] if group is not None else None
        if isinstance(size, torch.SymInt) and size.node.maybe_as_int() is not None:
            raise RuntimeError("one of its operations cannot be compiled for any number of models")
    return Traced(graph, _lift(graph), parts, example, sizes)


def _lift(graph: GraphModule) -> list[Tensor]:
    """Turns the constant tensors of a graph into arguments, and returns them."""
    shared: dict[str, tuple[Tensor, Any]] = {}
    last = next(node for node in reversed(graph.graph.nodes) if node.op == "placeholder")
    for node in graph.graph.find_nodes(op="get_attr"):
        tensor = getattr(graph, node.target)
        if not isinstance(tensor, Tensor):
            continue
        if node.target not in shared:
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"shared_{len(shared)}")
            last.meta = dict(node.meta)
            shared[node.target] = tensor.detach(), last
        node.replace_all_uses_with(shared[node.target][1])
        graph.graph.erase_node(node)
    graph.recompile()
    return [tensor for tensor, _ in shared.values()]


def _build(graph: GraphModule, example: list[Tensor], varying: list[int]) -> ctypes.CDLL:
    """The compiled graph."""
    shapes = [(str(t.dtype), tuple(t.shape), t.stride()) for t in example]
    described = graph.code, shapes, OPTIONS, torch.__version__

    def make(path: Path) -> None:
        build("/dev/null", path)  # of a compiler that does not work, PyTorch's does not say so
        with warnings.catch_warnings(), _private_inductor():
            warnings.simplefilter("ignore")
            _compile(graph, example, varying, path)

    return library(described, "AOTInductorModelContainerRunSingleThreaded", make)


def _driver() -> ctypes.CDLL:
    """What runs many steps of a compiled graph in one call."""
    libraries = Path(torch.__file__).parent / "lib"
    options = f"-L{libraries}", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"
    described = source(*DRIVER), torch.__version__
    return library(described, "take_steps", lambda path: build(DRIVER[0], path, *options))


def _compile(graph: GraphModule, example: list[Tensor], varying: list[int], path: Path) -> None:
    from torch.export import Dim, export

    dims = {size: Dim(group) for group, size in SIZES.items()}
    shapes = tuple({0: dims[n]} if n else None for n in varying)
    with torch.no_grad():
        program = export(graph, tuple(example), dynamic_shapes=shapes)
        package = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(path.with_suffix(".pt2")),
            inductor_configs={**OPTIONS},  # which it changes
        )
    with zipfile.ZipFile(package) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        path.write_bytes(archive.read(name))


@contextmanager
def _private_inductor() -> Iterator[None]:
    """Lets PyTorch's compiler use a private folder, with what earlier processes kept of theirs.

    Its own in /tmp has a name that others can guess, and what is there is used unchecked: precompiled
    headers, and libraries that probe the processor.
    """
    from torch._inductor import codecache, cpp_builder

    version = cpp_builder.get_compiler_version_info(cpp_builder.get_cpp_compiler())
    with cache.tools(named(("inductor", torch.__version__, version), "zip"), *KEPT) as folder:
        before = codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR, os.environ.get(INDUCTOR)
        headers = folder / "precompiled_headers"
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(headers), str(headers / "locks")
        os.environ[INDUCTOR] = str(folder)
        try:
            yield
        finally:
            codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR, own = before
            del os.environ[INDUCTOR]
            os.environ.update({INDUCTOR: own} if own else {})


def compiled_for_gpu(step: Step) -> Step:
    """A step compiled when it is first taken, for any number of rows and samples."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(INDUCTOR) in (None, default_cache_dir()):  # in /tmp, where others can write
        os.environ[INDUCTOR] = str(cache.private_folder("inductor"))
    chosen: Step | None = None

    def call(rows: Rows, batches: Batches, inputs: Any, targets: Any) -> dict[int, Product]:
        nonlocal chosen
        if chosen is None:
            try:
                chosen = _compiled(step, rows, batches, inputs, targets)
                return chosen(rows, batches, inputs, targets)
            except Exception as error:  # whatever the compiler makes of a user's module
                if chosen is not None and isinstance(error, RuntimeError) and out_of_memory(error):
                    raise
                why = f"the local step runs uncompiled, and slower: {first_line(error)}"
            warnings.warn(why, SlowPathWarning, stacklevel=2)
            chosen = step
        return chosen(rows, batches, inputs, targets)

    return call


def _compiled(step: Step, rows: Rows, batches: Batches, inputs: Any, targets: Any) -> Step:
    """A step traced for these arguments, to be compiled in its first call.

    It is traced as for a CPU, and PyTorch's compiler gets a graph of operations. Were it given the vectorised
    module, it would fix the number of rows for many layers, and take longer.
    """
    graph, shared, parts, *_ = traced(step, rows, batches, inputs, targets)
    given, varying = _tensors(rows, batches, inputs, targets), _varying(rows, batches, inputs, targets)
    for tensor, group in zip(given, varying, strict=True):
        if group is not None and len(tensor) > 1:
            torch._dynamo.mark_dynamic(tensor, 0)
    compiled, first = torch.compile(graph), True

    def call(rows: Rows, batches: Batches, inputs: Any, targets: Any) -> dict[int, Product]:
        nonlocal first
        arguments = [*_tensors(rows, batches, inputs, targets), *shared]
        if first:
            with torch.no_grad():
                left = compiled(*arguments)
            first = False
        else:
            # Calls differ only in the number of rows, and the code is compiled for any number. Checking
            # everything else on every call takes as long as a small step.
            try:
                with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                    left = compiled(*arguments)
            except RuntimeError as error:
                if "Recompilation triggered" not in str(error):
                    raise
                left = compiled(*arguments)
        return {part: Product(*left[2 * i : 2 * i + 2]) for i, part in enumerate(parts)}

    return call
