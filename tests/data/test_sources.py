"""Reading data sets: every layout gives the same samples, and a bad file is named with its row."""

import gzip
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import layouts
from command import fairwind, refused
from fairwind import Federation, Solver, setups, simulate
from fairwind.data import cifar10
from fairwind.data.patches import FEATURES, patch_features
from fairwind.data.sent140 import tokenize
from fairwind.data.source import Samples
from fairwind.setups import Where
from samples import as_tensor


def read(spec: str, folder: Path | None, cache: Path, glove: Path | None = None) -> Federation:
    return setups.federation(spec, Where(folder, glove, cache))


# ---- layouts ----


def test_femnist_reads_the_hubs_files_and_leafs_as_one(tmp_path: Path) -> None:
    hub = read("femnist", layouts.femnist_parquet(tmp_path / "hub"), tmp_path / "a")
    leaf = read("femnist", layouts.femnist_leaf(tmp_path / "leaf"), tmp_path / "b")
    assert hub.digest() == leaf.digest()
    assert hub.names == ("f0001_41", "f0002_07", "f0003_10")
    assert (hub.train + hub.test).tolist() == [7, 5, 12]  # each writer's repeated image is gone
    writer, pixels, label = layouts.characters(layouts.WRITERS)[0]
    mine = slice(int(hub.start[2]), int(hub.start[2]) + 12)
    at = [
        i for i, x in enumerate(as_tensor(hub.inputs)[mine]) if np.array_equal(255 - x.numpy(), pixels)
    ]  # ink is 255
    assert writer == "f0003_10"
    assert as_tensor(hub.targets)[mine][at].tolist() == [label]


def test_femnist_takes_the_first_writers_by_name(tmp_path: Path) -> None:
    folder = layouts.femnist_parquet(tmp_path / "hub")
    assert read("femnist:clients=2", folder, tmp_path).names == ("f0001_41", "f0002_07")


@pytest.mark.parametrize("beta", ["0.5", "iid"])
def test_pooled_femnist_deals_out_every_image_whoever_wrote_it(beta: str, tmp_path: Path) -> None:
    folder = layouts.femnist_parquet(tmp_path / "hub")
    by_writer = read("femnist", folder, tmp_path / "a")
    pooled, again, other = (
        read(f"femnist-pooled:clients=2,beta={beta},seed={seed}", folder, tmp_path / name)
        for seed, name in ((0, "b"), (0, "c"), (1, "d"))
    )
    assert len(pooled) == 2
    dealt, written = (
        sorted((int(y), x.numpy().tobytes()) for x, y in zip(f.inputs, f.targets, strict=True))
        for f in (pooled, by_writer)
    )
    assert dealt == written
    assert pooled.digest() == again.digest() != other.digest()
    if beta == "iid":
        spread = pooled.label_counts()
        assert int((spread[0] - spread[1]).abs().max()) <= 1


@pytest.mark.parametrize("beta", [0.5, "iid"])
def test_cifar10s_features_are_those_of_its_first_images_dealt_out_as_the_images_are(
    beta: float | Literal["iid"],
) -> None:
    x, y = layouts.pictures(60)
    samples = Samples(x, np.array(y), [])
    first = Samples(x[:40], np.array(y[:40]), [])
    images, _ = cifar10.cifar10(first, clients=3, beta=beta, seed=2)
    features, notes = cifar10.cifar10_features(samples, clients=3, beta=beta, images=40, seed=2)
    assert notes == ["the first 40 of 60 images, as 512 fixed features"]
    assert as_tensor(features.inputs).shape == (40, FEATURES)
    for name in ("targets", "start", "train", "test"):
        assert getattr(features, name).tolist() == getattr(images, name).tolist()
    assert (features.names, features.class_names) == (images.names, images.class_names)
    of_image = {image.tobytes(): row for image, row in zip(x[:40], patch_features(x[:40]), strict=True)}
    for image, row in zip(images.inputs, features.inputs, strict=True):
        assert np.array_equal(row.numpy(), of_image[image.numpy().tobytes()])


