"""Modules with batch norm that trains, and modules of which a part stays with each client."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fairwind.engine.layout import BatchNorm, Sharing
from zoo.dense import HIDDEN, Hidden
from zoo.specimen import CLASSES, FEATURES, WORDS, Specimen, images, texts, vectors


class Residual(nn.Module):
    """A convolution, batch norm and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)))


class Words(nn.Module):
    """An embedding, a mean over words, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embedding(x)).mean(1))
        return out


class OverTime(Words):
    """Batch norm of a sequence, over samples and time."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.over(self.embedding(x).transpose(1, 2))
        out: Tensor = self.head(h.mean(2))
        return out


class Adapted(Hidden):
    """A personal adapter of low rank beside a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(HIDDEN, 2, bias=False)
        self.up = nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x).relu()
        out: Tensor = self.head(h + self.up(self.down(h)))
        return out


class Twice(nn.Module):
    """One layer with batch norm that a batch passes once, and a second, frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.first, self.second = nn.BatchNorm1d(HIDDEN), nn.BatchNorm1d(HIDDEN).requires_grad_(False)
        self.second.eval()
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(self.body(x)).relu()))
        return out


# Without biases before batch norm: their gradients are zero but for rounding.


def dense(norm: nn.Module) -> nn.Module:
    first = nn.Linear(FEATURES, HIDDEN, bias=False)
    return nn.Sequential(first, norm, nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def cnn(*between: nn.Module) -> nn.Module:
    first = nn.Conv2d(1, 8, 3, padding=1, bias=False)
    return nn.Sequential(first, *between, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


def deep() -> nn.Module:
    conv = nn.Conv3d(1, 4, 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm3d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 27, CLASSES))


def depthwise() -> nn.Module:
    conv = nn.Conv2d(8, 8, 3, groups=8, bias=False)
    return cnn(nn.BatchNorm2d(8), nn.ReLU6(), conv, nn.BatchNorm2d(8), nn.ReLU6())


def instance() -> nn.Module:
    return cnn(nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.ReLU())


def own(
    name: str,
    model: Callable[[], nn.Module],
    clients: Any,
    batch_norm: BatchNorm | None = None,
    personal: Any = None,
    note: str = "",
) -> Specimen:
    sharing = Sharing(personal, batch_norm)
    return Specimen(name, model, clients, executor="loop" if note else "stacked", note=note, sharing=sharing)


PICTURES = images(1, 6, 6)
SPECIMENS = [
    own("batch-norm-local", lambda: dense(nn.BatchNorm1d(HIDDEN)), vectors, "local"),
    own("batch-norm-shared", lambda: dense(nn.BatchNorm1d(HIDDEN)), vectors, "shared"),
    own("batch-norm-recomputed", lambda: dense(nn.BatchNorm1d(HIDDEN)), vectors, "recomputed"),
    own("batch-norm-cumulative", lambda: cnn(nn.BatchNorm2d(8, momentum=None)), PICTURES, "shared"),
    own("batch-norm-plain", lambda: cnn(nn.BatchNorm2d(8, affine=False), nn.ReLU()), PICTURES, "local"),
    own("batch-norm-3d", deep, images(1, 4, 4, 4), "shared"),
    own("batch-norm-synchronised", lambda: cnn(nn.SyncBatchNorm(8), nn.ReLU()), PICTURES, "shared"),
    own("batch-norm-dropout", lambda: cnn(nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3)), PICTURES, "local"),
    own("batch-norm-residual", lambda: cnn(Residual(8), Residual(8)), PICTURES, "shared"),
    own("batch-norm-depthwise", depthwise, PICTURES, "recomputed"),
    own("batch-norm-over-time", OverTime, texts, "shared"),
    own("batch-norm-half-frozen", Twice, vectors, "local"),
    own(
        "batch-norm-untracked",
        lambda: cnn(nn.BatchNorm2d(8, track_running_stats=False)),
        PICTURES,
        "shared",
        note="mixes samples in evaluation",
    ),
    own("instance-norm-tracked", instance, PICTURES, "shared", note="updates buffers in place"),
    own("personal-head", Hidden, vectors, personal="head.*"),
    own("personal-body", Hidden, vectors, personal="hidden.*"),
    own("personal-embedding", Words, texts, personal=nn.Embedding),
    own("personal-layer-norm", Words, texts, personal=nn.LayerNorm),
    own("personal-adapter", Adapted, vectors, personal=["down.*", "up.*"]),
    own("personal-biases", Hidden, vectors, personal=lambda name, value: name.endswith("bias")),
]
