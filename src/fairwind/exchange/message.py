"""What a server asks and a client replies, as plain arrays and numbers; and the checks on arrival."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairwind.algorithms import NEEDS
from fairwind.codecs import Codec, check_coded, codec_of, decoded
from fairwind.contract import (
    Algorithm,
    AnyAlgorithm,
    GradientAlgorithm,
    LocalAlgorithm,
    MemoryAlgorithm,
    PersonalAlgorithm,
    Probe,
    Report,
    SumAlgorithm,
)
from fairwind.engine.layout import Division, Layout
from fairwind.engine.loop.learner import norm
from fairwind.errors import InputError, printable, shown

Sends = Literal["report", "sums"]
Phase = Literal["gradient", "scales", "train", "evaluate"]  # scales: before a first secure sum
SummedAlgorithm = Algorithm[Any, Any] | LocalAlgorithm[Any, Any]
Arrays = dict[str, NDArray[Any]]

# The names of what a server sends: vectors of the model's shape. The model; what is added to every step; the
# clients' mean gradient; the first model; and a further model to evaluate.
WEIGHTS, SHARED, GRADIENT, FIRST_MODEL, AVERAGED = "weights", "shared", "gradient", "first", "averaged"

MEASURED: dict[Probe, tuple[str, ...]] = {
    "none": (),
    "loss": ("loss", "loss0"),
    "gradient": ("loss", "loss0", "grad_norm"),
}
FIRST = ("first_loss", "first_losses")  # Σ F_k(x_0), and of how many clients, for those that join late
OWN = "own/"  # begins the names of what a client keeps of the model, beside its memory
LOST = "lost"  # the round whose memory or personal model a client has no longer
_NUMPY = {torch.int8: np.dtype(np.int8), torch.int16: np.dtype(np.int16), torch.int32: np.dtype(np.int32)}
POSITIVE = ("size", "steps", "lr")
NAMED = 4  # of names that are wrong, at most


class RefusedError(ValueError):
    """A reply cannot be used; the message says why, in one short line, whatever a client wrote into it."""

    def __init__(self, why: str):
        super().__init__(printable(why, 200, 60))


def told_of(error: Exception) -> str:
    """What a client tells of an error: why it refuses; else the type alone, because texts may quote data."""
    return str(error) if isinstance(error, RefusedError) else type(error).__name__


class Tag(NamedTuple):
    """Which request a reply answers."""

    training: str
    round: int
    phase: Phase

    def check(self, asked: "Tag") -> None:
        """Refuses a reply to another request than the one that is under way."""
        if self.training != asked.training:
            raise RefusedError("it answers a request of another training")
        if self != asked:
            raise RefusedError(f"it answers {self}, and this is {asked}")

    def __str__(self) -> str:
        if self.phase == "evaluate":
            return f"the evaluation after round {self.round}"
        what = {"gradient": "gradients", "scales": "scales", "train": "training"}[self.phase]
        return f"the {what} of round {self.round + 1}"


class Request(NamedTuple):
    """What a client is asked to do, and told."""

    phase: Phase
    round: int  # from 0
    training: str  # a name that no other training has
    vectors: dict[str, Arrays]  # by name, each as arrays by the names of the model's parameters
    first_loss: float | None = None  # for a client that does not remember its own
    kept: int | None = None  # the last round that counted of this client, whose memory it goes on from

    @property
    def tag(self) -> Tag:
        """What replies to it carry."""
        return Tag(self.training, self.round, self.phase)


class Reply(NamedTuple):
    """What a client sends: arrays by the names of the model's parameters, and numbers by theirs."""

    arrays: Arrays  # the update
    numbers: dict[str, float]
    second: Arrays | None = None  # a further vector, for the types of algorithm that ask for one
    tag: Tag | None = None  # none from a training loop of one's own: then its age is not checked

    @property
    def bytes(self) -> int:
        """Of its vectors; a reply made to break its reader may have something else."""
        vectors = [each for each in (self.arrays, self.second) if isinstance(each, dict)]
        arrays = (array for each in vectors for array in each.values())
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


class Bytes(NamedTuple):
    """Bytes of the vectors in all messages of a training."""

    up: int = 0  # from clients
    down: int = 0  # to clients, to train
    evaluation: int = 0  # to clients, to evaluate

    def plus(self, up: int = 0, down: int = 0, evaluation: int = 0) -> "Bytes":
        return Bytes(self.up + up, self.down + down, self.evaluation + evaluation)

    def named(self) -> dict[str, int]:
        """As in results."""
        return {f"bytes_{name}": count for name, count in self._asdict().items()}


