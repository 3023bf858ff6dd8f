"""Files made to break a reader: each ends in one line that names the file, and takes no memory on the way."""

import io
import json
import os
import pickle
import resource
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import save

import layouts
from command import succeeded
from fairwind import Federation, InputError, setups
from fairwind.data import store
from fairwind.data.source import Samples, distinct
from fairwind.setups import Where
from samples import as_tensor


def refusal(make: Callable[[], Any]) -> str:
    """What is said of something that must be refused, in one line."""
    with pytest.raises(InputError) as caught:
        make()
    message = str(caught.value)
    assert len(message) < 2000
    assert message.isprintable()
    return message


def read(spec: str, folder: Path) -> Federation:
    return setups.federation(spec, Where(folder, None, folder / "cache"))


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Two GiB more than there is now, and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    before = resource.getrlimit(resource.RLIMIT_AS)
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


# ---- LEAF's JSON ----

X = [0.0] * 784
TWEET = ["0", "date", "query", "ann", "text"]


def user(x: Any, y: Any = (1,), **other: Any) -> str:
    """A file of one user; "@" stands for a number that json.dumps would not write."""
    return json.dumps({"users": ["w"], "num_samples": [1], "user_data": {"w": {"x": x, "y": y}}} | other)


BAD_JSON = {
    "nested lists": ("[" * 100_000, "is no JSON (maximum recursion depth"),
    "nested objects": ('{"a":' * 100_000, "is no JSON (maximum recursion depth"),
    "a list": ("[1]", "has no 'users'"),
    "a string": ('"users num_samples user_data"', "has no 'users'"),
    "nothing": ("", "is no JSON"),
    "users that are lists": (user([X], users=[["w"]]), "user 0: ['w'] names no owner"),
    "users that are objects": (user([X], users=[{}]), "user 0: {} names no owner"),
    "users that are numbers": (user([X], users=[7]), "user 0: 7 names no owner"),
    "half a character": (user([X], users=["\ud800"]), r"user 0: '\ud800' names no owner"),
    "a user without a name": (user([X], users=[""]), "user 0: '' names no owner"),
    "a user twice": (user([X], users=["w", "w"], num_samples=[1, 1]), "users, 2 of them, are not those of"),
    "counts that are strings": (user([X], num_samples=["1"]), "num_samples says '1'"),
    "user_data that is a list": (user([X], user_data=["w"]), "user_data is no object"),
}
BAD_PIXELS = {
    "1e400": (user([["@", *X[1:]]]).replace('"@"', "1e400"), "pixels lie outside 0 to 1"),
    "10^400": (user([["@", *X[1:]]]).replace('"@"', str(10**400)), "pixels lie outside 0 to 1"),
    "10^5000": (user([["@", *X[1:]]]).replace('"@"', "1" * 5000), "is no JSON"),
    "NaN": (user([[float("nan"), *X[1:]]]), "pixels lie outside 0 to 1"),
    "numbers in strings": (user([["0.5"] * 784]), "x does not hold numbers"),
    "null": (user([[None] * 784]), "x does not hold numbers"),
    "a long string": (user([["a" * 1_000_000, *X[1:]]]), "x does not hold numbers"),
    "an object": (user([{"a": 1}]), "x does not hold numbers"),
    "a label in a string": (user([X], ["1"]), "label '1' is not one of 0 to 61"),
    "a label with a point": (user([X], [1.0]), "label 1.0 is not one of"),
    "a negative label": (user([X], [-1]), "label -1 is not one of"),
    "a large label": (user([X], [10**400]), "label 1000"),
    "a list of labels": (user([X], [[1]]), "label [1] is not one of"),
}
BAD_TWEETS = {
    "text that is a number": (user([[*TWEET[:4], 5]]), "sample 0: 5 is no text of a tweet"),
    "x that is a string": (user(["id, date, query"]), "sample 0: x is not id, date, query, user, text"),
    "a negative label": (user([TWEET], [-1]), "label -1 is not 0 or 1"),
    "a list of labels": (user([TWEET], [[1]]), "label [1] is not 0 or 1"),
}


