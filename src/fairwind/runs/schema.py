"""What the files of a run hold: results.json and the lines of history.jsonl, as types.

`docs/schemas` describes the same fields in words; a test compares both.
"""

from collections.abc import Sequence
from typing import Any, Generic, Literal, NotRequired, TypedDict, TypeVar, final

from fairwind.scores import Kind

ClientMetric = Literal[
    "avg",
    "std",
    "worst30",
    "best30",
    "worst",
    "avg_weighted",
    "std_weighted",
    "worst30_weighted",
    "std_beyond_noise",
    "rsd_error",
    "jain",
    "gini",
    "loss_avg",
    "loss_worst30",
]
GroupMetric = Literal["worst_group_avg", "group_gap"]
Metric = Literal[ClientMetric, GroupMetric]
Value = TypeVar("Value")  # a number of one model, or a mean with its spread over seeds
Part = Literal["train", "validation", "test"]  # of a client's samples
FURTHER = ("averaged", "personal", "fine-tuned")
"""Models beside an algorithm's own; they are called as the algorithm is, with this in brackets."""
Baseline = Literal["local", "pooled", "finetuned"]  # what a federation is compared with
Plan = dict[str, dict[str, str | int | float]]  # by part, its `value` and `why`


class GroupAverage(TypedDict, Generic[Value]):
    """A group of clients."""

    clients: int
    avg: Value


class Metrics(TypedDict, Generic[Value]):
    """The fairness metrics, as in docs/metrics.md."""

    avg: Value
    std: Value
    worst30: Value
    best30: Value
    worst: Value
    avg_weighted: Value
    std_weighted: Value
    worst30_weighted: Value
    std_beyond_noise: NotRequired[Value]
    rsd_error: NotRequired[Value]
    jain: NotRequired[Value]
    gini: NotRequired[Value]
    loss_avg: Value
    loss_worst30: Value
    worst_group_avg: NotRequired[Value]
    group_gap: NotRequired[Value]


class ByGroup(TypedDict, Generic[Value], total=False):
    """What is added where clients are in groups."""

    groups: dict[str, GroupAverage[Value]]


class ModelGroups(ByGroup[float | None], total=False):
    """The same of one model."""

    worst_group: str | None


class GroupMetrics(ModelGroups, total=False):
    """The same with what groups add to the metrics; empty where clients are in none."""

    worst_group_avg: float | None
    group_gap: float | None


class ModelMetrics(Metrics[float | None], ModelGroups):
    """One score of a model over its clients; null where a number is not finite."""


class HistoryLine(ModelMetrics):
    """A line of history.jsonl. Beside these it holds scalars of the algorithm's state, by their names."""

    algorithm: str
    seed: int
    round: int
    part: NotRequired[Part]
    scores: NotRequired[dict[str, ModelMetrics]]


class OverSeeds(TypedDict):
    """Mean and standard deviation over seeds; null if a seed has no number."""

    mean: float | None
    std: float | None


class SummaryMetrics(Metrics[OverSeeds], ByGroup[OverSeeds]):
    """One score of an algorithm over its seeds."""


class SummaryRow(SummaryMetrics):
    """An algorithm over its seeds."""

    algorithm: str
    new_clients: NotRequired[SummaryMetrics]
    scores: NotRequired[dict[str, SummaryMetrics]]


class TotalCost(TypedDict):
    """What all clients of a run computed and sent."""

    sample_gradients: NotRequired[float]
    bytes_up: float
    bytes_down: float
    bytes_evaluation: NotRequired[float]


class PrivacyConfig(TypedDict):
    """The bounds and the noise of a real federation with differential privacy."""

    clip: float
    weight: float
    noise: float
    delta: float
    further: float


class PrivacyLoss(PrivacyConfig):
    """The same with what all rounds together gave away."""

    epsilon: float | None
    adjacency: str
    releases: list[list[int]]


class RunRow(ModelGroups):
    """A run: an algorithm under a seed."""

    algorithm: str
    seed: int
    rounds: int
    final: Metrics[float | None]
    cost: NotRequired[TotalCost]
    scores: NotRequired[dict[str, ModelMetrics]]
    model: NotRequired[str]
    baseline: NotRequired[Baseline]
    new_clients: NotRequired[ModelMetrics]
    left_out: int
    stalled_rounds: int
    privacy: NotRequired[PrivacyLoss]


class SharingFacts(TypedDict):
    """Which of the model's tensors algorithms do not average."""

    batch_norm: str | None
    personal: list[str]


class ScoreKind(TypedDict):
    """A score's name, and how it is read."""

    name: str
    kind: Kind


class SolverConfig(TypedDict):
    """The local solver, `fw.Solver`."""

    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float
    batch_size: int
    epochs: float | Sequence[float] | None
    steps: int | Sequence[int] | None
    personal_first: NotRequired[float | None]
    optimizer: str
    betas: Sequence[float]
    eps: float
    smoothing: float
    clip: float | None
    lr_decay: float
    lr_schedule: str | None