class Form(NamedTuple):
    """The format of replies."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]  # float64 where the model's parameters are, else float32
    numbers: tuple[str, ...]
    optional: tuple[str, ...] = ()
    codec: Codec | None = None  # of updates

    def update(self, arrays: Mapping[str, Any]) -> tuple[Tensor, float]:
        """The update in a reply, as `vector` reads it, or in the numbers of the codec."""
        if self.codec is None:
            return self.vector(arrays)
        count = sum(math.prod(shape) for shape in self.shapes)
        zeros = torch.from_numpy(np.zeros(count, self.dtype))
        parts = {
            name: (_NUMPY[kind] if kind else self.dtype, (length,))
            for name, (kind, length) in self.codec.form(count).items()
        }
        self._check(arrays, parts, "the codec's")
        try:
            vector = decoded(self.codec, {name: torch.from_numpy(arrays[name]) for name in parts}, zeros)
        except ValueError as error:
            raise RefusedError(str(error)) from None
        finite = bool(torch.isfinite(vector).all())
        return vector, _norm(vector, [] if finite else ["an update"])

    def _check(
        self, arrays: Mapping[str, Any], wanted: Mapping[str, tuple[Any, tuple[int, ...]]], whose: str
    ) -> None:
        """Refuses arrays of other names, types or shapes."""
        if set(arrays) != set(wanted):
            raise RefusedError(f"its arrays are not {whose}: {_difference(arrays, tuple(wanted))}")
        for name, (dtype, shape) in wanted.items():
            array = arrays[name]
            if not isinstance(array, np.ndarray):
                raise RefusedError(f"{name!r} is no array but a {type(array).__name__}")
            if array.dtype != dtype:
                raise RefusedError(f"{name!r} is of type {array.dtype}, not {dtype}")
            if array.shape != shape:
                raise RefusedError(f"{name!r} is of shape {array.shape}, not {shape}")

    def vector(self, arrays: Mapping[str, Any]) -> tuple[Tensor, float]:
        """Arrays as one new vector (P,), checked; and its norm."""
        wanted = {name: (self.dtype, shape) for name, shape in zip(self.names, self.shapes, strict=True)}
        self._check(arrays, wanted, "the model's")
        vector = torch.from_numpy(np.concatenate([arrays[name].reshape(-1) for name in self.names]))
        wrong = (repr(name) for name in self.names if not np.isfinite(arrays[name]).all())
        return vector, _norm(vector, wrong)

    def checked(self, numbers: Mapping[str, Any]) -> dict[str, float]:
        """Numbers, checked to be complete and finite."""
        known = set(numbers) | set(self.optional)
        if known != {*self.numbers, *self.optional}:
            wrong = _difference(known, (*self.numbers, *self.optional))
            raise RefusedError(f"its numbers are not those asked for: {wrong}")
        found = {}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RefusedError(f"its {name} is no number but {shown(value)}")
            try:
                found[name] = float(value)
            except OverflowError:
                found[name] = math.inf
            if not math.isfinite(found[name]):
                raise RefusedError(f"its {name} is {found[name]}, which is not finite")
            if name in POSITIVE and found[name] <= 0:
                raise RefusedError(f"its {name} is {found[name]:g}, which is not positive")
            if name == "grad_norm" and found[name] < 0:
                raise RefusedError(f"its {name} is {found[name]:g}, which is negative")
        return found

    def arrays(self, vector: Tensor) -> Arrays:
        """A vector (P,) by the parameters' names."""
        if not self.names:
            return {}
        flat = vector.detach().cpu().numpy().astype(self.dtype, copy=False)
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        parts = zip(self.names, self.shapes, np.split(flat, ends[:-1]), strict=True)
        return {name: part.reshape(shape) for name, shape, part in parts}


def report_form(layout: Layout, probe: Probe, *, keeps: bool = False, codec: Codec | None = None) -> Form:
    """That of replies with an update and a report; a solver whose steps are not gradients has no `steps`.

    Clients that keep a vector may have to say that they have lost it.
    """
    optional = ("steps", LOST) if keeps or codec else ("steps",)
    return _form(layout, ("size", "lr", *MEASURED[probe]), optional)._replace(codec=codec)


def gradient_form(layout: Layout) -> Form:
    """That of replies with a full gradient alone, before training."""
    return _form(layout, ("size",))


def sums_form(layout: Layout, algorithm: SummedAlgorithm) -> Form:
    """That of replies with coef·δ and sums."""
    first = FIRST if algorithm.probe != "none" else ()
    return _form(layout, (*sums_record(algorithm)._fields, *first))


def _form(layout: Layout, numbers: tuple[str, ...], optional: tuple[str, ...] = ()) -> Form:
    dtype = np.dtype(np.float64 if layout.dtype == torch.float64 else np.float32)
    return Form(layout.names, tuple(map(tuple, layout.shapes)), dtype, numbers, optional)


def sums_record(algorithm: SumAlgorithm) -> Any:
    """The type of an algorithm's sums, a NamedTuple."""
    one = torch.ones((), dtype=torch.float64)
    return type(algorithm.client(Report(*[one] * len(Report._fields))).sums)