@pytest.mark.parametrize(
    ("spec", "content", "expected"),
    [
        pytest.param(spec, *bad, id=f"{spec}: {name}")
        for spec, cases in (("femnist", BAD_JSON | BAD_PIXELS), ("sent140", BAD_JSON | BAD_TWEETS))
        for name, bad in cases.items()
    ],
)
def test_json_of_the_wrong_kind_is_one_line(tmp_path: Path, spec: str, content: str, expected: str) -> None:
    (tmp_path / "all_data_0.json").write_text(content)
    message = refusal(lambda: read(spec, tmp_path))
    assert "all_data_0.json" in message
    assert expected in message


# ---- parquet ----


def with_column(folder: Path, column: str, values: Callable[[int], pa.Array]) -> None:
    layouts.femnist_parquet(folder)
    file = folder / "data" / "train-00000-of-00002.parquet"
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.column_names.index(column), column, values(len(table))), file)


@pytest.mark.parametrize("column", ["image", "writer_id", "character"])
@pytest.mark.parametrize(
    "values",
    [
        lambda n: pa.array([2**30] * n, pa.date32()),  # a day that Python has no date for
        lambda n: pa.array([2**62] * n, pa.time64("us")),
        lambda n: pa.array([1.5] * n),
        lambda n: pa.array([-1] * n),
        lambda n: pa.array([[1]] * n),
        lambda n: pa.array([None] * n),
    ],
    ids=["date", "time", "float", "negative", "list", "null"],
)
def test_a_column_of_another_type_is_one_line(tmp_path: Path, column: str, values: Any) -> None:
    with_column(tmp_path, column, values)
    assert "train-00000-of-00002.parquet, " in refusal(lambda: read("femnist", tmp_path))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1"])
def test_what_is_no_parquet_is_one_line(tmp_path: Path, content: bytes) -> None:
    layouts.femnist_parquet(tmp_path)
    (tmp_path / "data" / "train-00001-of-00002.parquet").write_bytes(content)
    message = refusal(lambda: read("femnist", tmp_path))
    assert "train-00001-of-00002.parquet" in message
    assert "download it again" in message


def test_sentiments_that_are_lists_are_one_line(tmp_path: Path) -> None:
    file = next(layouts.sent140_parquet(tmp_path).rglob("*.parquet"))
    table = pq.read_table(file)
    lists = pa.array([[4]] * len(table))
    pq.write_table(table.set_column(table.column_names.index("sentiment"), "sentiment", lists), file)
    assert "0000.parquet, row 0: sentiment [4] is not 0" in refusal(lambda: read("sent140", tmp_path))


# ---- pictures ----


def encoded(format: str, size: tuple[int, int] = (28, 28)) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", size).save(buffer, format)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size, and has next to no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        (POSTSCRIPT, "no readable image (it is neither PNG nor JPEG)"),
        (encoded("GIF"), "no readable image (it is neither PNG nor JPEG)"),
        (encoded("TIFF"), "no readable image (it is neither PNG nor JPEG)"),
        (encoded("PNG")[:-30], "no readable image"),
        (b"", "no readable image (it is neither PNG nor JPEG)"),
        (png_header(60_000, 60_000), "no readable image (Image size (3600000000 pixels) exceeds limit"),
        (png_header(12_000, 10_000), "the image is 10000×12000, not 28×28"),  # Pillow would only warn
        (png_header(28, 2**31 - 1), "no readable image"),
        (png_header(28, 29), "the image is 29×28, not 28×28"),
    ],
    ids=["eps", "gif", "tiff", "cut", "nothing", "huge", "large", "high", "other"],
)
@pytest.mark.usefixtures("little_memory")
def test_only_small_png_and_jpeg_are_decoded(tmp_path: Path, picture: bytes, expected: str) -> None:
    with_column(tmp_path, "image", lambda n: pa.array([{"bytes": picture, "path": None}] * n, layouts.IMAGE))
    message = refusal(lambda: read("femnist", tmp_path))
    assert f"train-00000-of-00002.parquet, row 0: {expected}" in message


def test_jpeg_is_read(tmp_path: Path) -> None:
    cell = {"bytes": encoded("JPEG"), "path": None}
    with_column(tmp_path, "image", lambda n: pa.array([cell] * n, layouts.IMAGE))
    assert len(read("femnist", tmp_path)) == 3


