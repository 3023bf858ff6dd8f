"""A folder with a file for each client: what hospitals might hand over, as CSV."""

import csv
import tempfile
from pathlib import Path

import torch
from torch import nn

import fairwind as fw

torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    for name, size in {"Oslo": 50, "Turku": 90, "Uppsala": 140, "Aarhus": 200}.items():
        x = torch.randn(size, 4) + torch.randn(4)
        with open(Path(folder) / f"{name}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["age", "pressure", "glucose", "weight", "target"])  # `target` is the label
            rows.writerows([*row.tolist(), int(row[0] + row[2] > 0)] for row in x)

    federation = fw.Federation.from_folder(folder)

model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
task = fw.Task(model, federation, rounds=60)
result = fw.simulate(task, "adafedadam")
print(dict(zip(federation.names, result.score.round().int().tolist(), strict=True)))
