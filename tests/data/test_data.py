import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fairwind import Federation, InputError, Task, simulate
from fairwind.data.synthetic import synthetic, synthetic_li
from fairwind.report import write_labels
from fairwind.robust.attacks import build_attack
from samples import as_tensor


def client(n: int, features: int = 3) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(n * features, dtype=np.float32).reshape(n, features), np.arange(n) % 2


def test_samples_stay_with_their_client_and_are_split_8_to_2() -> None:
    sizes = [1, 2, 4, 5, 9, 10, 100]
    parts = [(np.full((n, 1), k, dtype=np.float32), np.full(n, k)) for k, n in enumerate(sizes)]
    federation = Federation.from_clients(parts)
    assert federation.train.tolist() == [1, 1, 3, 4, 7, 8, 80]
    assert (federation.train + federation.test).tolist() == sizes
    for k, (start, n) in enumerate(zip(federation.start.tolist(), sizes, strict=True)):
        assert (as_tensor(federation.inputs)[start : start + n] == k).all()
        assert (as_tensor(federation.targets)[start : start + n] == k).all()


def test_the_split_keeps_pairs_together_and_follows_the_seed() -> None:
    x = torch.arange(50)[:, None].float()
    federations = [Federation.from_clients([(x, torch.arange(50))], seed=s) for s in (0, 0, 1)]
    for f in federations:
        assert torch.equal(as_tensor(f.inputs)[:, 0].long(), as_tensor(f.targets))
        assert sorted(as_tensor(f.targets).tolist()) == list(range(50))
    assert torch.equal(as_tensor(federations[0].targets), as_tensor(federations[1].targets))
    assert not torch.equal(as_tensor(federations[0].targets), as_tensor(federations[2].targets))


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "at least one client"),
        ([client(4), client(0)], "client '1' has no training samples"),
        ([(np.array([[1.0], [np.nan]]), np.array([0, 1]))], "client '0': inputs of sample 1 hold NaN"),
        ([(np.zeros((3, 1)), np.array([0.0, np.inf, 1.0]))], "targets of sample 1 hold NaN or infinity"),
        ([(np.zeros((3, 1)), np.zeros(2))], "differ in length"),
        ([client(3), client(3, features=4)], "client '1': inputs are float32 of shape \\(4,\\)"),
    ],
)
def test_bad_data_is_refused_by_client(clients: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Federation.from_clients(clients)


@pytest.mark.parametrize("label", [-1, 2, 7])
def test_labels_without_an_output_are_refused_by_client(label: int) -> None:
    x, y = client(6)
    y = y.copy()
    y[3] = label
    federation = Federation.from_clients([client(6), (x, y)], names=["ann", "bob"])
    with pytest.raises(InputError, match=f"client 'bob' has label {label}, but the model has 2 outputs"):
        simulate(Task(nn.Linear(3, 2), federation), "fedavg", rounds=1)


def test_leaf_synthetic_is_leafs() -> None:
    federation = synthetic()
    assert len(federation) == 100
    assert as_tensor(federation.inputs).shape[1] == 60
    assert federation.classes == 10
    assert set(as_tensor(federation.targets).unique().tolist()) <= set(range(10))  # type: ignore[no-untyped-call]
    sizes = federation.train + federation.test
    assert sizes.min() >= 5
    assert sizes.max() <= 1000
    many = synthetic(clients=20_000, features=1)
    sizes = (many.train + many.test).double()
    assert sizes.median().item() == pytest.approx(np.exp(3) + 5, rel=0.05)  # LogNormal(3, 2) + 5
    assert (sizes == 1000).double().mean().item() == pytest.approx(0.0257, abs=0.005)  # P(LogNormal > 995)


def test_leaf_synthetic_inputs_vary_less_in_later_features() -> None:
    federation = synthetic(clients=30, sizes="li")
    k = int(federation.train.argmax())
    start, n = int(federation.start[k]), int(federation.train[k])
    spread = as_tensor(federation.inputs)[start : start + n].std(0)
    expected = torch.arange(1, 61) ** -0.6
    torch.testing.assert_close(spread, expected, rtol=0.2, atol=0)


@pytest.mark.parametrize("beta", [0.0, 3.0])
def test_li_synthetic_has_lis_sizes_and_inputs_that_differ_by_beta(beta: float) -> None:
    federation = synthetic_li(beta=beta, clients=400)
    sizes = federation.train + federation.test
    assert sizes.min() >= 50
    assert sizes.double().median().item() == pytest.approx(np.exp(4) + 50, rel=0.15)  # LogNormal(4, 2) + 50
    means = torch.stack([part.mean() for part in torch.split(as_tensor(federation.inputs), sizes.tolist())])
    assert means.std().item() == pytest.approx(np.sqrt(beta**2 + 1 / 60), rel=0.15)  # B_k, and v_k's own mean


def digest(federation: Federation) -> str:
    rounded = (as_tensor(federation.inputs).double() * 1000).round().to(torch.int32)
    parts = rounded, as_tensor(federation.targets), federation.train, federation.start
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in parts)).hexdigest()[:16]


