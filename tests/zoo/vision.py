"""Models of images."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.specimen import (
    CLASSES,
    Specimen,
    classes,
    clients,
    images,
    minus_squared_error,
    squared_error,
    token_accuracy,
    token_cross_entropy,
)


def leaf_cnn(
    side: int = 28, channels: tuple[int, int] = (32, 64), hidden: int = 2048, classes: int = 62
) -> nn.Module:
    """LEAF's network for FEMNIST (Caldas et al.: LEAF. 2018), by default in its real sizes."""
    first, second = channels
    return nn.Sequential(
        nn.Conv2d(1, first, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * (side // 4) ** 2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


class Block(nn.Module):
    """Two convolutions and a shortcut (He et al.: Deep Residual Learning. 2015), with group norm."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.GroupNorm(groups, outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


def resnet18(width: int = 64, classes: int = 10, groups: int = 2) -> nn.Module:
    """ResNet-18 for images of 32×32 pixels: group norm, a stem of 3×3, no pooling before the blocks."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    blocks: list[nn.Module] = []
    for stage, (inputs, outputs) in enumerate(pairwise(widths)):
        blocks += [Block(inputs, outputs, 2 if stage else 1, groups), Block(outputs, outputs, 1, groups)]
    stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
    head = nn.Linear(8 * width, classes)
    return nn.Sequential(
        stem, nn.GroupNorm(groups, width), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head
    )


def pooled(*layers: nn.Module, channels: int) -> nn.Sequential:
    """The layers, then the mean of every channel, then a linear layer."""
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def normed(*norm: nn.Module) -> nn.Sequential:
    return pooled(nn.Conv2d(1, 4, 3), *norm, nn.ReLU(), channels=4)


class FrozenBatchNorm(nn.Module):
    """Keeps its batch norm as it is: its statistics, and its weight and bias."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(4).requires_grad_(False)
        norm.running_mean, norm.running_var = torch.randn(4) / 3, torch.rand(4) + 0.5
        self.layers = normed(norm)

    def train(self, mode: bool = True) -> "FrozenBatchNorm":
        super().train(mode)
        self.layers[1].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class SqueezeExcitation(nn.Module):
    """A depthwise-separable block that weights its channels (Hu et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.point, self.depth = nn.Conv2d(1, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.squeeze, self.excite = nn.Linear(6, 2), nn.Linear(2, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.hardswish(self.depth(self.point(x)))
        scale = F.hardsigmoid(self.excite(self.squeeze(h.mean((2, 3))).relu()))
        out: Tensor = self.head((h * scale[:, :, None, None]).mean((2, 3)))
        return out


class UNet(nn.Module):
    """A class for each pixel: outputs (B, H, W, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Conv2d(5, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.down(x).relu()).relu()
        h = F.interpolate(h, scale_factor=2, mode="bilinear", align_corners=False)
        out: Tensor = self.head(torch.cat([x, h], 1)).movedim(1, -1)
        return out


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.decoder = nn.ConvTranspose2d(4, 1, 3, stride=2, padding=1, output_padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.encoder(x).relu())
        return out


class Bytes(nn.Module):
    """Scales images of type uint8 itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.float() / 255)
        return out


@dataclass
class Output:
    logits: Tensor
    features: Tensor


class WithLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU())
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Output:
        features = self.features(x)
        return Output(self.head(features), features)


class WithTable(nn.Module):
    """From an image and a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 + 2, CLASSES)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([self.conv(image).relu().mean((2, 3)), table], 1))
        return out


class Siamese(nn.Module):
    """Whether two images are alike: one encoder for both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5))
        self.head = nn.Linear(5, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.head((self.encoder(left) - self.encoder(right)).abs())
        return out


def convolution(name: str, model: Callable[[], nn.Module], channels: int = 1) -> Specimen:
    return Specimen(name, model, images(channels, 8, 8))


def image(n: int, g: torch.Generator) -> Tensor:
    return torch.randn(n, 1, 8, 8, generator=g)


def itself(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = image(n, g)
    return x, x


SPECIMENS = [
    convolution("leaf-cnn", lambda: leaf_cnn(8, (4, 6), 16, CLASSES)),
    Specimen("resnet18", lambda: resnet18(4, CLASSES), images(3, 8, 8)),
    convolution("conv-strided", lambda: pooled(nn.Conv2d(1, 4, 3, stride=(2, 1)), nn.ReLU(), channels=4)),
    convolution("conv-dilated", lambda: pooled(nn.Conv2d(1, 4, 3, dilation=2), nn.ReLU(), channels=4)),
    convolution("conv-grouped", lambda: pooled(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), channels=6), 4),
    convolution("conv-depthwise", lambda: pooled(nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), channels=4), 4),
    convolution(
        "conv-reflecting",
        lambda: pooled(nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU(), channels=4),
    ),
    Specimen(
        "conv-3d",
        lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)),
        images(1, 3, 6, 6),
    ),
    convolution("dropout-channels", lambda: normed(nn.Dropout2d(0.3))),
    convolution("group-norm", lambda: normed(nn.GroupNorm(2, 4))),
    convolution("instance-norm", lambda: normed(nn.InstanceNorm2d(4, affine=True))),
    convolution("batch-norm-frozen", FrozenBatchNorm),
    convolution("squeeze-excitation", SqueezeExcitation),
    Specimen(
        "segmentation",
        UNet,
        clients(lambda n, g: (image(n, g), torch.randint(CLASSES, (n, 8, 8), generator=g))),
        token_cross_entropy,
        token_accuracy,
    ),
    Specimen("autoencoder", Autoencoder, clients(itself), squared_error, minus_squared_error),
    Specimen(
        "bytes",
        Bytes,
        clients(
            lambda n, g: (
                torch.randint(256, (n, 1, 8, 8), generator=g, dtype=torch.uint8),
                classes(n, g),
            )
        ),
    ),
    convolution("logits", WithLogits),
    Specimen(
        "image-and-table",
        WithTable,
        clients(
            lambda n, g: ({"image": image(n, g), "table": torch.randn(n, 2, generator=g)}, classes(n, g))
        ),
    ),
    Specimen(
        "siamese",
        Siamese,
        clients(lambda n, g: ((image(n, g), image(n, g)), torch.randint(2, (n,), generator=g))),
    ),
]
