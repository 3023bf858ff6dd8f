"""The commands on prepared data, as a user types them."""

import json
from pathlib import Path

import pytest

import layouts
from command import refused, succeeded

FAST = ("--rounds", 1, "--seeds", 0, "--algorithms", "adafedadam")

CASES = {
    "femnist": layouts.femnist_parquet,
    "cifar10:clients=3,beta=1": lambda folder: layouts.cifar_parquet(folder, n=12),
    "cifar10-features:clients=3,beta=1": layouts.cifar_parquet,
    "sent140:clients=3": layouts.sent140_csv,
}


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=[pytest.mark.slow] * (spec != "femnist")) for spec in CASES]
)
def test_every_setup_is_prepared_and_compared(tmp_path: Path, spec: str) -> None:
    folder, cache, out = CASES[spec](tmp_path / "in"), tmp_path / "cache", tmp_path / "out"
    said = succeeded("data", spec, "--data-dir", folder, "--cache", cache).stdout
    manifest = json.loads(next(cache.glob("*/manifest.json")).read_text())
    assert f"clients {len(manifest['clients'])} " in " ".join(said.split())
    assert manifest["digest"][:16] in said
    for name in ("labels.html", "labels.pdf", "labels.png"):
        assert (next(cache.iterdir()) / name).stat().st_size > 1000
    done = succeeded("compare", spec, "--cache", cache, *FAST, "--out", out)
    assert "a subset" in done.stderr
    results = json.loads((out / "results.json").read_text())
    assert results["federation"]["digest"] == manifest["digest"]
    assert str(tmp_path) not in json.dumps(results)
    assert json.loads((out / "recipe.json").read_text())["data"] == manifest["digest"]
    assert (out / "report.html").exists()


@pytest.mark.slow
def test_random_vectors_are_announced_and_given_ones_used(tmp_path: Path) -> None:
    folder, cache = layouts.sent140_csv(tmp_path / "in"), tmp_path / "cache"
    options = ("--data-dir", folder, "--cache", cache, *FAST)
    said = succeeded("compare", "sent140:clients=3", *options, "--out", tmp_path / "a").stderr
    assert "no word vectors given: random ones, trained with the model" in said
    given = ("--glove", layouts.glove(tmp_path / "g"), "--out", tmp_path / "b")
    said = succeeded("compare", "sent140:clients=3", *options, *given).stderr
    assert "7 words have vectors" in said
    layouts.glove(folder)  # beside the tweets it is found by itself
    said = succeeded("compare", "sent140:clients=3", *options, "--out", tmp_path / "c").stderr
    assert "7 words have vectors" in said


@pytest.mark.slow
def test_a_comparison_prepares_what_it_needs_and_resumes_on_the_same_data(tmp_path: Path) -> None:
    folder, cache, out = layouts.femnist_parquet(tmp_path / "in"), tmp_path / "cache", tmp_path / "out"
    options = ("femnist", "--clients", 2, "--data-dir", folder, "--cache", cache, *FAST)
    succeeded("compare", *options, "--out", out)
    whole = json.loads((out / "results.json").read_text())
    assert whole["federation"]["clients"] == 2
    (out / "results.json").unlink()
    for file in (out / "checkpoints").iterdir():
        file.unlink()  # back to round 0
    layouts.femnist_parquet(folder, layouts.characters(layouts.WRITERS, seed=5))  # another source now
    succeeded("resume", out)
    assert json.loads((out / "results.json").read_text())["runs"] == whole["runs"]

    (out / "results.json").unlink()
    moved = tmp_path / "elsewhere"
    cache.rename(moved)
    message = refused("resume", out)
    assert "is not in" in message
    assert f"fairwind data femnist:clients=2 --data-dir {folder} --cache {cache}" in message
    succeeded("resume", out, "--cache", moved)


def test_help_says_where_data_comes_from() -> None:
    said = succeeded("data", "--help").stdout
    for word in ("--data-dir", "--glove", "--cache", "--clients", "hub"):
        assert word in said
    assert "data" in succeeded("--help").stdout
