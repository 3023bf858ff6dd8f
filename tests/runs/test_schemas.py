"""The files of a run are what docs/schemas describes, and so are the types: no field more, none less."""

import json
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors import safe_open
from torch import nn

import fairwind as fw
from exchanged import Exchange
from fairwind.engine.plan import ExecutionPlan
from fairwind.exchange import UNBOUNDED, Evaluations, FederatedRun, Judged, Privacy
from fairwind.exchange.results import owner_of
from fairwind.runs.schema import HistoryLine, ResultsFile

ROOT = Path(__file__).parents[2]
SCHEMAS = {
    name: json.loads((ROOT / "docs" / "schemas" / f"{name}.schema.json").read_text())
    for name in ("results", "history")
}
# Of a run under torchrun, of a study's tasks of one's own, and of prepared data.
ELSEWHERE = {"environment.ranks", "task_digests"}
ELSEWHERE |= {f"federation.{name}" for name in ("digest", "rule", "notes")}
ELSEWHERE |= {f"federation.source{name}" for name in ("", "[].file", "[].bytes", "[].sha256", "[].layout")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With names, groups, validation samples, new clients, two scores, all models, and stopped: all of it."""
    out = tmp_path_factory.mktemp("run") / "mine"
    draw = torch.Generator().manual_seed(0)
    frames = [
        pd.DataFrame(torch.randn(20, 4, generator=draw).numpy(), columns=list("abcd")) for _ in range(6)
    ]
    clients = [(frame, torch.arange(20) % 2) for frame in frames]
    federation = fw.Federation.from_clients(
        clients, groups=["north", "south"] * 3, validation=0.1, new_clients=["0", "1"]
    )
    scores = [fw.scores.accuracy, fw.scores.f1]
    task = fw.Task(lambda: nn.Linear(4, 2), federation, score=scores, rounds=6, personal="bias")
    options: dict[str, Any] = {"eval_every": 2, "after_evaluation": lambda lines: lines[0]["round"] == 4}
    options |= {"seeds": [0, 1], "finetune": 1, "progress": False}
    fw.compare(task, ["adafedadam", "ditto", "local"], **options, out=out)
    return out


def federated_run(out: Path, spec: str, **options: Any) -> Path:
    """A real federation's training, with two scores."""
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(20, 4, generator=draw), torch.arange(20) % 2) for _ in range(4)]
    task = fw.Task(lambda: nn.Linear(4, 2), fw.Federation.from_clients(clients))
    exchange = Exchange(task, spec, **options)
    evaluations = Evaluations([fw.scores.accuracy, fw.scores.f1], spec, 0, exchange.server.algorithm)
    columns = {"inputs": tuple("abcd")}
    given: dict[str, Any] = {"clients_per_round": None, "columns": columns}
    owner = owner_of(exchange.server, evaluations, task="hospitals", **given)
    run = FederatedRun(out, owner, exchange.server, evaluations)
    exchange.round()
    judged = Judged(4, 16, 0.7, {"accuracy": 50.0, "f1": 0.5})
    judged = judged._replace(further=judged)
    evaluations.add(1, {str(k): judged for k in range(4)}, exchange.server.counts())
    run.finish(nn.Linear(4, 2), engine="Flower")
    run.close()
    return out


@pytest.fixture(scope="module")
def federated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with differential privacy."""
    privacy = Privacy(clip=1.0, weight=20.0, noise=0.0, delta=1e-5)
    out = tmp_path_factory.mktemp("federated") / "run"
    return federated_run(out, "fedavg", bounds=UNBOUNDED, privacy=privacy, sends="sums")


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose algorithm counts on all clients, with a further model to evaluate."""
    return federated_run(tmp_path_factory.mktemp("counting") / "run", "afl")


