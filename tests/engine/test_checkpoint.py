import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fairwind.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint


def checkpoint(round: int) -> Checkpoint:
    return Checkpoint(round, {"x": torch.full((3,), float(round))}, {"history": [round, 0.1 + 0.2, None]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for round in (10, 20, 30):
        save_checkpoint(tmp_path, checkpoint(round), "me")
    return tmp_path


def test_the_newest_is_loaded_as_it_was(folder: Path) -> None:
    found, refused = load_checkpoint(folder, "me")
    assert found is not None
    assert found.round == 30
    assert torch.equal(found.tensors["x"], torch.full((3,), 30.0))
    assert found.record == {"history": [30, 0.1 + 0.2, None]}
    assert refused == []


def test_tensors_that_are_one_or_a_view_are_saved(tmp_path: Path) -> None:
    """At round 0 a server's state may hold one tensor under several names."""
    one, whole = torch.ones(()), torch.arange(6.0).view(2, 3)
    tensors = {"a": one, "b": one, "row": whole[0], "column": whole[:, 1]}
    save_checkpoint(tmp_path, Checkpoint(0, tensors, {}), "me")
    found, _ = load_checkpoint(tmp_path, "me")
    assert found is not None
    assert {name: t.tolist() for name, t in found.tensors.items()} == {
        **{"a": 1.0, "b": 1.0},
        **{"row": [0.0, 1.0, 2.0], "column": [1.0, 4.0]},
    }


def test_only_the_newest_two_are_kept(folder: Path) -> None:
    assert sorted(p.name for p in folder.iterdir()) == [
        "0000020.json",
        "0000020.safetensors",
        "0000030.json",
        "0000030.safetensors",
    ]


def spoil_tensor(folder: Path) -> None:
    path = folder / "0000030.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate_tensor(folder: Path) -> None:
    path = folder / "0000030.safetensors"
    path.write_bytes(path.read_bytes()[:20])


def remove_tensor(folder: Path) -> None:
    (folder / "0000030.safetensors").unlink()


def change_a_digit(folder: Path) -> None:
    path = folder / "0000030.json"
    path.write_text(path.read_text().replace("0.30000000000000004", "0.40000000000000004"))


def truncate_record(folder: Path) -> None:
    path = folder / "0000030.json"
    path.write_bytes(path.read_bytes()[:30])


def change_owner(folder: Path) -> None:
    path = folder / "0000030.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"owner": "someone else"}))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_tensor, "SHA-256"),
        (truncate_tensor, "SHA-256"),
        (remove_tensor, "No such file"),
        (change_a_digit, "SHA-256"),
        (truncate_record, "not JSON"),
        (change_owner, "other settings"),
    ],
)
def test_a_damaged_or_foreign_one_is_refused_and_the_one_before_used(
    folder: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    spoil(folder)
    found, refused = load_checkpoint(folder, "me")
    assert found is not None
    assert found.round == 20
    assert len(refused) == 1
    assert "0000030" in refused[0]
    assert reason in refused[0]


def test_a_write_cut_short_is_not_taken_for_a_checkpoint(folder: Path) -> None:
    (folder / ".0000040.json.partial").write_text("{")
    (folder / "0000040.safetensors").write_bytes(b"half of it")  # the JSON that vouches never came
    found, refused = load_checkpoint(folder, "me")
    assert found is not None
    assert found.round == 30
    assert refused == []


def test_what_is_newer_than_a_saved_round_or_half_written_is_cleared_away(folder: Path) -> None:
    """After going back to round 20, a damaged round 30 must not push out good ones."""
    spoil_tensor(folder)
    (folder / ".0000040.json.partial").write_text("{")
    (folder / "0000040.safetensors").write_bytes(b"half of it")
    save_checkpoint(folder, checkpoint(25), "me")
    assert sorted(p.stem for p in folder.iterdir()) == ["0000020", "0000020", "0000025", "0000025"]
    found, _ = load_checkpoint(folder, "me")
    assert found is not None
    assert found.round == 25


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "none", "me") == (None, [])