def test_synthetic_is_the_same_on_every_machine() -> None:
    """The inputs are compared to three decimals: the last bits may follow the processor."""
    assert digest(synthetic()) == "ad1601d775ce185b"
    assert digest(synthetic_li()) == "45cb13b0240f7c42"


@pytest.mark.parametrize("bad", [{"clients": 0}, {"classes": 1}, {"sizes": "other"}, {"seed": -1}])
def test_parameters_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        synthetic(**bad)


def labelled(*labels: list[int], classes: int, **options: Any) -> Federation:
    clients = {str(k): (torch.zeros(len(each), 2), each) for k, each in enumerate(labels)}
    return Federation.from_clients(clients, classes=classes, train=1.0, **options)


def test_labels_that_are_no_class_are_not_counted(tmp_path: Path) -> None:
    federation = labelled([0, 1, -100], [2, 2, 7], [-100, 255], classes=3)
    assert federation.label_counts().tolist() == [[1, 1, 0], [0, 0, 2], [0, 0, 0]]
    assert len(write_labels(tmp_path, federation)) == 3
    page = (tmp_path / "labels.html").read_text()
    assert "In the median client 75\u00a0% of the samples share one label" in page
    assert "nan" not in page.partition("<script")[0]
    nothing = labelled([-100], [7], classes=3)
    write_labels(tmp_path, nothing)
    assert "No label is that of a class" in (tmp_path / "labels.html").read_text()


def test_labels_of_all_positions_of_a_sample_are_counted() -> None:
    samples = torch.zeros(2, 3), torch.tensor([[0, 1, -100], [1, 1, 0]])
    federation = Federation.from_clients([samples, samples], classes=2)
    assert federation.label_counts().tolist() == [[2, 3], [2, 3]]


def test_targets_that_are_no_labels_have_no_page_of_labels(tmp_path: Path) -> None:
    samples = torch.zeros(2, 3), torch.zeros(2)
    federation = Federation.from_clients([samples], classes=2)
    assert write_labels(tmp_path, federation) == []
    with pytest.raises(InputError, match="no class labels"):
        federation.label_counts()


def test_classes_without_a_name_are_shown_by_their_number(tmp_path: Path) -> None:
    federation = replace(labelled([0, 2], [1, 2], classes=3), class_names=("cat", "dog"))
    write_labels(tmp_path, federation)
    assert '"label":"dog"' in (page := (tmp_path / "labels.html").read_text().replace(" ", ""))
    assert '"label":"2"' in page


def test_liars_leave_labels_that_are_no_class() -> None:
    attack = build_attack("labelflip:share=0.5")
    honest = Federation.from_clients([(torch.zeros(4, 2), [0, 1, 2, -100])] * 2, classes=3)
    flipped = attack.poisoned(honest).targets
    assert sorted(set(as_tensor(flipped).tolist())) == [-100, 0, 1, 2]
