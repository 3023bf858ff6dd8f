"""Small files in the layouts that the data sets really have."""

import csv
import io
import json
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def characters(sizes: dict[str, int], seed: int = 0) -> list[tuple[str, np.ndarray, int]]:
    """Writer, image and label of so many samples a writer; the last of each writer repeats the first."""
    draw = np.random.RandomState(seed)
    rows = []
    for writer, n in sizes.items():
        own = [
            (writer, draw.randint(0, 256, (28, 28)).astype(np.uint8), int(draw.randint(62))) for _ in range(n)
        ]
        rows += [*own, own[0]]
    return rows


WRITERS = {"f0003_10": 12, "f0001_41": 7, "f0002_07": 5}


def femnist_parquet(folder: Path, rows: list[Any] | None = None) -> Path:
    """The hub's flwrlabs/femnist."""
    rows = characters(WRITERS) if rows is None else rows
    folder = folder / "data"
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "image": pa.array([{"bytes": png(x), "path": None} for _, x, _ in rows], IMAGE),
            "writer_id": [w for w, _, _ in rows],
            "hsf_id": [0] * len(rows),
            "character": pa.array([y for _, _, y in rows], pa.int64()),
        }
    )
    half = len(rows) // 2
    pq.write_table(table.slice(0, half), folder / "train-00000-of-00002.parquet")
    pq.write_table(table.slice(half), folder / "train-00001-of-00002.parquet")
    return folder.parent


def leaf(file: Path, data: dict[str, tuple[list[Any], list[Any]]], counts: list[int] | None = None) -> Path:
    """One of LEAF's JSON files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(data),
        "num_samples": counts or [len(y) for _, y in data.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in data.items()},
    }
    file.write_text(json.dumps(content))
    return file.parent


def femnist_leaf(folder: Path, rows: list[Any] | None = None) -> Path:
    """LEAF's all_data for FEMNIST: pixels as numbers up to 1."""
    data: dict[str, tuple[list[Any], list[Any]]] = {}
    for writer, x, y in characters(WRITERS) if rows is None else rows:
        inputs, labels = data.setdefault(writer, ([], []))
        inputs.append((x.reshape(-1) / 255).tolist())
        labels.append(y)
    leaf(folder / "data" / "all_data" / "all_data_0.json", data)
    return folder


