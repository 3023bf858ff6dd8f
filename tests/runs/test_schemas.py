"""The files of a run are what docs/schemas describes: no field more, none less."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import fairwind as fw

ROOT = Path(__file__).parents[2]
SCHEMAS = {
    name: json.loads((ROOT / "docs" / "schemas" / f"{name}.schema.json").read_text())
    for name in ("results", "history")
}
ELSEWHERE = {"environment.ranks", "own"}  # of a run under torchrun, of algorithms of one's own


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison with groups, two scores and a personal model: all that a file may hold."""
    out = tmp_path_factory.mktemp("run") / "mine"
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(20, 4, generator=draw), torch.arange(20) % 2) for _ in range(4)]
    federation = fw.Federation.from_clients(clients, groups=["north", "north", "south", "south"])
    task = fw.Task(lambda: nn.Linear(4, 2), federation, score=[fw.scores.accuracy, fw.scores.f1], rounds=4)
    fw.compare(task, ["adafedadam", "ditto"], seeds=[0, 1], eval_every=2, out=out, progress=False)
    return out


def check(content: Any, name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(content)


def test_the_files_are_valid(run: Path) -> None:
    check(json.loads((run / "results.json").read_text()), "results")
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * (2 + 4)  # evaluations, of AdaFedAdam's models and of Ditto's two each
    for line in lines:
        check(line, "history")
    assert "certainty" in lines[-5]


def test_a_field_more_or_less_is_found(run: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    results = json.loads((run / "results.json").read_text())
    for spoilt in ({**results, "more": 1}, {k: v for k, v in results.items() if k != "timing"}):
        with pytest.raises(jsonschema.ValidationError):
            check(spoilt, "results")


def described(schema: dict[str, Any], root: dict[str, Any], path: str = "") -> set[str]:
    """All fields that a schema names."""
    if "$ref" in schema:
        schema = {**root["$defs"][schema["$ref"].rpartition("/")[2]], **schema}
    found: set[str] = set()
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
    if "$ref" in schema:
        schema = {**root["$defs"][schema["$ref"].rpartition("/")[2]], **schema}
    found: set[str] = set()
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


def test_what_is_described_is_what_is_written(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    schema = SCHEMAS["results"]
    only_accuracies = {"std_beyond_noise", "rsd_error", "jain", "gini"}
    missing = described(schema, schema) - written(results, schema, schema) - ELSEWHERE
    assert {
        path
        for path in missing
        if path.rpartition(".")[2] not in only_accuracies and not path.endswith((".mean", ".std"))
    } == set()
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    schema = SCHEMAS["history"]
    missing = described(schema, schema) - set().union(*(written(line, schema, schema) for line in lines))
    assert {path for path in missing if path.rpartition(".")[2] not in only_accuracies} == set()


def test_the_tensors_are_the_described_ones(run: Path) -> None:
    page = (ROOT / "docs" / "reference" / "files.md").read_text()
    with safe_open(run / "clients.safetensors", framework="pt") as file:
        shapes = {key: tuple(file.get_tensor(key).shape) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    runs, clients, rounds = 6, 4, 3
    expected: dict[str, tuple[int, ...]] = {
        "score": (runs, clients),
        "score.f1": (runs, clients),
        "loss": (runs, clients),
    }
    expected |= {"curves": (rounds, runs, clients), "train_size": (clients,), "test_size": (clients,)}
    assert shapes == expected
    assert set(metadata) == {"names", "rounds", "groups"}
    for name in (*expected, *metadata):
        assert f"`{name.replace('f1', 'NAME')}`" in page, name
    with safe_open(run / "models.safetensors", framework="pt") as file:
        assert "adafedadam/0/weight" in file.keys()  # noqa: SIM118
