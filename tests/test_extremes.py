"""Numbers that nobody means: one line each, and no traceback."""

from pathlib import Path

import pytest

from command import refused, succeeded


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "1e300"], "memory=1e+300 is out of range"),
        (["--memory", "0"], "memory=0"),
        (["--batch-size", "99999999999999999999"], "batch_size=99999999999999999999 is out of range"),
        (["--algorithms", "fedyogi:eps=1e30"], "eps=1e+30 is out of range"),
        (["--clients", "1000000000"], "clients=1000000000 is out of range"),
        (["--workers", "0"], "workers=0"),
        (["--clip", "-1"], "clip=-1"),
        (["--solver", "adam", "--algorithms", "fednova"], "fednova divides by its clients' steps"),
    ],
)
def test_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    assert message in refused("compare", "synthetic", "--out", tmp_path / "run", "--rounds", "1", *words)


@pytest.mark.slow
def test_a_budget_too_small_for_a_row_trains_one_row_after_another(tmp_path: Path) -> None:
    words = ["--clients", "2", "--rounds", "1", "--seeds", "0", "--memory", "1e-9", "--algorithms", "fedavg"]
    words += ["--compile", "off"]
    succeeded("compare", "synthetic", "--out", tmp_path / "run", *words)
