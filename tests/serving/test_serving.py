"""After training: predictions, evaluation of any module, personal models, files."""

import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fairwind as fw
from command import called, refused
from conftest import make_federation
from fairwind import models
from fairwind.runs.files import sealed, write_json
from fairwind.runs.references import load_task
from fairwind.runs.schema import Part
from fairwind.serving.evaluation import evaluate
from fairwind.serving.export import as_onnx

OPTIONS: Any = {"rounds": 3, "progress": False, "compile": "off"}
SIZES = [12, 30, 7, 21]


class Frozen(nn.Module):
    """With what personal models share: a frozen layer and a buffer; and dropout."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.frozen(self.dropout(self.first(x)).tanh() * self.scale)
        return self.last(hidden)  # type: ignore[no-any-return]


def federation(**more: Any) -> fw.Federation:
    draw = torch.Generator().manual_seed(0)
    clients = {
        f"clinic {k}": (torch.randn(n, 5, generator=draw), torch.randint(0, 3, (n,), generator=draw))
        for k, n in enumerate(SIZES)
    }
    return fw.Federation.from_clients(clients, train=0.5, **more)


def frozen() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)  # the same under every seed
        return Frozen()


TASK = fw.Task(frozen, federation(groups=["a", "a", "b", "b"]), solver=fw.Solver(lr=0.1), score="accuracy")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> fw.Comparison:
    out = tmp_path_factory.mktemp("serving") / "run"
    return fw.compare(TASK, ["fedavg", "ditto", "local"], out=out, **OPTIONS)


def of_test(data: Any, k: int) -> tuple[Tensor, Tensor]:
    """A client's test samples, by hand."""
    begin = int(data.start[k] + data.train[k])
    mine = slice(begin, begin + int(data.test[k]))
    return data.inputs[mine], data.targets[mine]


@pytest.mark.parametrize("label", ["fedavg", "ditto (personal)", "local"])
def test_predictions_are_those_that_training_scored(compared: fw.Comparison, label: str) -> None:
    result = compared[label]
    assert result.personal == (label != "fedavg")
    for k, name in enumerate(compared.clients):
        inputs, targets = of_test(TASK.federation, k)
        outputs = result.predict(name)
        module = result.model_of(name)
        assert not module.training
        with torch.no_grad():
            torch.testing.assert_close(outputs, module(inputs))
        assert (outputs.argmax(1) == targets).double().mean() * 100 == pytest.approx(float(result.score[k]))
        loss = nn.functional.cross_entropy(outputs, targets)
        assert float(loss) == pytest.approx(float(result.loss[k]), rel=1e-5)
        torch.testing.assert_close(result.predict(k), outputs, rtol=0, atol=0)
        torch.testing.assert_close(result.predict(inputs.numpy(), client=k), outputs, rtol=0, atol=0)


def test_inputs_are_predicted_in_their_order_whatever_the_batch(compared: fw.Comparison) -> None:
    result = compared["fedavg"]
    inputs = np.random.default_rng(0).normal(size=(70, 5))  # in another type than the model's
    whole = result.predict(inputs)
    assert whole.shape == (70, 3)
    with torch.no_grad():
        torch.testing.assert_close(whole, result.model(torch.tensor(inputs).float()))
    torch.testing.assert_close(result.predict(inputs, batch_size=13), whole)
    torch.testing.assert_close(result.predict(inputs[::-1].copy()), whole.flip(0))
    torch.testing.assert_close(result.predict([[1, 2, 3, 4, 5]]), result.predict([[1.0, 2, 3, 4, 5]]))
    assert result.predict(inputs[:0]).shape == (0, 3)
    nn.init.zeros_(result.model.train().last.weight)  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(result.predict(inputs), whole)  # it is the user's to go on with
    assert result.model.training


