"""Models of vectors: layers, ways to hold parameters, and ways to train only some of them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from zoo.specimen import CLASSES, FEATURES, Specimen, vectors, vectors64

HIDDEN = 8


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), *between, nn.Linear(HIDDEN, CLASSES))


class Hidden(nn.Module):
    """A hidden layer and a head, for subclasses that use them in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(x).relu())
        return out


class FunctionalDropout(Hidden):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.dropout(self.hidden(x).relu(), 0.3, self.training))
        return out


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, HIDDEN)
        self.value = nn.Linear(FEATURES, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.silu(self.gate(x)) * self.value(x))
        return out


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Bilinear(FEATURES, FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pairs(x, x)
        return out


class Experts(nn.Module):
    """Every expert's output, weighted by a gate."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp(nn.Tanh()) for _ in range(experts))
        self.gate = nn.Linear(FEATURES, experts)

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], -1)  # (B, C, experts)
        out: Tensor = (outputs * self.gate(x).softmax(-1).unsqueeze(1)).sum(-1)
        return out


class Residual(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, HIDDEN)
        self.blocks = nn.ModuleDict({f"block{i}": nn.Linear(HIDDEN, HIDDEN) for i in range(blocks)})
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks.values():
            x = x + F.gelu(block(x))
        out: Tensor = self.head(x)
        return out


class Fourier(Hidden):
    """Mixes features by a Fourier transform, as FNet does words."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.fft.fft(self.hidden(x)).real.tanh())
        return out


class Prototypes(nn.Module):
    """The nearest prototype's class."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(CLASSES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(x, self.prototypes)


class Temperature(Hidden):
    """Has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature


class InParameterList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [(HIDDEN, FEATURES), (HIDDEN, HIDDEN), (CLASSES, HIDDEN)]
        self.weights = nn.ParameterList(torch.randn(size) / 3 for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.weights
        for weight in hidden:
            x = F.linear(x, weight).tanh()
        return F.linear(x, last)


class InParameterDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight, bias = torch.randn(CLASSES, FEATURES) / 3, torch.zeros(CLASSES)
        self.parts = nn.ParameterDict({"weight": weight, "bias": bias})

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.parts["weight"], self.parts["bias"])


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, HIDDEN)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.second = self.first
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(self.stem(x)).tanh()).tanh())
        return out


class TiedAutoencoder(nn.Module):
    """Classifies from what it reads back through its encoder's weights, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, HIDDEN)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.linear(self.encoder(x).tanh(), self.encoder.weight.T))
        return out


class UnusedParameter(Hidden):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(FEATURES, 2)


class LowRank(nn.Module):
    """A frozen layer and a trained update of rank 2 (Hu et al.: LoRA. 2021)."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, inputs) / 3)
        self.B = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + x @ self.A.T @ self.B.T
        return out


def lora() -> nn.Module:
    return nn.Sequential(LowRank(FEATURES, HIDDEN), nn.ReLU(), LowRank(HIDDEN, CLASSES))


def partly_frozen() -> nn.Module:
    model = mlp(nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
    model[0].requires_grad_(False)
    return model


def bias_only() -> nn.Module:
    model = mlp(nn.ReLU())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


def hooked() -> nn.Module:
    model = mlp(nn.ReLU())
    model[0].register_forward_hook(lambda module, inputs, output: output * 0.5)
    return model


def weight_norm() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(FEATURES, HIDDEN)), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


SPECIMENS = [
    Specimen("linear", lambda: nn.Linear(FEATURES, CLASSES), vectors),
    Specimen("linear-without-bias", lambda: nn.Linear(FEATURES, CLASSES, bias=False), vectors),
    Specimen("mlp", lambda: mlp(nn.ReLU()), vectors),
    Specimen("mlp-float64", lambda: mlp(nn.Tanh()).double(), vectors64),
    Specimen("dropout", lambda: mlp(nn.ReLU(), nn.Dropout(0.3)), vectors),
    Specimen("dropout-functional", FunctionalDropout, vectors),
    Specimen("dropout-alpha", lambda: mlp(nn.SELU(), nn.AlphaDropout(0.2)), vectors),
    Specimen("glu", lambda: nn.Sequential(nn.Linear(FEATURES, 2 * CLASSES), nn.GLU()), vectors),
    Specimen("swiglu", SwiGLU, vectors),
    Specimen("prelu", lambda: mlp(nn.PReLU(HIDDEN)), vectors),
    Specimen("bilinear", Bilinear, vectors),
    Specimen("layer-norm", lambda: mlp(nn.LayerNorm(HIDDEN), nn.ReLU()), vectors),
    Specimen("rms-norm", lambda: mlp(nn.RMSNorm(HIDDEN), nn.SiLU()), vectors),
    Specimen("mixture-of-experts", Experts, vectors),
    Specimen("residual", Residual, vectors),
    Specimen("fourier", Fourier, vectors),
    Specimen("prototypes", Prototypes, vectors),
    Specimen("temperature", Temperature, vectors),
    Specimen("parameter-list", InParameterList, vectors),
    Specimen("parameter-dict", InParameterDict, vectors),
    Specimen("shared-module", Shared, vectors),
    Specimen("tied-transposed", TiedAutoencoder, vectors),
    Specimen("unused-parameter", UnusedParameter, vectors),
    Specimen("lora", lora, vectors),
    Specimen("partly-frozen", partly_frozen, vectors),
    Specimen("bias-only", bias_only, vectors),
    Specimen("forward-hook", hooked, vectors),
    Specimen("weight-norm", weight_norm, vectors),
]
