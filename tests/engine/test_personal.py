"""Parts of a model that stay with each client, and batch norm: the loop against one in plain PyTorch."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batches import client_batches
from fairwind import Federation, InputError, Solver, algorithms
from fairwind.engine.layout import BatchNorm, Division, Sharing
from fairwind.engine.simulation import Simulation
from own_parts import (
    SIDE,
    SOLVER,
    cumulative_cnn,
    fedavg_by_hand,
    loss_of_test,
    pictures,
    simulated,
    small_cnn,
    step,
)
from zoo import resnet18

RAGGED, FULL = pictures([9, 8, 3, 21]), pictures([8, 12, 4, 16])
ROUNDS = 3


def in_norms(name: str) -> bool:
    return name.partition(".")[0] in "16"


def probed(made: Simulation, run: int) -> Tensor:
    """F_k and ‖∇F_k‖ of each client (K, 2), as the executor reports them in the next round."""
    copies = copy.deepcopy(made.own)
    made.executor.prepare(made.round)
    found = torch.full((len(made.federation), 2), torch.nan, dtype=torch.float64)
    for updates in made.executor.updates(made.x, made.loss0, made._shared, {}):
        if updates.run == run:
            found[updates.client] = torch.stack([updates.report.loss, updates.report.grad_norm], 1)
    vars(made.own).update(vars(copies))
    return found


def nothing(name: str) -> bool:
    return False


def in_head(name: str) -> bool:
    return name.startswith("8.")


CASES: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "local": ({"batch_norm": "local"}, in_norms),
    "shared": ({"batch_norm": "shared"}, nothing),
    "recomputed": ({"batch_norm": "recomputed"}, nothing),
    "by type": ({"personal": (nn.BatchNorm1d, nn.BatchNorm2d)}, in_norms),
    "head, shared": ({"personal": "8.*", "batch_norm": "shared"}, in_head),
    "head, local": ({"personal": "8.*", "batch_norm": "local"}, lambda n: in_head(n) or in_norms(n)),
    "body": ({"personal": lambda name, p: name[0] in "01", "batch_norm": "shared"}, lambda n: n[0] in "01"),
}


FEDERATED = [spec for spec in algorithms.REGISTRY if spec != "pooled"]  # which has no clients


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize("case", ["local", "shared", "recomputed", "head, shared"])
@pytest.mark.parametrize("spec", [*FEDERATED, "worst_first", "by_angle", "scaled"])
def test_every_algorithm_has_a_personal_form(spec: str, case: str) -> None:
    """It sees the shared part alone; resumed, it goes on bit for bit."""
    options = CASES[case][0]
    made, again = (simulated(RAGGED, [spec], seeds=(0, 1), **options) for _ in range(2))
    for t in range(4):
        made.step()
        if t == 1:
            again.restore(made.checkpoint())
        if t > 1:
            again.step()
    assert made.stalled.tolist() == [0, 0]
    whole, parts = made.checkpoint().tensors, again.checkpoint().tensors
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        assert same(value, parts[name]), name
    assert made.history == again.history
    assert torch.isfinite(made.loss).all()
    if made.own.kept and spec != "local":  # whose models are whole
        own = made.own.memories.values[1]
        assert not torch.equal(own[0], own[1])
    alone = simulated(RAGGED, [spec], seeds=(1,), **options)
    alone.restore(made.checkpoint_of([1]))
    for name, value in alone.checkpoint().tensors.items():
        assert same(value, made.checkpoint_of([1]).tensors[name])
    joined = made.checkpoint_from([(made.checkpoint_of([r]), [r]) for r in (1, 0)])
    assert joined.tensors.keys() == whole.keys()
    for name, value in joined.tensors.items():
        assert same(value, whole[name])


STACKED = ("fedavg", "measured", "scaled", "scaffold", "mimelite", "mime", "ditto", "afl", "by_angle")


@pytest.mark.parametrize("model", [small_cnn, cumulative_cnn])
@pytest.mark.parametrize("case", CASES)
def test_stacked_rows_give_the_loops_numbers(case: str, model: Any) -> None:
    """In chunks, too; with probes of some samples, and clients that miss rounds."""
    options = CASES[case][0] | {"model": model, "clients_per_round": 3, "probe_samples": 6}
    names = STACKED if case == "head, local" else ("measured", "mime", "ditto")
    loop = simulated(RAGGED, [*names], **options)
    for more in ({}, {"memory": 2e-4}):
        stacked = simulated(RAGGED, [*names], engine="stacked", **options | more)
        if not more:
            torch.testing.assert_close(stacked.loss0, loop.loss0, equal_nan=True)
        for _ in range(ROUNDS):
            if not more:
                loop.step()
            stacked.step()
        expected = loop.checkpoint().tensors
        for name, value in stacked.checkpoint().tensors.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-9, equal_nan=True)


def test_dittos_and_lone_models_keep_all_of_the_model() -> None:
    """Alone, a client trains as it would by hand; Ditto with λ = 0 does the same beside FedAvg."""
    made = simulated(RAGGED, ["local", "ditto:lam=0"], batch_norm="local")
    start = {name: value.clone() for name, value in made.plain.state_dict(made.plain.first).items()}
    for _ in range(2):
        made.step()
    for k in range(len(RAGGED)):
        model = small_cnn()
        model.load_state_dict(start)
        for t in range(2):
            for samples in client_batches(made.planner, [0], t, k):
                step(model, *RAGGED.at(torch.tensor(samples)), SOLVER)
        for i, view in enumerate(made.views):
            if view.model == "personal":
                state = made.state_dict(i)
                for name, value in model.state_dict().items():
                    torch.testing.assert_close(state[name][k], value, rtol=1e-9, atol=1e-10)


def test_clients_that_never_trained_are_evaluated_with_the_mean_part() -> None:
    made = simulated(RAGGED, ["fedavg"], personal="8.*", batch_norm="shared", clients_per_round=2)
    first = made.own.memories.values[0][0].clone()
    made.step()
    trained = made.own.trained[0]
    assert trained.sum() == 2
    kept, sizes = made.own.memories.values[0], RAGGED.train.double()
    mean = (sizes[trained] @ kept[trained]) / sizes[trained].sum()
    state = made.state_dict(0)
    for k in range(len(RAGGED)):
        own = torch.cat([state["8.weight"][k].reshape(-1), state["8.bias"][k]])
        torch.testing.assert_close(own, kept[k] if trained[k] else mean)
        assert torch.equal(kept[k], first) == (not trained[k])
        one = {n: value[k] if n.startswith("8.") else value for n, value in state.items()}
        torch.testing.assert_close(made.loss[0, k], loss_of_test(RAGGED, small_cnn(), one, k))


def test_what_is_not_finite_is_not_kept() -> None:
    federation = pictures([9, 8, 3, 21])
    assert isinstance(federation.inputs, Tensor)
    federation.inputs[: int(federation.train[0])] = torch.nan
    made = simulated(federation, ["fedavg"], personal="8.*", batch_norm="shared")
    first = made.own.memories.values[0][0].clone()
    made.step()
    assert made.left_out.tolist() == [1]
    assert torch.equal(made.own.memories.values[0][0], first)
    assert made.own.trained[0].tolist() == [False, True, True, True]
    assert torch.isfinite(made.own.averages).all()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}]
)
def test_every_kind_of_batch_norm_trains(norm: Any, options: dict[str, Any]) -> None:
    """In batches of one, too, which PyTorch's layers refuse where a channel has one value in them."""
    dims = {nn.BatchNorm1d: (3,), nn.BatchNorm3d: (3, 2, 2, 2)}.get(norm, (3, 2, 2))
    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(n, *dims, generator=g).double(), torch.arange(n) % 2) for n in (7, 11)]
    federation = Federation.from_clients(clients, train=0.7)

    def model() -> nn.Module:
        return nn.Sequential(norm(3, **options), nn.Flatten(), nn.Linear(math.prod(dims), 2)).double()

    choices: tuple[BatchNorm, ...] = ("local", "shared", "recomputed")
    for choice in choices:
        made = simulated(federation, ["fedavg", "adafedadam"], model=model, batch_norm=choice)
        for _ in range(2):
            made.step()
        assert torch.isfinite(made.loss).all()
        assert made.left_out.tolist() == [0, 0]