def test_a_linear_classifier_trains_on_cifar10s_features(tmp_path: Path) -> None:
    """All images where fewer than the default are there, from either layout."""
    spec = "cifar10-features:clients=3,beta=1"
    hub = Where(layouts.cifar_parquet(tmp_path / "hub"), None, tmp_path / "a")
    task = setups.task(spec, hub)
    batches = read(spec, layouts.cifar_batches(tmp_path / "py"), tmp_path / "b")
    assert task.federation.digest() == batches.digest()
    assert setups.entry(spec, hub, print).manifest["notes"] == [
        "a subset: 60 of the 50,000 published samples",
        "the first 60 of 60 images, as 512 fixed features",
    ]
    assert task.federation.name == "CIFAR-10 features, Dir(1)"
    assert int((task.federation.train + task.federation.test).sum()) == 60
    assert sum(p.numel() for p in task.model().parameters()) == 512 * 10 + 10
    assert (task.rounds, task.solver) == (100, Solver(lr=0.01, batch_size=32, epochs=1))
    result = simulate(task, "adafedadam", rounds=2, compile="off")
    worst, average = (result.metrics[name] for name in ("worst30", "avg"))
    assert worst is not None
    assert average is not None
    assert 0 <= worst <= average <= 100


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("images=0", "images=0 is out of range: 1 ≤ images < 50001"),
        ("images=50001", "images=50001 is out of range: 1 ≤ images < 50001"),
        ("images=1.5", "images='1.5' is not a whole number"),
        ("images=10", "clients=16 is out of range: 1 ≤ clients < 11"),
        ("beta=0", "beta=0.0 is out of range"),
    ],
)
def test_features_of_no_images_or_too_few_are_refused(tmp_path: Path, given: str, message: str) -> None:
    folder, cache = layouts.cifar_parquet(tmp_path / "hub"), tmp_path / "cache"
    said = refused("data", f"cifar10-features:{given}", "--data-dir", folder, "--cache", cache)
    assert message in said
    assert not list(cache.glob("*"))


def test_batches_pickled_anew_by_python_3_are_read(tmp_path: Path) -> None:
    old, new = layouts.cifar_batches(tmp_path / "old"), layouts.cifar_batches(tmp_path / "new")
    for file in new.rglob("data_batch_*"):
        batch = pickle.loads(file.read_bytes(), encoding="bytes")
        file.write_bytes(pickle.dumps(batch, protocol=2))
    specs = [read("cifar10:clients=3,beta=1", f, tmp_path / f.name / "cache") for f in (old, new)]
    assert specs[0].digest() == specs[1].digest()


def test_cifar10_reads_the_hubs_files_and_the_python_batches_as_one(tmp_path: Path) -> None:
    hub = read("cifar10:clients=3,beta=1", layouts.cifar_parquet(tmp_path / "hub"), tmp_path / "a")
    batches = read("cifar10:clients=3,beta=1", layouts.cifar_batches(tmp_path / "py"), tmp_path / "b")
    assert hub.digest() == batches.digest()
    assert as_tensor(hub.inputs).shape == (60, 3, 32, 32)
    x, y = layouts.pictures()
    found = {
        row.numpy().tobytes(): label
        for row, label in zip(as_tensor(hub.inputs), as_tensor(hub.targets).tolist(), strict=True)
    }
    assert found == {row.tobytes(): label for row, label in zip(x, y, strict=True)}


def test_sent140_reads_csv_parquet_and_leaf_as_one(tmp_path: Path) -> None:
    folders = layouts.sent140_csv(tmp_path / "c"), layouts.sent140_parquet(tmp_path / "p")
    csv, parquet = (read("sent140:clients=3", f, tmp_path / f.name / "cache") for f in folders)
    assert csv.digest() == parquet.digest()
    leaf = read("sent140:clients=3", layouts.sent140_leaf(tmp_path / "l"), tmp_path / "l" / "cache")
    assert contents(leaf) == contents(csv)  # LEAF's test and train files are put together in another order
    assert csv.names == ("ann", "bob", "cy")  # at least two tweets, without the neutral and the repeated one
    assert (csv.train + csv.test).tolist() == [3, 2, 4]
    assert csv.embedding is None


def contents(federation: Federation) -> list[tuple[str, list[int], int]]:
    owner = [
        name
        for name, n in zip(federation.names, federation.train + federation.test, strict=True)
        for _ in range(n)
    ]
    return sorted(
        zip(owner, as_tensor(federation.inputs).tolist(), as_tensor(federation.targets).tolist(), strict=True)
    )