def pictures(n: int = 60, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    """CIFAR-10's shape: (n, 3, 32, 32) and labels."""
    draw = np.random.RandomState(seed)
    return draw.randint(0, 256, (n, 3, 32, 32)).astype(np.uint8), draw.randint(0, 10, n).tolist()


def cifar_parquet(folder: Path, n: int = 60) -> Path:
    """The hub's uoft-cs/cifar10, with a test set that must not be read."""
    (folder / "plain_text").mkdir(parents=True, exist_ok=True)
    for split, seed in (("train", 0), ("test", 1)):
        x, y = pictures(n, seed)
        images = [{"bytes": png(p.transpose(1, 2, 0)), "path": None} for p in x]
        table = pa.table({"img": pa.array(images, IMAGE), "label": pa.array(y, pa.int64())})
        pq.write_table(table, folder / "plain_text" / f"{split}-00000-of-00001.parquet")
    return folder


def python2_batch(x: np.ndarray, y: list[int]) -> bytes:
    """A batch as Python 2 pickled it: strings that are bytes, and NumPy's modules under their old names."""

    def string(value: bytes) -> bytes:
        return pickle.BINSTRING + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return pickle.BININT + struct.pack("<i", value)

    def found(module: str, name: str) -> bytes:
        return pickle.GLOBAL + f"{module}\n{name}\n".encode()

    P = pickle
    dtype = found("numpy", "dtype") + string(b"u1") + number(0) + number(1) + P.TUPLE3 + P.REDUCE
    dtype += (
        P.MARK
        + number(3)
        + string(b"|")
        + P.NONE * 3
        + number(-1)
        + number(-1)
        + number(0)
        + P.TUPLE
        + P.BUILD
    )
    shape = number(len(x)) + number(3072) + P.TUPLE2
    array = found("numpy.core.multiarray", "_reconstruct") + found("numpy", "ndarray")
    array += number(0) + P.TUPLE1 + string(b"b") + P.TUPLE3 + P.REDUCE
    array += P.MARK + number(1) + shape + dtype + P.NEWFALSE + string(x.tobytes()) + P.TUPLE + P.BUILD
    labels = P.EMPTY_LIST + P.MARK + b"".join(map(number, y)) + P.APPENDS
    items = (
        string(b"batch_label")
        + string(b"training batch")
        + string(b"labels")
        + labels
        + string(b"data")
        + array
    )
    return P.PROTO + b"\x02" + P.EMPTY_DICT + P.MARK + items + P.SETITEMS + P.STOP


def cifar_batches(folder: Path, n: int = 60) -> Path:
    """The python version: five pickled batches and a test batch."""
    folder = folder / "cifar-10-batches-py"
    folder.mkdir(parents=True, exist_ok=True)
    x, y = pictures(n)
    for i in range(5):
        part = slice(i * n // 5, (i + 1) * n // 5)
        (folder / f"data_batch_{i + 1}").write_bytes(python2_batch(x[part], y[part]))
    (folder / "test_batch").write_bytes(b"not to be read")
    return folder.parent


TWEETS = [  # label, user, text
    (4, "ann", "I love it!!! http://t.co/x @bob"),
    (0, "ann", "I don't like rain"),
    (4, "ann", "It's GREAT &amp; sunny"),
    (2, "ann", "neither good nor bad"),
    (0, "bob", "so sad :("),
    (0, "bob", "so sad :("),
    (4, "bob", "love love love"),
    (4, "cy", "great day"),
    (0, "cy", "bad day"),
    (0, "cy", "sad bad day"),
    (0, "cy", "rain, rain, rain"),
    (4, "dee", "@ann"),
]


def sent140_csv(folder: Path, tweets: list[Any] | None = None) -> Path:
    """The original CSV, in Latin-1."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(
        folder / "training.1600000.processed.noemoticon.csv", "w", encoding="latin-1", newline=""
    ) as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        for i, (label, user, text) in enumerate(TWEETS if tweets is None else tweets):
            writer.writerow([label, i, "Mon Apr 06 22:19:45 PDT 2009", "NO_QUERY", user, text])
    (folder / "testdata.manual.2009.06.14.csv").write_text('"9","not to be read"\n')
    return folder


def sent140_parquet(folder: Path) -> Path:
    """The hub's own conversion of stanfordnlp/sentiment140."""
    (folder / "sentiment140" / "train").mkdir(parents=True)
    columns = {
        "text": [t for _, _, t in TWEETS],
        "date": ["Mon Apr 06 22:19:45 PDT 2009"] * len(TWEETS),
        "user": [u for _, u, _ in TWEETS],
        "sentiment": pa.array([y for y, _, _ in TWEETS], pa.int32()),
        "query": ["NO_QUERY"] * len(TWEETS),
    }
    pq.write_table(pa.table(columns), folder / "sentiment140" / "train" / "0000.parquet")
    return folder


def sent140_leaf(folder: Path) -> Path:
    """LEAF's train and test files, with labels 0 and 1 and the text fifth."""
    users = sorted({u for _, u, _ in TWEETS})
    data = {
        u: [
            (["0", "Mon Apr 06", "NO_QUERY", u, t, "training"], y // 4)
            for y, v, t in TWEETS
            if v == u and y != 2
        ]
        for u in users
    }
    for half, part in (("train", slice(0, 1)), ("test", slice(1, None))):
        cut = {
            u: ([x for x, _ in rows[part]], [y for _, y in rows[part]])
            for u, rows in data.items()
            if rows[part]
        }
        leaf(folder / half / f"{half}.json", cut)
    return folder


GLOVE = {"love": 1.0, "great": 2.0, "sad": -1.0, "n't": -2.0, "unseen": 9.0, "day": 0.5, ",": 0.1, "it": 0.2}


def glove(folder: Path, lines: list[str] | None = None) -> Path:
    """GloVe's text file, three numbers a word."""
    folder.mkdir(parents=True, exist_ok=True)
    written = lines or [f"{word} {value} 0.5 -{abs(value)}" for word, value in GLOVE.items()]
    (folder / "glove.6B.3d.txt").write_text("\n".join(written) + "\n", encoding="utf-8")
    return folder


def everything(folder: Path) -> None:
    """A folder of each set, as `fairwind paper --data-dir` takes them."""
    femnist_parquet(folder / "femnist")
    cifar_parquet(folder / "cifar10", n=30)  # VGG11 takes its time on a CPU
    sent140_csv(folder / "sent140")
    glove(folder / "glove")


if __name__ == "__main__":
    everything(Path(sys.argv[1]))