def check(content: Any, name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(content)


def test_the_files_are_valid(run: Path) -> None:
    check(json.loads((run / "results.json").read_text()), "results")
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * (2 + 4 + 2)  # evaluations, of Ditto's two models and of the others' one
    for line in lines:
        check(line, "history")
    assert "certainty" in lines[-8]


def test_those_of_a_real_federation_are_valid(federated: Path, counting: Path) -> None:
    for path in (federated, counting):
        check(json.loads((path / "results.json").read_text()), "results")


def test_where_no_client_was_tested_the_measures_are_null() -> None:
    evaluations = Evaluations([fw.scores.accuracy, fw.scores.f1], "fedavg", 0)
    nothing = {"accuracy": float("nan"), "f1": float("nan")}
    check(evaluations.add(0, {"a": Judged(0, 16, float("nan"), nothing)}, {}), "history")


def test_a_field_more_or_less_is_found(run: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    results = json.loads((run / "results.json").read_text())
    for spoilt in ({**results, "more": 1}, {k: v for k, v in results.items() if k != "timing"}):
        with pytest.raises(jsonschema.ValidationError):
            check(spoilt, "results")


def resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """A schema without a reference at its top."""
    return root["$defs"][schema["$ref"].rpartition("/")[2]] | schema if "$ref" in schema else schema


def described(schema: dict[str, Any], root: dict[str, Any], path: str = "") -> set[str]:
    """All fields that a schema names."""
    schema = resolved(schema, root)
    found: set[str] = set().union(*(described(option, root, path) for option in schema.get("anyOf", [])))
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        found |= {here} | described(field, root, here)
    if "items" in schema:
        found |= described(schema["items"], root, f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        found |= described(schema["additionalProperties"], root, f"{path}.*")
    return found


def written(content: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "") -> set[str]:
    """All fields that a file has, by the paths of the schema."""
    schema = resolved(schema, root)
    found: set[str] = set().union(*(written(content, s, root, path) for s in schema.get("anyOf", [])))
    if isinstance(content, list):
        return found.union(*(written(each, schema.get("items", {}), root, f"{path}[]") for each in content))
    for name, value in content.items() if isinstance(content, dict) else ():
        field = schema.get("properties", {}).get(name)
        if field is not None:
            here = f"{path}.{name}" if path else name
            found |= {here} | written(value, field, root, here)
        elif isinstance(schema.get("additionalProperties"), dict):
            found |= written(value, schema["additionalProperties"], root, f"{path}.*")
    return found


def test_what_is_described_is_what_is_written(run: Path, federated: Path, counting: Path) -> None:
    files = [json.loads((path / "results.json").read_text()) for path in (run, federated, counting)]
    schema = SCHEMAS["results"]
    only_accuracies = {"std_beyond_noise", "rsd_error", "jain", "gini"}
    missing = described(schema, schema) - ELSEWHERE
    missing -= set().union(*(written(results, schema, schema) for results in files))
    assert {
        path
        for path in missing
        if path.rpartition(".")[2] not in only_accuracies and not path.endswith((".mean", ".std"))
    } == set()
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    schema = SCHEMAS["history"]
    missing = described(schema, schema) - set().union(*(written(line, schema, schema) for line in lines))
    assert {path for path in missing if path.rpartition(".")[2] not in only_accuracies} == set()


KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
KINDS |= {list: "array", Sequence: "array", dict: "object"}


def agree(kind: Any, schema: dict[str, Any], root: dict[str, Any], path: str) -> None:
    """AssertionError where a type and a schema say different things."""
    if isinstance(kind, typing.TypeVar):  # of a record for one model, or for means over seeds
        return
    schema = resolved(schema, root)
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if "anyOf" in schema:
        for option, part in zip(options, schema["anyOf"], strict=True):
            agree(option, part, root, path)
        return
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    assert {json_name(option) for option in options} == set(names), path
    for option in options:
        origin, arguments = typing.get_origin(option) or option, typing.get_args(option)
        if typing.is_typeddict(origin):
            fields = typing.get_type_hints(origin)
            assert set(fields) == set(schema["properties"]), path
            assert origin.__required_keys__ == set(schema.get("required", ())), path
            for name in fields:
                agree(fields[name], schema["properties"][name], root, f"{path}.{name}")
        elif origin is list:
            agree(arguments[0], schema["items"], root, f"{path}[]")
        elif origin is dict and isinstance(schema.get("additionalProperties"), dict):
            agree(arguments[1], schema["additionalProperties"], root, f"{path}.*")


def json_name(kind: Any) -> str:
    """What JSON Schema calls a type."""
    origin = typing.get_origin(kind) or kind
    if typing.is_typeddict(origin):
        return "object"
    return "string" if origin is typing.Literal else KINDS[origin]


@pytest.mark.parametrize(("kind", "name"), [(ResultsFile, "results"), (HistoryLine, "history")])
def test_the_types_are_the_described_ones(kind: Any, name: str) -> None:
    agree(kind, SCHEMAS[name], SCHEMAS[name], name)


def test_the_plan_is_the_described_one() -> None:
    assert set(SCHEMAS["results"]["properties"]["plan"]["properties"]) == set(ExecutionPlan._fields)


def test_the_tensors_are_the_described_ones(run: Path) -> None:
    page = (ROOT / "docs" / "reference" / "files.md").read_text()
    with safe_open(run / "clients.safetensors", framework="pt") as file:
        shapes = {key: tuple(file.get_tensor(key).shape) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    runs, clients, rounds = 6 + 2 + 4, 4, 3  # the last ones are fine-tuned
    expected: dict[str, tuple[int, ...]] = {
        "score": (runs, clients),
        "score.f1": (runs, clients),
        "loss": (runs, clients),
    }
    expected |= {"curves": (rounds, runs, clients), "train_size": (clients,), "test_size": (clients,)}
    fit = 4 + 4  # models that are no single client's, and what new clients make of these
    of_new = {
        key: (fit, 2) if len(shape) == 2 else (2,) for key, shape in expected.items() if key != "curves"
    }
    expected |= {f"new.{key}": shape for key, shape in of_new.items()}
    assert shapes == expected
    assert set(metadata) == {"names", "rounds", "groups", "new_names"}
    for name in (*expected, *metadata):
        assert f"`{name.replace('f1', 'NAME')}`" in page, name
    with safe_open(run / "models.safetensors", framework="pt") as file:
        assert "adafedadam/0/weight" in file.keys()  # noqa: SIM118