def test_compressed_csv_is_read(tmp_path: Path) -> None:
    import lzma

    folder = layouts.sent140_csv(tmp_path / "c")
    packed = tmp_path / "x" / "sample.csv.xz"
    packed.parent.mkdir()
    packed.write_bytes(lzma.compress((folder / "training.1600000.processed.noemoticon.csv").read_bytes()))
    plain = read("sent140:clients=3", folder, tmp_path / "1")
    assert read("sent140:clients=3", packed.parent, tmp_path / "2").digest() == plain.digest()


def test_tweets_become_the_ids_of_their_words_and_no_others(tmp_path: Path) -> None:
    folder, vectors = layouts.sent140_csv(tmp_path / "c"), layouts.glove(tmp_path / "g")
    federation = read("sent140:clients=3,tokens=4", folder, tmp_path, vectors)
    assert federation.words == ("<padding>", "<unknown>", "love", "great", "sad", "n't", "day", ",", "it")
    assert federation.embedding is not None
    assert federation.embedding[3].tolist() == [2.0, 0.5, -2.0]
    assert federation.embedding[:2].abs().sum() == 0
    texts = {
        " ".join(federation.words[i] for i in row if i) for row in as_tensor(federation.inputs).tolist()
    }  # "rain, rain, rain" is cut after four; "I" has no vector
    assert "<unknown> , <unknown> ," in texts
    assert "<unknown> <unknown> n't <unknown>" in texts
    assert "it <unknown> great <unknown>" in texts
    assert as_tensor(federation.inputs).dtype == torch.int32


def test_tokens_are_as_glove_cuts_them() -> None:
    assert tokenize("I don't LIKE it's &quot;rain&quot;... @Bob http://t.co/aB?c=1 :)") == [
        *("i", "do", "n't", "like", "it", "'s"),
        *('"', "rain", '"', ".", ".", ".", ":", ")"),
    ]
    assert tokenize("@ann") == []
    assert tokenize("cannot wouldn't n't can't") == ["cannot", "would", "n't", "n't", "ca", "n't"]


def test_users_are_kept_whole_in_groups(tmp_path: Path) -> None:
    tweets = [(4 * (i % 2), f"user{i % 20}", f"word{i % 20} filler{i}") for i in range(100)]
    folder = layouts.sent140_csv(tmp_path / "c", tweets)
    federation = read("sent140:by=group,clients=4", folder, tmp_path / "k")
    assert federation.names == ("group 0", "group 1", "group 2", "group 3")
    owners: dict[str, set[str]] = {}
    for name, row, _ in contents(federation):
        owners.setdefault(federation.words[row[0]], set()).add(name)
    assert len(owners) == 20  # a word for each user
    assert all(len(groups) == 1 for groups in owners.values())


@pytest.mark.parametrize(("asked", "users"), [(4, 3), (1, 1), (2, 2), (3, 3)])
def test_the_least_number_of_tweets_comes_nearest_the_users_asked_for(
    tmp_path: Path, asked: int, users: int
) -> None:
    federation = read(f"sent140:clients={asked}", layouts.sent140_csv(tmp_path / "c"), tmp_path / "k")
    assert len(federation) == users  # ann 3, bob 2, cy 4 tweets; dee's one leaves none to test


def test_data_is_the_same_on_every_machine(tmp_path: Path) -> None:
    made = {
        "femnist": read("femnist", layouts.femnist_parquet(tmp_path / "f"), tmp_path),
        "dirichlet": read("cifar10:clients=4,beta=0.3", layouts.cifar_parquet(tmp_path / "c"), tmp_path),
        "iid": read("cifar10:clients=4,beta=iid,seed=1", tmp_path / "c", tmp_path),
        "user": read(
            "sent140:clients=3", layouts.sent140_csv(tmp_path / "s"), tmp_path, layouts.glove(tmp_path / "g")
        ),
        "group": read("sent140:by=group,clients=2", tmp_path / "s", tmp_path),
    }
    assert {name: federation.digest()[:16] for name, federation in made.items()} == PINNED


PINNED = {
    "femnist": "06963cd0e3841a98",
    "dirichlet": "aadd71c8a922cc19",
    "iid": "5653fba441e1e210",
    "user": "4878fcce6ad36ee0",
    "group": "daeb819fb58a5fce",
}