def test_an_instance_norm_that_tracks_is_batch_norm_as_well() -> None:
    def model() -> nn.Module:
        norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()

    with pytest.raises(InputError, match=r"InstanceNorm2d.*say what is done"):
        simulated(RAGGED, ["fedavg"], model=model)
    keeps: dict[BatchNorm, Callable[[str], bool]] = {"local": lambda n: n.startswith("1."), "shared": nothing}
    for choice, keep in keeps.items():
        torch.manual_seed(0)
        first = model()
        made = simulated(RAGGED, ["fedavg"], model=first, batch_norm=choice)
        for _ in range(2):
            made.step()
        expected = fedavg_by_hand(RAGGED, first, SOLVER, 2, keep, choice)
        torch.testing.assert_close(made.loss[0], expected.losses[-1], rtol=1e-9, atol=1e-10)
    made = simulated(RAGGED, ["fedavg"], model=model, batch_norm="recomputed")
    made.step()
    assert torch.isfinite(made.loss).all()


class Counting(nn.Module):
    """Counts the samples that it trains on, in a buffer that it assigns."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(SIDE * SIDE, 3).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + len(x)
        out: Tensor = self.head(x.flatten(1))
        return out


def test_a_buffer_that_a_forward_pass_assigns_may_be_personal() -> None:
    made = simulated(RAGGED, ["fedavg"], model=Counting, personal="seen")
    for _ in range(2):
        made.step()
    assert made.state_dict(0)["seen"].tolist() == (2 * 2 * RAGGED.train).tolist()  # rounds, epochs


def without_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 3)).double()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"personal": "tail.*"}, r"personal='tail\.\*' is none of the model's tensors, which are '0.weight'"),
        ({"personal": nn.LSTM}, r"personal=.*LSTM.* is none of"),
        ({"personal": "*"}, "all parameters stay with the clients"),
        ({"personal": 3}, "personal=3 is no pattern"),
        ({"personal": [int]}, r"personal=.*int.* is no pattern"),
        ({"personal": "8.*"}, r"layer '1' is BatchNorm2d.*say what is done"),
        ({"batch_norm": "globally"}, "unknown batch_norm 'globally'"),
        ({"batch_norm": "shared", "model": without_norm}, "batch_norm='shared': the model has no batch norm"),
    ],
)
def test_what_cannot_be_divided_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulated(RAGGED, ["fedavg"], **options)


@pytest.mark.parametrize("solver", ["sgd", "momentum", "adam", "clipped"])
@pytest.mark.parametrize("first", [0, 1])
def test_the_personal_part_trains_first_and_then_the_shared_part(first: int, solver: str) -> None:
    """FedRep; and FedBABU, where the personal part does not train."""
    own: dict[str, Any] = {
        "momentum": {"momentum": 0.9},
        "adam": {"optimizer": "adam"},
        "clipped": {"clip": 0.5},
    }
    local = Solver(lr=0.05, batch_size=4, epochs=3, personal_first=first, **own.get(solver, {}))
    torch.manual_seed(1)
    model = without_norm()
    head = "1.bias"
    made = simulated(RAGGED, ["fedavg:size=1", "fedprox"], model=model, personal=head, solver=local)
    bias = [model.state_dict()[head].clone() for _ in RAGGED.names]
    shared, sizes = model.state_dict()["1.weight"].clone(), RAGGED.train.double()
    for t in range(2):
        made.step()
        trained = []
        for k in range(len(RAGGED)):
            module: Any = without_norm()
            module.load_state_dict({"1.weight": shared, head: bias[k]})
            batches = client_batches(made.planner, [0], t, k)
            begin = first * len(batches) // 3
            weights = [module[1].bias, module[1].weight]
            for p, mine in zip(weights, (batches[:begin], batches[begin:]), strict=True):
                optimizer = local.build([p], local.lr)
                for samples in mine:
                    x, y = RAGGED.at(torch.tensor(samples))
                    module.zero_grad()
                    loss = nn.functional.cross_entropy(module(x), y)
                    loss.backward()  # type: ignore[no-untyped-call]
                    if local.clip is not None:
                        nn.utils.clip_grad_norm_([p], local.clip)
                    optimizer.step()
            trained.append(module[1].weight.detach())
            bias[k] = module[1].bias.detach()
        shared = sum(s * w for s, w in zip(sizes, trained, strict=True)) / sizes.sum()
    state = made.state_dict(0)
    torch.testing.assert_close(state["1.weight"], shared, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state[head], torch.stack(bias), rtol=1e-9, atol=1e-10)
    assert made.stalled.tolist()[0] == 0


def normed_resnet() -> nn.Module:
    """ResNet-18 with batch norm; a larger ε, as channels without variance would amplify rounding."""
    made = resnet18(width=4, classes=3).double()
    for module in list(made.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.GroupNorm):
                setattr(module, name, nn.BatchNorm2d(child.num_channels, eps=0.1).double())
    return made


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("sizes", [[8, 12], [7, 11]], ids=["full", "ragged"])
@pytest.mark.parametrize("choice", ["local", "shared", "recomputed"])
def test_resnet18_trains_as_a_loop_in_plain_pytorch(choice: BatchNorm, sizes: list[int], engine: str) -> None:
    given = pictures(sizes)
    assert isinstance(given.inputs, Tensor)
    federation = replace(given, inputs=given.inputs.expand(-1, 3, -1, -1).contiguous())
    torch.manual_seed(5)
    first = normed_resnet()
    keeps = set(Division.of(first, Sharing(None, choice)).kept_names)
    solver = Solver(lr=0.01, batch_size=4)
    made = simulated(
        federation, ["fedavg:size=1"], model=first, batch_norm=choice, engine=engine, solver=solver
    )
    losses = []
    for _ in range(ROUNDS):
        made.step()
        losses.append(made.loss[0].clone())
    expected = fedavg_by_hand(federation, first, solver, ROUNDS, keeps.__contains__, choice)
    torch.testing.assert_close(torch.stack(losses), expected.losses, rtol=1e-6, atol=1e-8)
    state = made.state_dict(0)
    for name, value in expected.shared.items():
        if name not in keeps and not (choice == "recomputed" and "num_batches" in name):
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-8)


def test_a_report_counts_the_steps_of_the_shared_part() -> None:
    local = Solver(lr=0.05, batch_size=4, steps=7, personal_first=5)
    made = simulated(RAGGED, ["fedavg"], model=without_norm, personal="1.bias", solver=local)
    made.executor.prepare(0)
    for updates in made.executor.updates(made.x, made.loss0, made._shared, {}):
        assert updates.report.steps.tolist() == [2.0] * len(updates.client)
    assert "in turn" in made.plan.executor.why or made.plan.executor.value == "loop"


def test_phases_that_leave_nothing_to_train_are_refused() -> None:
    with pytest.raises(InputError, match="personal_first=2 leaves nothing of epochs=2"):
        Solver(epochs=2, personal_first=2)
    with pytest.raises(InputError, match=r"personal_first=1\.5 is not a whole number"):
        Solver(steps=4, personal_first=1.5)
    with pytest.raises(InputError, match="no parameter is personal"):
        simulated(RAGGED, ["fedavg"], model=without_norm, solver=Solver(epochs=2, personal_first=1))
    local = Solver(epochs=2, personal_first=1)
    with pytest.raises(InputError, match=r"in turn.*engine=loop trains it"):
        simulated(RAGGED, ["fedavg"], model=without_norm, personal="1.bias", solver=local, engine="stacked")


def test_a_probe_moves_no_statistics() -> None:
    """The algorithm without probes trains the same model as one whose probes it does not use."""
    for choice in ("local", "shared", "recomputed"):
        made = simulated(RAGGED, ["fedavg:size=1", "measured"], batch_norm=choice)
        for _ in range(2):
            made.step()
        assert torch.equal(made.x[0], made.x[1]), choice
        assert torch.equal(made.own.averages[0], made.own.averages[1])


@pytest.mark.parametrize("model", [small_cnn, cumulative_cnn])
@pytest.mark.parametrize("federation", [RAGGED, FULL], ids=["ragged", "full"])
@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_a_loop_in_plain_pytorch(case: str, federation: Any, model: Callable[[], Any]) -> None:
    options, keeps = CASES[case]
    torch.manual_seed(5)
    first = model()
    made = simulated(federation, ["fedavg:size=1", "adafedadam"], model=first, **options)
    losses: list[Tensor] = []
    first_probe = probed(made, run=1)
    for _ in range(ROUNDS):
        made.step()
        losses.append(made.loss[0].clone())
    expected = fedavg_by_hand(federation, first, SOLVER, ROUNDS, keeps, options.get("batch_norm", "local"))
    torch.testing.assert_close(torch.stack(losses), expected.losses, rtol=1e-9, atol=1e-10)
    state = made.state_dict(0)
    for name, value in expected.shared.items():
        if keeps(name):
            own = torch.stack([each[name] for each in expected.own])
            torch.testing.assert_close(state[name], own, rtol=1e-9, atol=1e-10)
        elif not (options.get("batch_norm") == "recomputed" and "num_batches" in name):
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10)
    # Before the first round, both runs have the same model
    torch.testing.assert_close(first_probe, expected.probes[0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(made.loss0[1], expected.probes[0, :, 0], rtol=1e-9, atol=1e-10)


def test_fine_tuned_models_and_new_clients_begin_from_the_models_with_their_parts() -> None:
    """New clients have the mean part; who fine-tunes begins from its own, or from that."""
    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(20, 1, SIDE, SIDE, generator=g).double(), torch.arange(20) % 3) for _ in range(5)]
    federation = Federation.from_clients(clients, classes=3, new_clients=["3", "4"])
    for personal, choice in (("8.*", "shared"), (None, "local"), (None, "recomputed")):
        made = simulated(
            federation,
            ["fedavg"],
            personal=personal,
            batch_norm=choice,  # type: ignore[arg-type]
            finetune=1,
            rounds=2,
        )
        made.run()
        whole = made._now()
        new = made.final_of_new_clients()
        assert new is not None
        assert new.loss.shape == (2, 2)
        assert torch.isfinite(new.loss).all()
        assert federation.new_clients is not None
        mean = whole._replace(new=True).whole(made.views[0], torch.zeros(1, dtype=torch.int64))[0]
        state, others = made.plain.state_dict(mean), federation.new_clients
        for k in range(2):
            torch.testing.assert_close(new.loss[0, k], loss_of_test(others, small_cnn(), state, k))
        tuned = made.state_dict(1)
        assert all(len(value) == len(made.federation) for value in tuned.values())
        for k in range(len(made.federation)):
            state = {name: value[k] for name, value in tuned.items()}
            expected = loss_of_test(made.federation, small_cnn(), state, k)
            torch.testing.assert_close(made.final().loss[1, k], expected)


def test_pooled_data_has_no_clients_that_keep_a_part() -> None:
    with pytest.raises(InputError, match="pooled has no clients"):
        simulated(RAGGED, ["fedavg", "pooled"], batch_norm="local")
