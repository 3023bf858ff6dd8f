"""Codecs on any vector: shapes, bounds of the error, and what is not finite."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fairwind import InputError, Settings, algorithms
from fairwind.codecs import BLOCK, CODECS, Codec, check_coded, codec_of, decoded

SPECS = ("bf16", "int8", "topk", "topk:share=0.3", "topk:share=1")
DTYPES = (torch.float32, torch.float64)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = st.one_of(
    st.lists(FLOATS, min_size=1, max_size=5),
    st.lists(FLOATS, min_size=BLOCK - 1, max_size=2 * BLOCK + 1),
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 1e-45, 3.4e38]), min_size=1, max_size=300),
)


def test_every_codec_is_tested() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == set(CODECS)


def sent(codec: Codec, v: Tensor) -> Tensor:
    return decoded(codec, codec.encode(v), v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
@given(numbers=VECTORS)
def test_what_arrives_is_finite_and_as_long_as_what_was_sent(
    spec: str, dtype: torch.dtype, numbers: list[float]
) -> None:
    codec, v = codec_of(spec), torch.tensor(numbers, dtype=dtype)
    parts = codec.encode(v)
    form = codec.form(len(v))
    assert {n: (p.dtype, p.shape) for n, p in parts.items()} == {
        n: (dtype if kind is None else kind, (length,)) for n, (kind, length) in form.items()
    }
    size = sum(part.nbytes for part in parts.values())
    assert size == codec.bytes(len(v), v.element_size())
    found = sent(codec, v)
    assert found.dtype == v.dtype
    assert found.shape == v.shape
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("spec", SPECS)
@given(numbers=VECTORS)
def test_rows_arrive_as_they_do_alone(spec: str, numbers: list[float]) -> None:
    codec, v = codec_of(spec), torch.tensor(numbers)
    rows = torch.stack([v, v.flip(0), -v, torch.zeros_like(v)])
    assert torch.equal(codec.rounded(rows), torch.stack([sent(codec, row) for row in rows]))


@given(numbers=VECTORS)
def test_bf16_is_pytorchs_rounding(numbers: list[float]) -> None:
    v = torch.tensor(numbers)
    expected = v.bfloat16().float()
    fits = torch.isfinite(expected)
    assert torch.equal(sent(codec_of("bf16"), v)[fits], expected[fits])
    error = (sent(codec_of("bf16"), v).double() - v.double()).abs()
    assert (error <= v.double().abs() * 2**-8 + 2**-133).all()


@given(numbers=VECTORS)
def test_int8_is_off_by_half_a_step_of_its_block(numbers: list[float]) -> None:
    v = torch.tensor(numbers)
    found = sent(codec_of("int8"), v)
    for one, other in zip(torch.split(v.double(), BLOCK), torch.split(found.double(), BLOCK), strict=True):
        step = float(one.abs().max()) / 127
        least = 127 * 2**-149  # where steps are subnormal, they are rounded too
        assert float((one - other).abs().max()) <= step / 2 * (1 + 1e-5) + least


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
@given(numbers=VECTORS)
def test_topk_sends_the_largest_and_nothing_else(share: float, numbers: list[float]) -> None:
    v = torch.tensor(numbers)
    k = max(1, round(share * len(v)))
    parts = codec_of(f"topk:share={share}").encode(v)
    best = sorted(range(len(v)), key=lambda i: (-abs(numbers[i]), i))[:k]
    assert parts["places"].tolist() == sorted(best)
    found = sent(codec_of(f"topk:share={share}"), v)
    assert torch.equal(found[sorted(best)], v[sorted(best)])
    assert int((found != 0).sum()) <= k


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("length", [1, 3, BLOCK, BLOCK + 1])
def test_what_is_not_finite_stays_so(spec: str, bad: float, length: int) -> None:
    codec, v = codec_of(spec), torch.ones(length)
    v[-1] = bad
    assert not torch.isfinite(sent(codec, v)).all()
    assert not torch.isfinite(codec.rounded(v[None])).all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("length", [1, 2, BLOCK + 3])
def test_zeros_arrive_as_zeros(spec: str, length: int) -> None:
    assert not sent(codec_of(spec), torch.zeros(length)).any()


@pytest.mark.parametrize("spec", ["bf16", "int8", "topk", "topk:share=0.1"])
def test_with_its_error_added_to_the_next_a_repeated_update_arrives_whole(spec: str) -> None:
    """The sum of what arrives lags behind by one error, whatever the number of rounds."""
    codec, update = codec_of(spec), torch.randn(1000, generator=torch.Generator().manual_seed(0)).double()
    total, error, errors = torch.zeros_like(update), torch.zeros_like(update), []
    for _ in range(400):
        arrived = sent(codec, update + error)
        total, error = total + arrived, update + error - arrived
        errors.append(float(error.norm()))
    torch.testing.assert_close(total, 400 * update - error, rtol=0, atol=1e-8)
    assert max(errors[200:]) <= 1.1 * max(errors[:200])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int4", "codec 'int4'"),
        ("topk:share=0", "share=0.0 is out of range"),
        ("topk:share=2", "share=2.0 is out of range"),
        ("topk:k=3", "parameter"),
        ("int8:share=1", "parameter"),
    ],
)
def test_codecs_that_there_are_not_are_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings(codec=spec)


def test_a_codec_has_one_name() -> None:
    assert Settings(codec="topk:share=0.01").codec == Settings(codec="topk").codec == "topk"
    assert [codec_of(name).name for name in CODECS] == list(CODECS)


@pytest.mark.parametrize(("spec", "refused"), [("scaffold", True), ("mime", True), ("mimelite", True)])
def test_types_with_a_second_vector_are_refused(spec: str, refused: bool) -> None:
    with pytest.raises(InputError, match="leave out codec"):
        check_coded(algorithms.build(spec))


def test_types_that_send_updates_alone_are_taken() -> None:
    taken = [name for name in algorithms.REGISTRY if not _refused(algorithms.build(name))]
    refused = {"scaffold", "feddyn", "mime", "mimelite"}
    assert set(algorithms.REGISTRY) - set(taken) == refused


def _refused(algorithm: Any) -> bool:
    try:
        check_coded(algorithm)
    except InputError:
        return True
    return False


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"places": [-1, 2], "values": [1.0, 2.0]}, "not in order"),
        ({"places": [1, 1], "values": [1.0, 2.0]}, "not in order"),
        ({"places": [2, 1], "values": [1.0, 2.0]}, "not in order"),
        ({"places": [1, 10], "values": [1.0, 2.0]}, "not in order"),
    ],
)
def test_places_that_lie_are_refused(parts: dict[str, Any], message: str) -> None:
    made = {
        "places": torch.tensor(parts["places"], dtype=torch.int32),
        "values": torch.tensor(parts["values"]),
    }
    with pytest.raises(ValueError, match=message):
        decoded(codec_of("topk:share=0.2"), made, torch.zeros(10))
