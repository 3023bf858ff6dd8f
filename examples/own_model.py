"""Your own module and data: five hospitals with different patients, one fair model."""

import torch
from torch import nn

import fairwind as fw

torch.manual_seed(0)
rule = torch.randn(8, 3)
hospitals = []
for k in range(5):
    x = torch.randn(40 * (k + 1), 8) + torch.randn(8)  # each hospital sees other patients
    hospitals.append((x, (x @ rule).argmax(1)))

federation = fw.Federation.from_clients(hospitals, names=["Oslo", "Turku", "Uppsala", "Aarhus", "Reykjavík"])
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
task = fw.Task(model, federation, rounds=100)
result = fw.simulate(task, "adafedadam")

print({name: f"{value:.1f}" for name, value in result.metrics.items() if name in ("avg", "std", "worst30")})
print(dict(zip(federation.names, result.score.round().int().tolist(), strict=True)))
model.load_state_dict(result.state_dict)