def _norm(vector: Tensor, wrong: Iterable[str]) -> float:
    """The norm of a vector; refuses the first thing in it that is not finite."""
    length = float(norm([vector]))
    if math.isfinite(length):
        return length
    for what in wrong:  # large numbers may be finite all the same
        raise RefusedError(f"{what} has numbers that are not finite")
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def array_bytes(*vectors: Arrays | None) -> int:
    """What arrays take on the wire."""
    return sum(array.nbytes for arrays in vectors for array in (arrays or {}).values())


def arrays_of(layout: Layout, x: Tensor) -> Arrays:
    """A model's parameters x (P,) by their names, as they are sent to clients."""
    return _form(layout, ()).arrays(x)


def vector_of(layout: Layout, arrays: Mapping[str, Any]) -> Tensor:
    """The vector (·,) of some of a model's tensors, whose arrays are among those given."""
    form = _form(layout, ())
    return form.vector({name: arrays[name] for name in form.names if name in arrays})[0]


def check_statistics(
    division: Division, sends: Sends, codec: str | None = None, *, private: bool = False
) -> None:
    """Refuses statistics of batch norm that a real federation cannot average."""
    if division.recomputes:
        raise InputError(
            'batch_norm="recomputed" needs the samples of all clients after training: in a real federation '
            'take "shared" or "local"'
        )
    if division.averaged_part.names and codec is not None:
        raise InputError('batch_norm="shared" sends statistics, which no codec is for: leave out codec')
    if division.averaged_part.names and private:
        raise InputError(
            'batch_norm="shared" sends statistics, which privacy neither clips nor adds noise to: take '
            'batch_norm="local", "frozen" or "group"'
        )
    if division.averaged_part.names and sends == "sums":
        raise InputError(
            'batch_norm="shared" averages statistics beside the one sum: take "local" or sends="report"'
        )


def keeps(algorithm: AnyAlgorithm) -> bool:
    """Whether clients keep a vector between rounds."""
    return isinstance(algorithm, MemoryAlgorithm | PersonalAlgorithm)


def corrects(algorithm: AnyAlgorithm) -> bool:
    """Whether local steps are corrected by the clients' mean gradient, which is measured before them."""
    return isinstance(algorithm, GradientAlgorithm) and algorithm.corrected


def second_vector(algorithm: AnyAlgorithm) -> str:
    """What clients send with their updates, in words; nothing for most algorithms."""
    if isinstance(algorithm, MemoryAlgorithm):
        return "change of memory"
    return "gradient" if isinstance(algorithm, GradientAlgorithm) and not corrects(algorithm) else ""


def codec_for(spec: str, algorithm: AnyAlgorithm, sends: Sends) -> Codec:
    """The codec of an algorithm's updates; refuses those that it cannot be for."""
    check_coded(algorithm)
    if sends == "sums":
        raise InputError('a codec is for updates, and not for sums: take sends="report", or leave out codec')
    return codec_of(spec)


def check_one_sum(algorithm: AnyAlgorithm, what: str) -> SummedAlgorithm:
    """Refuses algorithms that need more than one sum where replies have no more: `what` says where."""
    if isinstance(algorithm, Algorithm | LocalAlgorithm):
        return algorithm
    raise InputError(
        f"{algorithm.name or type(algorithm).__name__} needs {NEEDS[type(algorithm)]}, and {what}: "
        'take an algorithm of one sum, or sends="report" without privacy or secure aggregation'
    )


def to_report(numbers: Mapping[str, float], update_norm: float) -> Report:
    """The report of checked numbers; what was not measured is NaN."""
    given = {**numbers, "update_norm": update_norm}
    return Report(*(torch.tensor(given.get(f, math.nan), dtype=torch.float64) for f in Report._fields))


def from_report(report: Report, form: Form) -> dict[str, float]:
    """The numbers of a report that a form asks for."""
    names = [name for name in (*form.numbers, *form.optional) if name in Report._fields]
    found = {name: float(getattr(report, name)) for name in names}
    return {name: value for name, value in found.items() if not (name in form.optional and math.isnan(value))}


def read_tag(training: Any, round: Any, phase: Any) -> Tag:
    """The tag that a message carries."""
    whole = isinstance(round, int) and not isinstance(round, bool) and abs(round) < 2**53
    if not isinstance(training, str) or not whole or phase not in get_args(Phase):
        raise RefusedError("it does not say which request it answers")
    return Tag(training, round, phase)


def _difference(given: Any, wanted: tuple[str, ...]) -> str:
    def some(names: list[str]) -> Iterator[str]:
        yield from (shown(name) for name in names[:NAMED])
        if len(names) > NAMED:
            yield "…"

    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    parts = (
        f"{', '.join(some(names))} {what}" for names, what in ((missing, "missing"), (unknown, "unknown"))
    )
    return "; ".join(part for part, names in zip(parts, (missing, unknown), strict=True) if names)