# ---- batches and tweets ----


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({b"data": [[0] * 3072], b"labels": [1]}, "data is no array"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": 1}, "labels are no list"),
        (
            {b"data": np.zeros((1, 3072), np.uint8), b"labels": [10**5000]},
            "row 0: label a number of thousands",
        ),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [-1]}, "row 0: label -1 is not one of"),
        ({b"data": np.zeros((1, 3072)), b"labels": [1]}, "data is float64"),
        ([], "is no batch of CIFAR-10's python version"),
    ],
)
def test_batches_of_the_wrong_kind_are_one_line(tmp_path: Path, batch: Any, expected: str) -> None:
    layouts.cifar_batches(tmp_path)
    file = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    file.write_bytes(pickle.dumps(batch, protocol=2))
    message = refusal(lambda: read("cifar10", tmp_path))
    assert "data_batch_1" in message
    assert expected in message


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", b"1" * 5000 + b",id,date,flag,ann,text\n", "line 1: sentiment '111"),
        ("a.csv", b"0,id,date,flag,ann," + b"t" * 200_000, "is damaged (field larger than"),
        ("a.csv", b"", "hold no samples"),
        ("a.csv.gz", b"\x1f\x8b", "a.csv.gz, line 1, or soon after it, is damaged"),
        ("a.csv.xz", b"", "a.csv.xz, line 1, or soon after it, is damaged"),
        ("a.csv.bz2", b"BZh9xxxx", "a.csv.bz2, line 1, or soon after it, is damaged"),
    ],
)
def test_bad_tweets_are_one_line(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert expected in refusal(lambda: read("sent140", tmp_path))


def test_vectors_beyond_float32_are_one_line(tmp_path: Path) -> None:
    folder = layouts.glove(layouts.sent140_csv(tmp_path), ["sad 1e39 1"])
    assert "glove.6B.3d.txt, line 1: the vector is not finite" in refusal(lambda: read("sent140", folder))


# ---- a folder of client files ----


def claiming(dtype: Any, shape: tuple[int, ...], method: int = zipfile.ZIP_STORED) -> bytes:
    """An .npz whose arrays claim a type and shape, and hold 16 bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name in ("inputs", "targets"):
            content = io.BytesIO()
            header = {"descr": dtype, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(content, header)
            archive.writestr(f"{name}.npy", content.getvalue() + bytes(16))
    return buffer.getvalue()


def lone_array(shape: tuple[int, ...]) -> bytes:
    content = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(content, header)
    return content.getvalue()


def archive_that_lies_of_its_size() -> bytes:
    """As `claiming`, where the archive too says that 8·10^9 bytes are there, in both of its places."""
    small = claiming("<f8", (10**9,))
    with zipfile.ZipFile(io.BytesIO(small)) as archive:
        size = struct.pack("<I", archive.getinfo("inputs.npy").file_size)
    return small.replace(size, struct.pack("<I", 0xFFFFFFF0))


def objects() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, inputs=np.array([{}], dtype=object), targets=np.zeros(1))
    return buffer.getvalue()


def safetensors_of(**tensors: tuple[str, list[int], int]) -> bytes:
    at, header = 0, {}
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(min(at, 64))


LABELS = ("I64", [2], 16)
CLIENT_FILES = {
    "10^12 numbers": ("a.npz", claiming("<f8", (10**12,)), "inputs.npy claims the shape (1000000000000,)"),
    "10^12, packed": ("a.npz", claiming("<f8", (10**12,), zipfile.ZIP_LZMA), "inputs.npy claims the shape"),
    "10^30 numbers": ("a.npz", claiming("<f8", (10**15, 10**15)), "inputs.npy claims the shape"),
    "a false size": ("a.npz", archive_that_lies_of_its_size(), "a.npz cannot be read"),
    "less than none": ("a.npz", claiming("<f8", (-2,)), "a.npz cannot be read"),
    "no array file": ("a.npz", lone_array((10**12,)), "a.npz cannot be read (File is not a zip file)"),
    "objects": ("a.npz", objects(), "a.npz cannot be read: inputs.npy holds object"),
    "empty types": ("a.npz", claiming("|V0", (10**12,)), "inputs.npy holds |V0"),
    "records": ("a.npz", claiming([("a", "<f4")], (4,)), "a.npz cannot be read: inputs.npy holds"),
    "complex": ("a.npz", claiming("<c16", (1,)), "inputs.npy holds complex128"),
    "a pickle": ("a.npz", b"cos\nsystem\n(S'touch ran'\ntR.", "a.npz cannot be read"),
    "no bytes": ("a.npz", b"", "a.npz cannot be read"),
    "cut": ("a.npz", claiming("<f8", (2,))[:-40], "a.npz cannot be read"),
    "10^12 in safetensors": (
        "a.safetensors",
        safetensors_of(inputs=("F32", [10**12], 4 * 10**12), targets=LABELS),
        "a.safetensors cannot be read",
    ),
    "a long header": ("a.safetensors", struct.pack("<Q", 2**60) + b"{}", "a.safetensors cannot be read"),
    "a deep header": (
        "a.safetensors",
        struct.pack("<Q", 50_000) + b"[" * 50_000,
        "a.safetensors cannot be read",
    ),
    "a safetensors file cut": (
        "a.safetensors",
        save({"inputs": torch.zeros(9, 2), "targets": torch.zeros(9)})[:-7],
        "a.safetensors cannot be read",
    ),
    "float8": (
        "a.safetensors",
        safetensors_of(inputs=("F8_E8M0", [2], 2), targets=LABELS),
        "inputs are torch.float8_e8m0fnu; save them as float32",
    ),
    "a number too long": (
        "a.csv",
        b"x,target\n" + b"1" * 200_000 + b",1\n",
        "a.csv cannot be read (field larger",
    ),
    "text": ("a.csv", b"x,age,target\n1,2,0\n1,old,1\n", "a.csv, line 3: age is 'old', not a number"),
    "long text": ("a.csv", b"x,target\n" + b"y" * 100_000 + b",1\n", "a.csv, line 2: x is 'yyy"),
    "NUL": ("a.csv", b"x,target\n\x00,1\n", r"a.csv, line 2: x is '\x00', not a number"),
    "beyond float32": ("a.csv", b"x,target\n1e39,1\n", "client 'a': inputs of sample 0 hold NaN or infinity"),
    "UTF-16": ("a.csv", "x,target\n1,1\n".encode("utf-16"), "a.csv cannot be read"),
    "two targets": ("a.csv", b"target,target\n1,1\n", "a.csv has several columns 'target'"),
    "a header with escapes": ("a.csv", b'"x\n\x1b[31m",y\n1,1\n', r"it has x\n\x1b[31m, y"),
    "an empty table": ("a.csv", b"", "a.csv has no column 'target'"),
    "a name with escapes": ("a\n\x1b[31m.csv", b"x\n1\n", r"a\n\x1b[31m.csv has no column 'target'"),
}


@pytest.mark.parametrize("case", CLIENT_FILES)
@pytest.mark.usefixtures("little_memory")
def test_a_hostile_client_file_is_one_line(tmp_path: Path, case: str) -> None:
    name, content, expected = CLIENT_FILES[case]
    (tmp_path / name).write_bytes(content)
    assert expected in refusal(lambda: Federation.from_folder(tmp_path))


def test_what_is_no_file_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")  # reading it would wait forever
    assert "a.csv is not a file" in refusal(lambda: Federation.from_folder(tmp_path))


def test_arrays_that_compress_well_are_no_lie(tmp_path: Path) -> None:
    x, other = np.zeros((10_000, 1000), np.uint8), np.array([{}], dtype=object)
    np.savez_compressed(tmp_path / "a.npz", inputs=x, targets=np.zeros(10_000, bool), other=other)
    assert Federation.from_folder(tmp_path).samples == 10_000


def test_bfloat16_has_a_digest_of_its_own(tmp_path: Path) -> None:
    for name, dtype in (("a", torch.bfloat16), ("b", torch.int16)):
        (tmp_path / name).mkdir()
        tensors = {"inputs": torch.zeros(3, 2, dtype=dtype), "targets": torch.tensor([0, 1, 0])}
        (tmp_path / name / "c.safetensors").write_bytes(save(tensors))
    assert len({Federation.from_folder(tmp_path / name).digest() for name in "ab"}) == 2


def test_numbers_that_are_no_labels_are_not_taken_for_such(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,target\n1,1e30\n2,1\n")  # no integer has so many digits
    assert as_tensor(Federation.from_folder(tmp_path).targets).max() == np.float32(1e30)
    (tmp_path / "a.csv").write_text("x,target\n1,-1\n2,-1\n")
    below = Federation.from_folder(tmp_path)
    assert below.classes is None
    assert "no class labels" in refusal(below.label_counts)


# ---- the cache ----


@pytest.mark.parametrize("kind", ["a file", "below a file", "read-only"])
def test_a_cache_that_cannot_be_written_is_noticed_before_data_is_read(tmp_path: Path, kind: str) -> None:
    folder, cache = layouts.femnist_parquet(tmp_path / "in"), tmp_path / "cache"
    (folder / "data" / "train-00000-of-00002.parquet").write_bytes(b"would be refused if it were read")
    if kind == "read-only":
        cache.mkdir(mode=0o555)
        if os.access(cache, os.W_OK):
            pytest.skip("this user may write everywhere")
    else:
        cache.write_text("in the way")
    where = Where(folder, None, cache / "below" if kind == "below a file" else cache)
    said: list[str] = []
    message = refusal(lambda: setups.entry("femnist", where, said.append))
    assert f"cannot write to the cache {where.cache}" in message
    assert "name another with --cache" in message
    assert not said


def test_a_cache_that_cannot_be_written_is_noticed_before_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # out of reach
    (tmp_path / "cache").write_text("in the way")
    where = Where(cache=tmp_path / "cache")
    assert "cannot write to the cache" in refusal(lambda: setups.entry("femnist", where, print))


def test_generated_data_says_that_the_cache_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    where = Where(cache=tmp_path / "cache")
    message = refusal(lambda: setups.entry("synthetic:clients=2", where, print))
    assert "cannot write to the cache" in message


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '["made", "digest", "clients", "shards", "source"]', "7", ""]
)
def test_a_bad_manifest_hides_no_other(tmp_path: Path, content: str) -> None:
    folder = layouts.femnist_parquet(tmp_path / "in")
    made = setups.entry("femnist", Where(folder, None, tmp_path / "cache"), print)
    (tmp_path / "cache" / "femnist-0").mkdir()
    (tmp_path / "cache" / "femnist-0" / store.MANIFEST).write_text(content)
    assert store.entries(tmp_path / "cache") == [made]
    assert setups.entry("femnist", Where(cache=tmp_path / "cache"), print) == made


# ---- names ----

NAMES = ("a", "a\0", "a\n\x1b[31m\r\x07b", "[/red]", "</script><b>", "x" * 100_000, "é" * 1000)


def test_any_name_is_kept_and_shown(tmp_path: Path) -> None:
    tweets = [(4 * (i % 2), name, f"word{i}") for name in NAMES for i in range(3)]
    folder = layouts.sent140_csv(tmp_path / "in", tweets)
    done = succeeded("data", "sent140:clients=9", "--data-dir", folder, "--cache", tmp_path / "cache")
    assert "\x1b" not in done.stdout
    kept = setups.federation("sent140:clients=9", Where(cache=tmp_path / "cache"))
    assert kept.names == tuple(sorted(NAMES))
    assert (kept.train + kept.test).tolist() == [3] * len(NAMES)
    page = next((tmp_path / "cache").rglob("labels.html"))
    assert "</script><b>" not in page.read_text()


def test_a_name_cannot_pass_for_another_with_its_label() -> None:
    samples = Samples(["0\0text", "text"], np.array([1, 0]), ["a", "a\x001"])
    assert distinct(samples).tolist() == [0, 1]


def test_a_client_file_may_have_any_name(tmp_path: Path) -> None:
    for name in (b"a\xff.csv", b"a\n\x1b[31m.csv", "ä".encode() * 100 + b".csv"):
        (tmp_path / os.fsdecode(name)).write_text("x,target\n1,0\n2,1\n")
    federation = Federation.from_folder(tmp_path)
    assert all(name.encode() for name in federation.names)
    kept = store.keep("own", federation, {}, cache=tmp_path / "cache").load()
    assert kept.names == federation.names
