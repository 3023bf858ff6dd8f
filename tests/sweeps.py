"""A small study by the command `sweep`, and all that it found."""

import json
from pathlib import Path
from typing import Any

from fairwind.runs.files import CLIENTS, RESULTS

STUDY = """
title = "Stored"
charts = []

[[grid]]
setups = ["synthetic:clients=4,features=5,classes=3"]
algorithms = ["fedavg", "adafedadam"]
seeds = [0]
rounds = 2
eval_every = 1
"""
PACKED = "history.jsonl.gz"
FILES = CLIENTS, PACKED, RESULTS


def words(folder: Path) -> tuple[object, ...]:
    """The command, whose study and results are in a folder."""
    return "sweep", folder / "fair.toml", "--out", folder, "--device", "cpu", "--compile", "off"


def numbers(folder: Path) -> dict[str, Any]:
    """All that the runs and the page hold, to the bit, without when and how fast."""
    (run,) = (folder / "runs").iterdir()
    results = json.loads((run / RESULTS).read_bytes())
    del results["timing"], results["sha256"], results["environment"]
    page = json.loads((folder / "fair" / "study.json").read_bytes())
    for panel in page["panels"]:
        del panel["comparisons"]
    assert sorted(file.name for file in run.iterdir()) == sorted(FILES)
    return {
        "results": results,
        "page": page,
        "tables": (folder / "fair" / "tables.tex").read_bytes(),
        **{name: (run / name).read_bytes() for name in (CLIENTS, PACKED)},
    }