# ---- bad files, by command ----


def truncated(folder: Path) -> Path:
    layouts.femnist_parquet(folder)
    file = folder / "data" / "train-00001-of-00002.parquet"
    file.write_bytes(file.read_bytes()[:-700])
    return folder


def damaged(folder: Path) -> Path:
    layouts.femnist_parquet(folder)
    file = folder / "data" / "train-00000-of-00002.parquet"
    content = bytearray(file.read_bytes())
    content[400:4000] = bytes(3600)
    file.write_bytes(content)
    return folder


def column_missing(folder: Path) -> Path:
    layouts.femnist_parquet(folder)
    file = folder / "data" / "train-00000-of-00002.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["writer_id"]), file)
    return folder


def no_image(folder: Path) -> Path:
    layouts.cifar_parquet(folder)
    file = folder / "plain_text" / "train-00000-of-00001.parquet"
    table = pq.read_table(file)
    cells = table["img"].to_pylist()
    cells[5]["bytes"] = b"GIF89a, or so it says"
    pq.write_table(table.set_column(0, "img", pa.array(cells, layouts.IMAGE)), file)
    return folder


def other_size(folder: Path) -> Path:
    rows = layouts.characters(layouts.WRITERS)
    rows[3] = ("f0003_10", np.zeros((20, 28), np.uint8), 1)
    return layouts.femnist_parquet(folder, rows)


def wrong_label(folder: Path) -> Path:
    rows = layouts.characters(layouts.WRITERS)
    rows[20] = (*rows[20][:2], 62)
    return layouts.femnist_parquet(folder, rows)


def no_writer(folder: Path) -> Path:
    rows: list[Any] = layouts.characters(layouts.WRITERS)
    rows[2] = (None, *rows[2][1:])
    return layouts.femnist_parquet(folder, rows)


def counts_disagree(folder: Path) -> Path:
    x = [[0.0] * 784] * 3
    layouts.leaf(folder / "all_data_0.json", {"w0": (x, [1, 2, 3]), "w1": (x, [1, 2, 3])}, counts=[3, 4])
    return folder


def users_disagree(folder: Path) -> Path:
    folder.mkdir()
    data = {user: {"x": [[0.0] * 784], "y": [1]} for user in ("w0", "w1")}
    content = {"users": ["w0"], "num_samples": [1], "user_data": data}
    (folder / "all_data_0.json").write_text(json.dumps(content))
    return folder


def leaf_of_nothing(folder: Path) -> Path:
    return layouts.leaf(folder / "all_data_0.json", {})


def leaf_of_nonsense(folder: Path) -> Path:
    folder.mkdir()
    content = {"users": ["w0"], "num_samples": [1], "user_data": {"w0": {"x": 5, "y": None}}}
    (folder / "all_data_0.json").write_text(json.dumps(content))
    return folder


def parquet_of_nothing(folder: Path) -> Path:
    return layouts.femnist_parquet(folder, [])


def pictures_of_nothing(folder: Path) -> Path:
    return layouts.cifar_parquet(folder, n=0)


def only_neutral(folder: Path) -> Path:
    return layouts.sent140_csv(folder, [(2, "ann", "so so")])


def damaged_gzip(folder: Path) -> Path:
    whole = gzip.compress(
        (layouts.sent140_csv(folder) / "training.1600000.processed.noemoticon.csv").read_bytes()
    )
    for file in folder.iterdir():
        file.unlink()
    content = bytearray(whole)
    content[60:70] = bytes(10)
    (folder / "tweets.csv.gz").write_bytes(content)
    return folder


def pixels_out_of_range(folder: Path) -> Path:
    x = [[0.0] * 784, [0.5] * 783 + [255.0]]
    return layouts.leaf(folder / "all_data_0.json", {"w0": (x, [1, 2])})


def too_few_pixels(folder: Path) -> Path:
    return layouts.leaf(folder / "all_data_0.json", {"w0": ([[0.0] * 100], [1])})


def not_leaf(folder: Path) -> Path:
    folder.mkdir()
    (folder / "all_data_0.json").write_text('{"users": ["a"]}')
    return folder


