"""A user's own data: a Hugging Face dataset and a partitioner, or a folder of per-client files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, NaturalIdPartitioner
from safetensors.torch import save_file
from torch import nn

from fairwind import Federation, InputError, Task, models, simulate
from samples import as_tensor


def pictures(n: int = 30) -> Dataset:
    draw = np.random.RandomState(0)
    columns = {
        "img": [draw.randint(0, 256, (4, 5, 3)).astype(np.uint8) for _ in range(n)],
        "label": [i % 3 for i in range(n)],
        "owner": [["ann", "bob"][i % 2] for i in range(n)],
        "number": [[float(i), 1.0] for i in range(n)],
        "ragged": [[0.0] * (i + 1) for i in range(n)],
    }
    kinds = {
        "img": Image(),
        "label": Value("int64"),
        "owner": Value("string"),
        "number": List(Value("float32")),
        "ragged": List(Value("float32")),
    }
    return Dataset.from_dict(columns, features=Features(kinds))


def cut(partitioner: object) -> object:
    partitioner.dataset = pictures()  # type: ignore[attr-defined]
    return partitioner


def test_images_of_a_partitioned_dataset_become_bytes() -> None:
    federation = Federation.from_partitioner(cut(NaturalIdPartitioner("owner")), inputs="img")
    assert federation.names == ("ann", "bob")
    assert as_tensor(federation.inputs).dtype == torch.uint8
    assert as_tensor(federation.inputs).shape == (30, 4, 5, 3)
    assert federation.classes == 3
    source = pictures().with_format("numpy")
    first = as_tensor(federation.inputs)[: int(federation.start[1])].numpy()
    assert {x.tobytes() for x in first} == {source[i]["img"].tobytes() for i in range(0, 30, 2)}


@pytest.mark.parametrize("shape", [(9, 8, 3), (9, 8), (9, 8, 4)])
def test_a_convolution_behind_pixels_trains_on_images_of_a_dataset(shape: tuple[int, ...]) -> None:
    draw = np.random.RandomState(0)
    columns = {
        "img": [draw.randint(0, 256, shape).astype(np.uint8) for _ in range(12)],
        "label": [i % 3 for i in range(12)],
        "owner": [["ann", "bob"][i % 2] for i in range(12)],
    }
    kinds = Features({"img": Image(), "label": Value("int64"), "owner": Value("string")})
    dataset = Dataset.from_dict(columns, features=kinds)
    federation = Federation.from_dataset(dataset, client="owner", inputs="img", targets="label")
    assert as_tensor(federation.inputs).shape == (12, *shape)
    channels = (*shape, 1)[2]
    layers = nn.Conv2d(channels, 2, 3), nn.Flatten(), nn.Linear(2 * 7 * 6, 3)
    task = Task(nn.Sequential(models.Pixels(), *layers).double(), federation)
    stacked, loop = (simulate(task, "fedavg", rounds=2, engine=e, device="cpu") for e in ("stacked", "loop"))
    torch.testing.assert_close(stacked.state_dict, loop.state_dict, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "partitioner",
    [
        IidPartitioner(5),
        DirichletPartitioner(3, partition_by="label", alpha=1.0, min_partition_size=2, self_balancing=False),
    ],
    ids=["iid", "dirichlet"],
)
def test_any_partitioner_of_flwr_datasets_serves(partitioner: object) -> None:
    cut(partitioner)
    federation = Federation.from_partitioner(partitioner, inputs="number", train=0.5)
    assert len(federation) == partitioner.num_partitions  # type: ignore[attr-defined]
    assert sorted(as_tensor(federation.inputs)[:, 0].tolist()) == list(range(30))
    for x, y in zip(
        as_tensor(federation.inputs)[:, 0].tolist(), as_tensor(federation.targets).tolist(), strict=True
    ):
        assert int(x) % 3 == y


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"inputs": "image"}, "no column 'image'; it has img, label"),
        ({"inputs": "number", "targets": "y"}, "no column 'y'"),
        ({"inputs": "owner"}, "column 'owner' does not hold numbers"),
        ({"inputs": "ragged"}, "column 'ragged' does not hold numbers or images of one shape"),
    ],
)
def test_columns_that_cannot_be_used_are_named(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Federation.from_partitioner(cut(IidPartitioner(2)), **columns)


def test_a_partitioner_without_its_dataset_is_refused_with_the_remedy() -> None:
    with pytest.raises(InputError, match="set its dataset first"):
        Federation.from_partitioner(IidPartitioner(2), inputs="img")


def test_a_folder_holds_a_file_for_each_client(tmp_path: Path) -> None:
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "bob.npz", inputs=x, targets=y)
    tensors = {"inputs": torch.from_numpy(x) + 100, "targets": torch.from_numpy(y)}
    save_file(tensors, tmp_path / "ann.safetensors")
    lines = [f"{a},{t},{b},{c}" for (a, b, c), t in zip(x + 200, y, strict=True)]
    (tmp_path / "cy.csv").write_text("\n".join(["a,target,b,c", *lines]))
    (tmp_path / "notes.txt").write_text("not a client")
    federation = Federation.from_folder(tmp_path)
    assert federation.names == ("ann", "bob", "cy")
    assert federation.train.tolist() == [3, 3, 3]
    for k, offset in enumerate((100, 0, 200)):
        mine = as_tensor(federation.inputs)[4 * k : 4 * k + 4] - offset
        assert sorted(mine.tolist()) == x.tolist()
        assert as_tensor(federation.targets)[4 * k : 4 * k + 4].tolist() == (mine[:, 0] / 3 % 2).tolist()
    assert federation.classes == 2
    assert federation.name == tmp_path.name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x,y\n1,2\n", "a.csv has no column 'target'; it has x, y"),
        ("a.csv", b"x,target\n1,0\n2\n", "a.csv, line 3: 1 values under 2 columns"),
        ("a.csv", b"x,target\n1,0\nred,1\n", "a.csv, line 3: x is 'red', not a number"),
        ("a.csv", b"x,target\n1,0\nnan,1\n", "client 'a': inputs of sample 1 hold NaN"),
        ("a.csv", b"x,target\n", "client 'a' has no training samples"),
        ("a.csv", b"x,target\n1,inf\n", "client 'a': targets of sample 0 hold NaN or infinity"),
        ("a.npz", b"PK, but no more", "a.npz cannot be read"),
        ("a.safetensors", b"short", "a.safetensors cannot be read"),
        ("a.txt", b"", "holds no .npz, .safetensors, .csv files"),
    ],
)
def test_a_bad_client_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        Federation.from_folder(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_targets_are_labels_only_if_all_clients_are(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,target\n1,0.5\n2,1\n")
    (tmp_path / "b.csv").write_bytes(
        b"\xef\xbb\xbftarget,x\r\n3,1\r\n1,2\r\n\r\n"
    )  # as spreadsheets write it
    federation = Federation.from_folder(tmp_path)
    assert sorted(as_tensor(federation.targets).tolist()) == [0.5, 1, 1, 3]
    assert federation.classes is None
    (tmp_path / "a.csv").unlink()
    assert as_tensor(Federation.from_folder(tmp_path).targets).dtype == torch.int64


def test_arrays_that_are_no_numbers_are_named_with_their_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=np.zeros((2, 1)), targets=np.array(["cat", "dog"]))
    with pytest.raises(InputError, match=r"a\.npz cannot be read"):
        Federation.from_folder(tmp_path)


def test_owners_and_names_must_fit_together() -> None:
    x, y = torch.zeros(4, 1), torch.zeros(4)
    with pytest.raises(InputError, match="indices of the 2 names"):
        Federation.from_owners(x, y, [0, 1, 2, 2], names=["a", "b"])
    with pytest.raises(InputError, match="do not match"):
        Federation.from_owners(x, y, [0, 1], names=["a", "b"])
    with pytest.raises(InputError, match="'a' is named twice"):
        Federation.from_owners(x, y, [0, 1, 1, 0], names=["a", "a"])


def test_a_folder_that_is_none_or_names_a_client_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        Federation.from_folder(tmp_path / "nowhere")
    np.savez(tmp_path / "a.npz", inputs=np.zeros((2, 1)), targets=np.zeros(2))
    (tmp_path / "a.csv").write_text("x,target\n1,0\n")
    with pytest.raises(InputError, match="client 'a' has several files"):
        Federation.from_folder(tmp_path)
    (tmp_path / "a.csv").unlink()
    np.savez(tmp_path / "b.npz", inputs=np.zeros((2, 1)))
    with pytest.raises(InputError, match=r"b.npz has no array 'targets'; it has inputs"):
        Federation.from_folder(tmp_path)


def test_a_federation_is_shown_in_a_line() -> None:
    federation = Federation.from_clients([(torch.zeros(n, 3), torch.zeros(n)) for n in (5, 10)], name="two")
    assert (
        repr(federation) == "<Federation 'two': 2 clients, 12 + 3 samples, float32 of shape (3,) per sample>"
    )
