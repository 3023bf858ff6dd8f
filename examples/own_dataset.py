"""A Hugging Face dataset, cut by a partitioner of flwr-datasets (pip install 'fairwind[data]' flwr-datasets).

With the hub in reach the dataset would be `datasets.load_dataset("ylecun/mnist", split="train")`, say.
"""

import numpy as np
from datasets import Dataset, Features, Image, Value
from flwr_datasets.partitioner import NaturalIdPartitioner
from torch import nn

import fairwind as fw

draw = np.random.default_rng(0)
cities, shades = ["Oslo", "Turku", "Uppsala"], []
for i in range(600):  # pictures whose bright half is the label, on a background of the city's own
    picture = draw.integers(0, 60 + 40 * (i % 3), (8, 8))
    picture[:, 4 * (i % 2) : 4 * (i % 2) + 4] += 100
    shades.append(picture.astype(np.uint8))
columns = {"image": shades, "label": [i % 2 for i in range(600)], "city": [cities[i % 3] for i in range(600)]}
kinds = Features({"image": Image(), "label": Value("int64"), "city": Value("string")})
dataset = Dataset.from_dict(columns, features=kinds)

partitioner = NaturalIdPartitioner(partition_by="city")  # or DirichletPartitioner, ShardPartitioner, …
partitioner.dataset = dataset
federation = fw.Federation.from_partitioner(partitioner, inputs="image", targets="label")

model = nn.Sequential(
    fw.models.Pixels(), nn.Flatten(), nn.Linear(64, 2)
)  # bytes on the device, 0 to 1 in the step
task = fw.Task(model, federation, rounds=60)
result = fw.simulate(task, "adafedadam")
print(dict(zip(federation.names, result.score.round().int().tolist(), strict=True)))