def batch_of_code(folder: Path) -> Path:
    layouts.cifar_batches(folder)
    (folder / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    return folder


def batch_label(folder: Path) -> Path:
    x, y = layouts.pictures(12)
    y[4] = 10
    layouts.cifar_batches(folder)
    (folder / "cifar-10-batches-py" / "data_batch_2").write_bytes(layouts.python2_batch(x, y))
    return folder


def csv_columns(folder: Path) -> Path:
    layouts.sent140_csv(folder)
    with open(folder / "training.1600000.processed.noemoticon.csv", "a") as file:
        file.write('"4","1","date","user","text"\n')
    return folder


def csv_label(folder: Path) -> Path:
    return layouts.sent140_csv(folder, [*layouts.TWEETS[:5], (3, "ann", "hm")])


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


BAD = {
    truncated: ("femnist", "train-00001-of-00002.parquet", "is damaged or no parquet"),
    damaged: ("femnist", "train-00000-of-00002.parquet, ", "row"),
    column_missing: (
        "femnist",
        "train-00000-of-00002.parquet has no column 'writer_id'; it has image, hsf_id",
    ),
    no_image: ("cifar10", "train-00000-of-00001.parquet, row 5: no readable image"),
    other_size: ("femnist", "train-00000-of-00002.parquet, row 3: the image is 20×28, not 28×28"),
    wrong_label: ("femnist", "train-00001-of-00002.parquet, row 7: label 62 is not one of 0 to 61"),
    no_writer: ("femnist", "train-00000-of-00002.parquet, row 2: None names no owner"),
    users_disagree: ("femnist", "all_data_0.json: users, 1 of them, are not those of user_data, 2"),
    leaf_of_nothing: ("femnist", "hold no samples"),
    leaf_of_nonsense: ("femnist", "all_data_0.json, user 0 ('w0'): x and y are not lists"),
    parquet_of_nothing: ("femnist", "hold no samples"),
    pictures_of_nothing: ("cifar10", "hold no samples"),
    only_neutral: ("sent140", "hold no samples"),
    damaged_gzip: ("sent140", "tweets.csv.gz, line ", "is damaged"),
    counts_disagree: (
        "femnist",
        "all_data_0.json, user 1 ('w1'): num_samples says 4, but there are 3 x and 3 y",
    ),
    pixels_out_of_range: ("femnist", "all_data_0.json, user 'w0', sample 1: pixels lie outside 0 to 1"),
    too_few_pixels: ("femnist", "user 'w0', sample 0: the image has 100 pixels, not 28×28"),
    not_leaf: ("femnist", "all_data_0.json has no 'num_samples': it is not LEAF's layout"),
    batch_of_code: (
        "cifar10",
        "data_batch_3 is no batch of CIFAR-10's python version (it asks for os.system); download it again",
    ),
    batch_label: ("cifar10", "data_batch_2, row 4: label 10 is not one of 0 to 9"),
    csv_columns: ("sent140", "noemoticon.csv, line 13: 5 columns"),
    csv_label: ("sent140", "noemoticon.csv, line 6: sentiment 3 is not 0 (negative)"),
    empty: ("femnist", "holds none of: the hub's parquet files"),
}


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_a_bad_file_is_one_line_that_names_it_and_leaves_no_entry(tmp_path: Path, make: Any) -> None:
    spec, *expected = BAD[make]
    message = refused("data", spec, "--data-dir", make(tmp_path / "in"), "--cache", tmp_path / "cache")
    for part in expected:
        assert part in message
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["love 1 2 3", "sad 1 2"], "line 2: 2 numbers after the word, not 3"),
        (["love 1 2 3", "unseen 1 2 3 4"], "line 2: 4 numbers after the word, not 3"),
        (["love 1 2 x"], "line 1: not a word and numbers"),
        (["love 1 2 nan"], "line 1: the vector is not finite"),
        (["other 1 2 3"], "has vectors for none of the tweets' words"),
    ],
)
def test_a_bad_file_of_vectors_is_named_with_its_line(
    tmp_path: Path, lines: list[str], expected: str
) -> None:
    folder = layouts.glove(layouts.sent140_csv(tmp_path / "in"), lines)
    message = refused("data", "sent140", "--data-dir", folder, "--cache", tmp_path / "cache")
    assert "glove.6B.3d.txt" in message
    assert expected in message
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize(
    ("spec", "make", "pattern"),
    [
        ("femnist", layouts.femnist_leaf, "**/all_data*.json"),
        ("cifar10:clients=2", layouts.cifar_parquet, "**/train*.parquet"),
        ("sent140", layouts.sent140_csv, "training*.csv"),
    ],
)
def test_a_single_file_may_be_named_instead_of_its_folder(
    tmp_path: Path, spec: str, make: Any, pattern: str
) -> None:
    folder = make(tmp_path / "in")
    (file,) = folder.glob(pattern)
    found = [
        setups.entry(spec, setups.Where(place, None, tmp_path / place.name), print).manifest["digest"]
        for place in (folder, file)
    ]
    assert found[0] == found[1]
    (tmp_path / "notes.txt").touch()
    message = refused("data", spec, "--data-dir", tmp_path / "notes.txt", "--cache", tmp_path / "cache")
    assert "notes.txt is a file of another kind; give a folder that holds one of: " in message


