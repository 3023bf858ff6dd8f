"""`benchmarks/liars.py` trains all of its cases at once: each is what a comparison alone trains."""

from typing import Any

import pytest
import torch

import fairwind as fw
from liars import ATTACKS, DEFENCES, SETUP, Case, Study, attacked, measured

pytest.importorskip("flwr")

CASES = [
    Case("fedavg", "none", "sign-flip"),
    Case("fedavg", "trimmed", "inflated"),
    Case("adafedadam", "clipping", "noise"),
    Case("adafedadam", "multikrum", "sign-flip"),
]
OPTIONS: dict[str, Any] = {"rounds": 5, "eval_every": 5, "progress": False, "device": "cpu"}


def trained(spec: str, attack: str | None, defence: str | None) -> torch.Tensor:
    result = fw.simulate(
        fw.setup(SETUP), spec, seed=1, attack=attacked(attack, 0.3, 1), defence=defence, **OPTIONS
    )
    return torch.cat([value.reshape(-1) for value in result.state_dict.values()])


def test_a_case_is_what_a_comparison_trains() -> None:
    study = Study(CASES, 1, 0.3, None, 5)
    study.run()
    for case, x in zip(CASES, study.x, strict=True):
        alone = trained(case.algorithm, ATTACKS[case.attack], DEFENCES[case.defence])
        torch.testing.assert_close(x, alone, rtol=1e-3, atol=1e-5)
    relabelled = Study([Case("fedavg", "median", "label flip")], 1, 0.3, "labelflip", 5)
    relabelled.run()
    torch.testing.assert_close(
        relabelled.x[0], trained("fedavg", "labelflip", "median"), rtol=1e-3, atol=1e-5
    )


def test_flowers_average_of_honest_clients_is_fedavgs() -> None:
    study = Study([Case("Flower", "FedAvg", "none"), Case("Flower", "FedMedian", "none")], 1, 0.0, None, 5)
    study.run()
    torch.testing.assert_close(study.x[0], trained("fedavg", None, None), rtol=1e-3, atol=1e-5)
    assert study.x[1].ne(study.x[0]).any()


def test_liars_change_what_is_measured_and_are_not_scored() -> None:
    pytest.importorskip("flwr")
    rows = {
        (row["algorithm"], row["defence"], row["attack"]): row for row in measured(0.1, 0, 2, ("fedavg",))
    }
    assert len(rows) == 2 * (len(DEFENCES) + 4)
    assert rows["Flower", "FedMedian", "inflated"]["avg"] != rows["Flower", "FedMedian", "sign-flip"]["avg"]
