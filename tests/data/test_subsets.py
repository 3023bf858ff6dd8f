"""Some of the clients, clients held out, and all data in one place."""

import pytest
import torch

import fairwind as fw
from conftest import make_federation
from fairwind import Federation, InputError
from fairwind.runs.schema import Part

SIZES = [30, 12, 60, 25, 18, 40, 90, 15]
PARTS: tuple[Part, ...] = ("train", "validation", "test")


def samples(federation: Federation, client: int, part: Part) -> torch.Tensor:
    start, size = federation.part(part)
    assert isinstance(federation.inputs, torch.Tensor)
    return federation.inputs[int(start[client]) : int(start[client] + size[client])]


def test_some_clients_keep_their_parts_names_and_groups() -> None:
    whole = make_federation(SIZES).with_validation(0.2)
    grouped = Federation(**{**vars(whole), "groups": tuple("abababab")})
    chosen = torch.tensor([6, 1, 4])
    some = grouped.of_clients(chosen)
    assert some.names == ("6", "1", "4")
    assert some.groups == ("a", "b", "a")
    for i, k in enumerate(chosen.tolist()):
        for part in PARTS:
            assert torch.equal(samples(some, i, part), samples(grouped, k, part))


def test_clients_that_are_held_out_are_drawn_by_the_seed() -> None:
    whole = make_federation(SIZES)
    old, new = whole.held_out(0.25)
    assert len(old) == 6
    assert len(new) == 2
    assert sorted((*old.names, *new.names)) == sorted(whole.names)
    assert whole.held_out(0.25)[1].names == new.names
    assert {whole.held_out(0.25, seed)[1].names for seed in range(8)} != {new.names}
    for share in (0.0, 1.0, 0.01):
        with pytest.raises(InputError, match="new_clients"):
            whole.held_out(share)


def test_new_clients_are_no_part_of_the_federation() -> None:
    whole = make_federation(SIZES)
    federation = whole.with_new_clients(["2", "5"])
    old, new = whole.held_out(["2", "5"])
    assert federation.names == old.names
    assert federation.new_clients is not None
    assert federation.new_clients.digest() == new.digest()
    assert federation.describe()["new_clients"] == 2
    assert "6 clients and 2 new" in repr(federation)
    assert len({each.digest() for each in (whole, old, federation, whole.with_new_clients(["2"]))}) == 4
    for other in (
        federation.pooled(),
        federation.with_validation(0.2).for_choosing(),
        federation.held_out(0.5)[0],
    ):
        assert other.new_clients is None
    clients = [(samples(whole, k, "train"), torch.zeros(int(whole.train[k]))) for k in range(len(whole))]
    made = Federation.from_clients(clients, new_clients=0.25, validation=0.2)
    assert made.names == whole.held_out(0.25)[0].names
    assert made.validation.any()
    assert made.new_clients is not None
    setup = fw.setup("synthetic:clients=10,new_clients=0.3").federation
    assert (len(setup), setup.new_clients and len(setup.new_clients)) == (7, 3)


def test_the_data_in_one_place_is_all_training_samples() -> None:
    whole = make_federation(SIZES).with_validation(0.2)
    pooled = whole.pooled()
    assert pooled.train.tolist() == [int(whole.train.sum())]
    assert not pooled.test.any()
    wanted = torch.cat([samples(whole, k, "train") for k in range(len(whole))])
    assert torch.equal(samples(pooled, 0, "train"), wanted)


def test_choosing_sees_no_test_sample() -> None:
    whole = make_federation(SIZES).with_validation(0.2)
    choosing = whole.for_choosing()
    assert choosing.samples == int((whole.train + whole.validation).sum())
    for k in range(len(whole)):
        assert torch.equal(samples(choosing, k, "test"), samples(whole, k, "validation"))
        assert torch.equal(samples(choosing, k, "train"), samples(whole, k, "train"))
    with pytest.raises(InputError, match="no validation samples"):
        make_federation(SIZES).for_choosing()