def test_words_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    femnist = layouts.femnist_parquet(tmp_path / "f")
    data = ("data", "femnist", "--cache", tmp_path / "cache", "--data-dir")
    assert "does not exist" in refused(*data, tmp_path / "nowhere")
    assert "--glove" in refused(*data, femnist, "--glove", layouts.glove(tmp_path / "g"))
    assert "clients=9, but the data has 3 writers" in refused(*data, femnist, "--clients", 9)
    hub = ("--cache", tmp_path / "cache")  # out of reach here, and must not even be asked
    for bad in ("cifar10:beta=-1", "cifar10:clients=0", "femnist:clients=0", "sent140:tokens=0"):
        name = bad.partition(":")[2].partition("=")[0]
        assert f"{name}=" in refused("data", bad, *hub)
    assert "fedavgg" in refused("compare", "cifar10", "--algorithms", "fedavgg", *hub)
    assert "'abc' is not a number or iid" in refused("data", "cifar10:beta=abc", *hub)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "is not empty" in refused("compare", "femnist", "--out", tmp_path / "full", *hub)
    tweets = layouts.sent140_csv(tmp_path / "t")
    assert "but the data has 4 users" in refused(
        "data", "sent140:by=group", "--clients", 5, "--data-dir", tweets, *hub
    )
    for command in ("compare", "data"):
        assert "reads no files" in refused(command, "synthetic", "--data-dir", femnist)
    assert "given twice" in refused("data", "femnist:clients=2", "--clients", 3)
    assert "beta=0.0001 with 30 clients" in refused(
        *("data", "cifar10:beta=0.0001,clients=30", "--cache", tmp_path / "cache"),
        *("--data-dir", layouts.cifar_parquet(tmp_path / "c", n=100)),
    )


def test_words_with_spaces_in_a_file_of_vectors_are_passed_over(tmp_path: Path) -> None:
    lines = ["love 1 2 3", ". . . 1 2 3", "at name@domain.com 1 2 3", "sad 4 5 6"]
    folder = layouts.glove(layouts.sent140_csv(tmp_path / "in"), lines)
    assert read("sent140:clients=3", folder, tmp_path / "k").words[2:] == ("love", "sad")


def test_tweets_labelled_by_hand_are_left_out(tmp_path: Path) -> None:
    """LEAF calls their neutral ones negative; the original has them in a file of their own."""
    rows = [
        ["0", "date", "query", "ann", text, split] for text, split in [("a b", "training"), ("c", "test")] * 3
    ]
    rows = [[*row[:4], f"{row[4]} {i}", row[5]] for i, row in enumerate(rows)]
    layouts.leaf(tmp_path / "l" / "all_data.json", {"ann": (rows, [0] * 6)})
    federation = read("sent140:clients=1", tmp_path / "l", tmp_path / "k")
    assert len(federation.inputs) == 3
    assert "c" not in federation.words
    folder = layouts.sent140_csv(tmp_path / "c")
    before = setups.entry("sent140:clients=3", Where(folder, None, tmp_path / "k"), print).path
    (folder / "testdata.manual.2009.06.14.csv").write_text("changed")
    assert setups.entry("sent140:clients=3", Where(folder, None, tmp_path / "k"), print).path == before