class SettingsConfig(TypedDict):
    """`fw.Settings`."""

    rounds: int
    solver: SolverConfig
    participation: float
    clients_per_round: int | None
    selection: str
    probe_samples: int | None
    codec: str | None
    eval_every: int
    finetune: float
    target: float | None
    patience: int | None
    attack: str | None
    defence: str | None
    engine: str
    device: str
    compile: str
    precision: str
    memory: float | None
    data_on: str
    workers: int | None


@final
class Config(SettingsConfig):
    """What a comparison was started with."""

    algorithms: Sequence[str]
    seeds: Sequence[int]


@final
class FederatedConfig(TypedDict):
    """What the server of a real federation was started with."""

    algorithm: str
    algorithm_digest: NotRequired[str]
    seed: int
    task: str
    parameters: dict[str, list[int]]
    sends: str
    bounds: dict[str, str]
    clients_per_round: int | None
    start: NotRequired[list[list[float | None]]]
    scores: NotRequired[list[str]]
    numbers: NotRequired[int]
    columns: NotRequired[dict[str, list[str]]]
    selection: NotRequired[str]
    clients: NotRequired[int]
    codec: NotRequired[str]
    defence: NotRequired[str]
    privacy: NotRequired[PrivacyConfig]


class Environment(TypedDict):
    """Versions, processor, device, commit."""

    fairwind: str
    commit: str | None
    python: str
    torch: str
    numpy: str
    platform: str
    processor: str
    threads: int
    device: str
    ranks: NotRequired[int]
    date: str


class SourceFile(TypedDict):
    """A file that data was prepared from."""

    file: str
    bytes: int
    sha256: str
    layout: str


class Origin(TypedDict, total=False):
    """Where prepared data comes from."""

    digest: str
    rule: str
    source: list[SourceFile]
    notes: list[str]


@final
class FederationFacts(Origin):
    """The federation in numbers."""

    name: str
    clients: int
    classes: int | None
    train_samples: int
    validation_samples: NotRequired[int]
    test_samples: int
    smallest: int
    median: float
    largest: int
    new_clients: NotRequired[int]
    groups: NotRequired[dict[str, int]]
    columns: NotRequired[dict[str, list[str]]]
    commonest: NotRequired[float]


@final
class FederationName(TypedDict):
    """A federation of which no more is known yet."""

    name: str


class IntervalJson(TypedDict):
    """A number, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


class JoiningRow(TypedDict):
    """What an algorithm gives the clients, compared with training alone."""

    algorithm: str
    better: int
    worse: int
    equal: int
    better_share: NotRequired[IntervalJson]
    average: NotRequired[IntervalJson]
    losers: dict[str, float]


class JoiningSummary(TypedDict):
    """Who gains from joining the federation."""

    alone: str
    algorithms: list[JoiningRow]


class Timing(TypedDict):
    """How long training took."""

    seconds: float
    rounds_per_second: float
    run_rounds_per_second: float
    client_steps_per_second: float | None


class TimingSoFar(TypedDict):
    """The same of training that goes on; null before its first checkpoint."""

    seconds: float | None
    rounds_per_second: float | None


Condition = Literal["target", "patience", "time_budget", "after_evaluation"]


class Stopped(TypedDict):
    """Why training ended before its last round: what asked for it, and the reason in words."""

    by: Condition
    why: str


class Parts(TypedDict):
    """Which samples numbers are of, and what must be known of that."""

    history: Part
    final: Part
    note: NotRequired[str]


class Findings(TypedDict):
    """What tables and charts show, of a finished comparison or one that goes on."""

    setup: str
    task: str
    command: str
    config: Config | FederatedConfig
    scores: list[ScoreKind]
    parts: NotRequired[Parts]
    sharing: NotRequired[SharingFacts]
    data: str | None
    runs: list[RunRow]
    summary: list[SummaryRow]
    joining: NotRequired[JoiningSummary]
    stopped: NotRequired[Stopped]


class FindingsSoFar(Findings):
    """The findings of a comparison that goes on."""

    environment: Environment | None
    federation: FederationFacts | FederationName
    timing: TimingSoFar


class Results(Findings):
    """What a comparison found."""

    numbers: NotRequired[int]
    algorithm_digests: NotRequired[dict[str, str]]
    task_digests: NotRequired[dict[str, str]]  # of a study's own task, by seed
    plan: NotRequired[Plan]
    engine: NotRequired[str]  # what carried a real federation's messages
    environment: Environment
    federation: FederationFacts
    timing: Timing


class ResultsFile(Results):
    """results.json: the results, with the digests of all files that belong to them."""

    files: dict[str, str]
    sha256: str


TheoryScale = Literal["smoke", "reduced", "full"]
Verdict = Literal["holds", "holds in part", "does not hold", "premise impossible"]
TheoryRow = dict[str, Any]  # what one check measured once: columns of its own, numbers and texts


class TheoryCheck(TypedDict):
    """One claim of the paper beside what was measured."""

    name: str
    claim: str
    setting: dict[str, object]
    rows: list[TheoryRow]
    verdict: Verdict
    explanation: str


class TheoryFile(TypedDict):
    """theory.json: all checks of the paper's theory."""

    scale: TheoryScale
    environment: Environment
    checks: list[TheoryCheck]
