"""About how long a local step takes on a CPU, in either executor.

From counts instead of measurements, so that the same task is always trained in the same way. The constants
are fits to measured steps of small and middle-sized modules, and seconds of a core of a server; only their
ratios matter. `benchmarks/zoo_speed.py` compares the executor that is chosen with a plain loop.
"""

from fairwind.engine.plain import PlainModel
from fairwind.engine.stacked.model import StackedModel

# Numbers of a chunk for each operation of an uncompiled step: with so many, launching an operation takes
# about a quarter of its time.
LAUNCHED = 1 << 14


def loop_seconds(plain: PlainModel, batch_size: int, workers: int) -> float:
    """Of a client that trains by itself."""
    # Functional dropout is replaced in a mode that slows down every call.
    launch = 9e-6 if plain.randomness == "functional" else 5e-6
    around = 134e-6 + launch * plain.counts.operations
    kernels = plain.kernel_seconds(batch_size)
    return (around + kernels) * (0.2 + 0.8 / workers if plain.fills_a_core(batch_size) else 1)


def stacked_seconds(
    stacked: StackedModel, plain: PlainModel, batch_size: int, rows: int, workers: int, *, compiled: bool
) -> float:
    """Of one row, if so many train at once."""
    numbers, parameters = 2 * batch_size * stacked.per_sample, plain.layout.parameters
    work = 3.9e-9 * numbers + _work(plain, batch_size)
    shared = rows * (numbers + 5 * parameters) >= LAUNCHED * stacked.operations  # among workers
    if compiled or shared:
        work *= _among(workers)
    return work if compiled else work + 22e-6 * stacked.operations / rows


def least_stacked_seconds(plain: PlainModel, batch_size: int, workers: int) -> float:
    """Of one row at least, whatever stacking it takes: trying that is expensive for a large model."""
    return _work(plain, batch_size) * _among(workers)


def _work(plain: PlainModel, batch_size: int) -> float:
    return 1.3e-9 * plain.layout.parameters + 6e-12 * plain.operations(batch_size)


def _among(workers: int) -> float:
    return 0.4 + 0.6 / workers