def test_prepared_data_is_found_by_its_vectors(tmp_path: Path) -> None:
    folder, vectors = layouts.sent140_csv(tmp_path / "c"), layouts.glove(tmp_path / "g")
    made = setups.entry("sent140:clients=3", Where(folder, vectors, tmp_path / "k"), print)
    setups.entry("sent140:clients=3", Where(folder, None, tmp_path / "k"), print)  # without, and newer
    assert setups.entry("sent140:clients=3", Where(None, vectors, tmp_path / "k"), print) == made
    said: list[str] = []
    assert setups.entry("sent140:clients=3", Where(None, None, tmp_path / "k"), said.append) != made
    assert said == ["2 prepared sets of these parameters: the newest is taken (others by --data-dir)"]


@pytest.mark.slow
def test_without_the_extra_the_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "shadow").mkdir()
    for package in ("pyarrow", "huggingface_hub"):
        (tmp_path / "shadow" / f"{package}.py").write_text(f"raise ImportError('gone', name={package!r})")
    folder = layouts.femnist_parquet(tmp_path / "f")
    without: dict[str, Any] = {"PYTHONPATH": str(tmp_path / "shadow"), "XDG_CACHE_HOME": str(tmp_path)}
    remedy = "install it with pip install 'fairwind[data]'"
    message = refused("data", "femnist", "--data-dir", folder, **without)
    assert f"needs pyarrow: {remedy}" in message
    assert f"needs huggingface_hub: {remedy}" in refused("data", "femnist", **without)
    leaf = fairwind("data", "femnist", "--data-dir", layouts.femnist_leaf(tmp_path / "l"), **without)
    assert leaf.returncode == 0, leaf.stderr


# ---- the hub, on this machine ----


@contextmanager
def hub(repository: str, revision: str, root: Path) -> Iterator[str]:
    """The part of the hub's API that a download uses, for one repository on a free port of this machine."""
    commit = "0123456789abcdef0123456789abcdef01234567"

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = unquote(self.path).partition("?")[0]
            files = [str(f.relative_to(root)) for f in sorted(root.rglob("*")) if f.is_file()]
            kind, content = "application/json", b""
            if path == f"/api/datasets/{repository}/revision/{revision}":
                siblings = [{"rfilename": name} for name in [*files, "README.md"]]
                content = json.dumps({"id": repository, "sha": commit, "siblings": siblings}).encode()
            elif path == f"/api/datasets/{repository}/tree/{commit}":
                listed = [
                    {"type": "file", "path": f, "size": (root / f).stat().st_size, "oid": "0" * 40}
                    for f in files
                ]
                content = json.dumps(listed).encode()
            elif path.startswith(f"/datasets/{repository}/resolve/"):
                kind, content = "application/octet-stream", (root / path.split("/", 6)[6]).read_bytes()
            self.send_response(200 if content else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:x}"')
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


HOMES: dict[str, tuple[str, str, Callable[[Path], Path]]] = {
    "femnist": ("flwrlabs/femnist", "main", layouts.femnist_parquet),
    "cifar10:clients=3,beta=1": ("uoft-cs/cifar10", "main", layouts.cifar_parquet),
    "sent140:clients=3": ("stanfordnlp/sentiment140", "refs/convert/parquet", layouts.sent140_parquet),
}


@pytest.mark.parametrize("spec", HOMES)
def test_data_is_downloaded_from_the_hub_where_no_folder_is_given(tmp_path: Path, spec: str) -> None:
    repository, revision, make = HOMES[spec]
    root = make(tmp_path / "root")
    with hub(repository, revision, root) as address:
        at: dict[str, Any] = {
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        done = fairwind("data", spec, "--cache", tmp_path / "cache", **at)
    assert done.returncode == 0, done.stderr
    assert f"downloading {repository}" in done.stderr
    expected = read(spec, root, tmp_path / "other").digest()
    assert read(spec, None, tmp_path / "cache").digest() == expected
    if "cifar" in spec:
        assert not list((tmp_path / "hf").rglob("test-*.parquet"))  # only what is needed


def test_a_hub_out_of_reach_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    message = refused("data", "femnist", "--cache", tmp_path / "cache", **nowhere)
    assert "flwrlabs/femnist cannot be downloaded" in message
    assert "--data-dir" in message
