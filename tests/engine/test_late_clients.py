"""What only a late client has is found before training, and named; clients without samples cost nothing."""

import pytest
import torch
from torch import Tensor, nn

from fairwind import Federation, InputError, Score, Task, evaluate, simulate
from fairwind.engine.settings import Engine


class Reader(nn.Module):
    """Classifies by the mean of embeddings, and refuses batches without samples as some layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 3), nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.table(ids.long()).mean(1))
        return found


class Lookup(nn.Module):
    """The same without a layer of PyTorch's; and one more table, of the first column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.first = nn.Parameter(torch.randn(10, 2)), nn.Parameter(torch.randn(5, 2))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids].mean(1) + self.first[ids[:, 0]]


def texts(late: list[int], dtype: torch.dtype = torch.int64) -> Federation:
    """Three clients, of which the last has a sample of these ids."""
    ids = torch.tensor([[0, 1, 2], [4, 5, 9]] * 4).to(dtype)
    part = ids, torch.tensor([0, 1] * 4)
    more = torch.cat([ids, torch.tensor([late]).to(dtype)]), torch.tensor([0, 1] * 4 + [0])
    clients = {name: {"train": part, "test": part} for name in ("ann", "bob")}
    return Federation.from_clients({**clients, "cy": {"train": more, "test": part}})


@pytest.mark.parametrize("engine", ["stacked", "loop"])
@pytest.mark.parametrize(
    ("model", "late", "dtype"),
    [
        (Reader, [1, 2, 10], torch.int64),
        (Reader, [1, 2, 10], torch.uint8),
        (Reader, [1, -1, 3], torch.int32),
        (Reader, [1, 2, 10], torch.float32),
        (Lookup, [1, 2, 10], torch.int64),
        (Lookup, [5, 2, 1], torch.int64),  # within the one table, and beyond that of its column
    ],
)
def test_a_token_beyond_the_table_is_refused_by_its_client(
    model: type[nn.Module], late: list[int], dtype: torch.dtype, engine: Engine
) -> None:
    federation = texts(late, dtype)
    for given in (federation, federation.with_new_clients(["cy"])):
        with pytest.raises(InputError, match=r"client 'cy': the model cannot take .* an id must be from 0"):
            simulate(Task(model(), given), "fedavg", rounds=1, engine=engine)
    with pytest.raises(InputError, match="client 'cy': the model cannot take"):
        evaluate(model(), federation, part="train")
    assert evaluate(model(), federation).score.isfinite().all()
    right = Task(model(), texts([1, 2, 3], dtype))
    assert simulate(right, "fedavg", rounds=1, engine=engine).score.isfinite().all()


def test_a_label_beyond_the_outputs_of_a_new_client_is_refused_before_training() -> None:
    x = torch.randn(5, 3)
    federation = Federation.from_clients({"ann": (x, [0, 1, 0, 1, 0]), "bob": (x, [0, 1, 2, 2, 2])})
    with pytest.raises(InputError, match="client 'bob' has label 2, but the model has 2 outputs"):
        simulate(Task(nn.Linear(3, 2), federation.with_new_clients(["bob"])), "fedavg", rounds=1)


class Strict(nn.Module):
    """Refuses an empty batch, as an LSTM or a batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(3, 60_000), nn.Linear(60_000, 3)  # few samples make a batch

    def forward(self, x: Tensor) -> Tensor:
        assert x.numel()
        out: Tensor = self.head(self.wide(x))
        return out


@pytest.mark.parametrize("engine", ["stacked", "loop"])
@pytest.mark.parametrize("untested", [[0], [0, 1], [3], [0, 2, 3]])
def test_clients_without_test_samples_are_in_no_batch(untested: list[int], engine: Engine) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 3, generator=draw), torch.tensor([0, 1, 2] * 40)
    parts = {"train": (x[:3], y[:3]), "validation": (x[3:4], y[3:4])}
    clients = [parts if k in untested else {**parts, "test": (x[4:], y[4:])} for k in range(4)]
    task = Task(Strict(), Federation.from_clients(clients))
    result = simulate(task, "fedavg", rounds=1, engine=engine)
    assert result.score.isnan().nonzero()[:, 0].tolist() == untested
    assert result.loss.isnan().nonzero()[:, 0].tolist() == untested
    found = evaluate(result.model, task)
    torch.testing.assert_close(found.score, result.score, equal_nan=True, check_dtype=False)


def test_a_score_of_clients_in_float32_trains() -> None:
    x, y = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    federation = Federation.from_clients([(x, y), (x, y)])
    most = Score("most", lambda o, t: o.amax(1), per_client=lambda v, n: v.amax(1).expand(-1, len(n)).float())
    result = simulate(Task(nn.Linear(3, 2), federation, score=most), "fedavg", rounds=1)
    assert result.score.isfinite().all()