class Named(nn.Module):
    """Takes named inputs, and returns several outputs, as an object with `logits`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, values: Tensor, more: Tensor) -> Any:
        return type("Output", (), {"logits": {"one": self.layer(values), "two": more + 1}})()


def test_inputs_and_outputs_keep_their_structure() -> None:
    data = fw.Federation.from_clients(
        [({"values": torch.randn(6, 4), "more": torch.arange(6)}, torch.zeros(6, 2)) for _ in range(2)]
    )
    task = fw.Task(Named(), data, loss=lambda outputs, targets: (outputs["one"] - targets).square().mean(1))
    result = fw.simulate(task, "fedavg", **OPTIONS)
    values, more = torch.randn(5, 4), torch.arange(5)
    found = result.predict({"values": values, "more": more}, batch_size=2)
    assert list(found) == ["one", "two"]
    torch.testing.assert_close(found["two"], more + 1)
    with torch.no_grad():
        torch.testing.assert_close(found["one"], result.model.get_submodule("layer")(values))
    for wrong in (values, {"values": values}, {"values": values, "more": more[:3]}):
        with pytest.raises(fw.InputError, match="the inputs"):
            result.predict(wrong)


def test_a_loaded_comparison_predicts_with_its_task(compared: fw.Comparison) -> None:
    assert compared.path is not None
    for mine, theirs in zip(compared, fw.load(compared.path, task=TASK), strict=True):
        assert torch.equal(mine.predict("clinic 1"), theirs.predict("clinic 1"))
    with pytest.raises(fw.InputError, match=r"made in Python.*give it, fairwind.load\('.*', task=task\)"):
        _ = fw.load(compared.path)[0].model
    other = fw.Task(nn.Linear(5, 3), TASK.federation)
    for label in ("fedavg", "local"):
        with pytest.raises(fw.InputError, match="the task's model is not the one that was trained"):
            fw.load(compared.path, task=other)[label].predict("clinic 1")
    with pytest.raises(fw.InputError, match="no trained models were kept"):
        _ = replace(compared[0], state_dict={}).model
    elsewhere = fw.Task(frozen, fw.Federation.from_clients({"x": of_test(TASK.federation, 0)}))
    with pytest.raises(fw.InputError, match="no samples of client 'clinic 1'"):
        fw.load(compared.path, task=elsewhere)[0].predict("clinic 1")
    with pytest.raises(fw.InputError, match=r"task is a Frozen: give the fairwind\.Task"):
        fw.load(compared.path, task=frozen())  # type: ignore[arg-type]


def test_a_result_is_pickled_without_its_task(compared: fw.Comparison) -> None:
    _ = compared["fedavg"].model
    copy = pickle.loads(pickle.dumps(compared["fedavg"]))
    assert torch.equal(copy.score, compared["fedavg"].score)
    assert copy.task is None


def test_mistakes_are_named(compared: fw.Comparison) -> None:
    mistakes: list[tuple[str, Callable[[fw.Result], object], str]] = [
        ("fedavg", lambda r: r.predict("clinic 9"), "unknown client 'clinic 9': did you mean"),
        ("fedavg", lambda r: r.predict(4), "client=4 is out of range"),
        ("fedavg", lambda r: r.predict(torch.zeros(5)), "the inputs are float32 of shape () per sample"),
        ("fedavg", lambda r: r.predict(torch.zeros(2, 4)), "the model cannot take the inputs"),
        ("fedavg", lambda r: r.predict(torch.zeros(2, 5).byte()), "the inputs are bytes"),
        ("fedavg", lambda r: r.predict(0, batch_size=0), "batch_size=0 is out of range"),
        ("fedavg", lambda r: r.save("model.bin"), "ends in none of .safetensors"),
        ("fedavg", lambda r: r.save("/nowhere/model.pt"), "there is no folder /nowhere"),
        ("local", lambda r: r.model, "local has a model for each client: take result.model_of(client)"),
        ("local", lambda r: r.save("model.pt"), "local has a model for each client"),
        ("local", lambda r: r.predict(torch.zeros(2, 5)), "say whose, as in client='clinic 0'"),
    ]
    for label, mistake, words in mistakes:
        with pytest.raises(fw.InputError) as error:
            mistake(compared[label])
        assert words in str(error.value)


def test_a_model_that_returns_another_number_of_rows_is_refused() -> None:
    class State(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(3, 2, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.rnn(x)

    data = fw.Federation.from_clients([(torch.randn(8, 4, 3), torch.zeros(8)) for _ in range(2)])
    task = fw.Task(State(), data, loss=lambda outputs, targets: outputs[0].square().mean((1, 2)))
    result = fw.simulate(task, "fedavg", **OPTIONS)
    with pytest.raises(fw.InputError, match=r"returns tensors of shape \(1, 5, 2\) for 5 samples"):
        result.predict(torch.randn(5, 4, 3))


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_an_evaluation_gives_the_numbers_of_training(engine: Any) -> None:
    result = fw.simulate(TASK, "fedavg", engine=engine, **OPTIONS)
    found = fw.evaluate(result.model, TASK)
    torch.testing.assert_close(found.score, result.score)
    torch.testing.assert_close(found.loss, result.loss, rtol=1e-6, atol=1e-7)
    assert found.groups == result.groups
    for name, value in result.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-6)  # type: ignore[literal-required]


def test_an_evaluation_of_any_module_is_that_of_a_loop_by_hand() -> None:
    """Also of one that could not be trained here: batch norm, and nothing that has a gradient."""
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model(torch.randn(50, 5))  # so that its statistics are not those of a new layer
    model.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data: Any = federation(groups={f"clinic {k}": "ab"[k % 2] for k in range(4)}, validation=0.2)
    for part in get_args(Part):
        found = fw.evaluate(model, data, score=["accuracy", "f1"], part=part)
        start, sizes = data.part(part)
        assert found.samples == sizes.tolist()
        assert list(found.scores) == ["accuracy", "f1"]
        model.eval()
        for k, (begin, size) in enumerate(zip(start.tolist(), sizes.tolist(), strict=True)):
            if not size:
                assert found.score[k].isnan()
                continue
            inputs, targets = (each[begin : begin + size] for each in (data.inputs, data.targets))
            outputs = model(inputs)
            right = 100 * (outputs.argmax(1) == targets).double().mean()
            torch.testing.assert_close(found.score[k], right)
            loss = nn.functional.cross_entropy(outputs, targets)
            torch.testing.assert_close(found.loss[k].float(), loss)
        model.train()
    average = found.score.mean()
    assert found.metrics["avg"] == pytest.approx(float(average))
    assert found.metrics["worst30"] == pytest.approx(float(found.score.sort().values[:2].mean()))
    assert found.groups["a"]["avg"] == pytest.approx(float(found.score[::2].mean()))
    first, accuracy, f1, loss_line, groups = repr(found).splitlines()
    assert first == f"4 clients, {sum(found.samples)} samples"
    assert accuracy.startswith(f"accuracy: average {average:.4g}, STD ")
    assert f1.startswith("f1: average ")
    assert loss_line.startswith("loss: average ")
    assert groups.startswith("groups: a ")
    assert model.training
    assert not any(p.requires_grad for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_an_evaluation_takes_losses_and_scores_as_a_task_does() -> None:
    data = fw.Federation.from_clients([(torch.randn(20, 5), torch.randn(20, 1)) for _ in range(3)])
    model = nn.Linear(5, 1)
    found = evaluate(model, data, loss=nn.MSELoss())
    inputs, targets = of_test(data, 1)
    torch.testing.assert_close(found.loss[1].float(), nn.functional.mse_loss(model(inputs), targets).detach())
    assert torch.equal(found.loss, evaluate(model, fw.Task(model, data, loss=nn.MSELoss())).loss)
    mistakes: list[tuple[Callable[[], object], str]] = [
        (lambda: evaluate(nn.Linear(4, 1), data, loss=nn.MSELoss()), "the model cannot be evaluated on"),
        (lambda: evaluate(model, data, loss=nn.MSELoss(), part="rest"), "unknown part of the samples"),  # type: ignore[arg-type]
        (lambda: evaluate(model, data, loss=nn.MSELoss(), part="validation"), "no client has validation"),
        (lambda: evaluate(model, data, loss=nn.MSELoss(), score="accuracy"), "score 'accuracy'"),
        (lambda: evaluate(models.linear, data), "is not a trained model"),  # type: ignore[arg-type]
        (lambda: evaluate(model, [data]), "is not a federation"),  # type: ignore[arg-type]
    ]
    for mistake, words in mistakes:
        with pytest.raises(fw.InputError) as error:
            mistake()
        assert words in str(error.value)


def test_a_state_dict_is_written_and_loads_into_the_users_module(
    compared: fw.Comparison, tmp_path: Path
) -> None:
    inputs = torch.randn(4, 5)
    for label, client in (("fedavg", None), ("local", "clinic 2")):
        for name, read in (("model.pt", torch.load), ("model.safetensors", load_file)):
            module = Frozen().eval()
            module.load_state_dict(read(compared[label].save(tmp_path / name, client=client)))
            with torch.no_grad():
                torch.testing.assert_close(module(inputs), compared[label].predict(inputs, client=client))


class Sentences(nn.Module):
    """Returns an object, as models of Hugging Face do, from a dict of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense = nn.Embedding(20, 8), nn.Linear(8, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        words = self.embedding(ids) * mask[..., None]
        return type("Output", (), {"logits": self.dense(words.sum(1))})()


IDS = torch.randint(1, 20, (6, 9))
CNN = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 4)
)
EXPORTED: dict[str, tuple[nn.Module, Any]] = {
    "linear": (models.linear(60, 10), torch.randn(6, 60)),
    "femnist": (models.mlp(784, 128, 62), torch.randn(6, 784)),
    "cnn": (CNN, torch.randn(6, 3, 14, 14)),
    "lstm": (models.lstm(20), IDS),
    "dict": (Sentences(), {"ids": IDS, "mask": torch.ones(6, 9)}),
    "frozen": (Frozen(), torch.randn(1, 5)),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_an_onnx_file_computes_what_the_module_does(name: str) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    module, inputs = EXPORTED[name]
    session = runtime.InferenceSession(as_onnx(module, inputs))
    given = inputs if isinstance(inputs, dict) else {session.get_inputs()[0].name: inputs}
    module.eval()
    for few in (1, 2, 6):
        part = {key: value[:few] for key, value in given.items()}
        (computed,) = session.run(None, {key: value.numpy() for key, value in part.items()})
        with torch.no_grad():
            outputs = module(**part) if isinstance(inputs, dict) else module(*part.values())
        torch.testing.assert_close(torch.tensor(computed), getattr(outputs, "logits", outputs))


def test_a_model_that_onnx_cannot_express_is_refused() -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")

    class Sorted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(fw.InputError, match=r"cannot be written as ONNX: .*its state dict can"):
        as_onnx(Sorted(), torch.randn(4, 2))


def test_without_onnx_the_extra_is_named(compared: fw.Comparison, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fairwind.serving.export.find_spec", lambda name: None)
    with pytest.raises(fw.InputError, match=r"needs onnx: install it with pip install 'fairwind\[onnx\]'"):
        compared["fedavg"].save(tmp_path / "model.onnx")


MINE = """
import torch, fairwind as fw
from torch import nn
draw = torch.Generator().manual_seed(0)
clients = {name: (torch.randn(20, 5, generator=draw), torch.randint(0, 3, (20,), generator=draw))
           for name in ("ann", "bob")}
task = fw.Task(lambda: nn.Linear(5, 3), fw.Federation.from_clients(clients), rounds=2)
"""


def test_the_command_exports_what_python_predicts_with(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("served.py").write_text(MINE)
    fw.compare(load_task("served.py:task"), ["fedavg", "ditto"], seeds=[3, 4], out="run", **OPTIONS)
    said = called("export", "run", "--algorithm", "ditto", "--seed", "4", "--to", "model.safetensors")
    assert said.returncode == 0, said.stderr
    assert Path("model.safetensors").exists()
    compared = fw.load("run")  # which finds the task
    state = load_file("model.safetensors")
    assert all(torch.equal(value, compared["ditto", 4].state_dict[name]) for name, value in state.items())
    personal = "--algorithm", "ditto (personal)", "--client", "bob"
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # the command shows them
        said = called("export", "run", *personal, "--to", "bob.pt")
    assert said.returncode == 0, said.stderr
    assert f"names the code of its task, which is run now: {tmp_path}/served.py:task" in said.stderr
    own = torch.load("bob.pt")
    torch.testing.assert_close(own["weight"], compared["ditto (personal)"].state_dict["weight"][1])
    inputs = torch.randn(3, 5)
    expected = inputs @ own["weight"].T + own["bias"]
    with pytest.warns(UserWarning, match="names the code of its task"):
        outputs = compared["ditto (personal)"].predict(inputs, client="bob")
    torch.testing.assert_close(outputs, expected)
    assert "run 'fedprox'" in refused("export", "run", "--algorithm", "fedprox")
    assert "has a model for each client" in refused("export", "run", *personal[:2], "--to", "x.pt")


def test_a_federations_directory_is_not_sent_to_a_command_that_refuses_it(tmp_path: Path) -> None:
    write_json(tmp_path / "recipe.json", sealed({"federated": {}}))
    with pytest.raises(fw.InputError, match="with the same 'flwr run' again, or the same NVFLARE job"):
        fw.load(tmp_path)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("personal", "batch_norm"),
    [("3.*", "local"), (None, "shared"), (None, "recomputed"), ("0.*", "shared"), ("3.*", "group")],
)
@pytest.mark.filterwarnings("ignore:batch_norm=:UserWarning")
def test_a_client_predicts_with_the_shared_part_and_its_own(
    personal: Any, batch_norm: Any, tmp_path: Path
) -> None:
    """What is a client's own is (K, …) in state dicts, and results name it; loaded and exported, too."""
    federation = make_federation([12, 30, 9], dtype=torch.float32)
    task = fw.Task(normed, federation, personal=personal, batch_norm=batch_norm)
    make: Any = task.model
    ours = fw.compare(task, ["fedavg", "ditto"], out=tmp_path / "run", rounds=2, progress=False)
    loaded, shapes = fw.load(tmp_path / "run", task=task), {n: v.ndim for n, v in make().state_dict().items()}
    facts = loaded.results["sharing"]
    assert facts == ours.results["sharing"]
    assert facts["batch_norm"] == batch_norm
    for result, again in zip(ours, loaded, strict=True):
        own = {name for name, value in again.state_dict.items() if value.ndim > shapes[name]}
        assert result.personal == again.personal == bool(own)
        if result.algorithm != "ditto (personal)":
            assert own == set(facts["personal"])
        for k, name in enumerate(federation.names):
            module = make()
            module.load_state_dict({n: v[k] if n in own else v for n, v in again.state_dict.items()})
            begin, size = int(federation.start[k] + federation.train[k]), int(federation.test[k])
            inputs, labels = federation.at(slice(begin, begin + size))
            with torch.no_grad():
                assert torch.equal(again.predict(name), module.eval()(inputs))
            accuracy = 100 * (result.predict(name).argmax(1) == labels).double().mean()
            torch.testing.assert_close(float(accuracy), float(result.score[k]))
        file = again.save(tmp_path / "model.safetensors", client=1 if own else None)
        assert {n: v.ndim for n, v in load_file(file).items()} == shapes
    other = replace(task, personal="0.bias")
    with pytest.raises(fw.InputError, match="differs in its personal part or batch_norm"):
        fw.compare(other, ["fedavg", "ditto"], out=tmp_path / "run", rounds=2, progress=False)
