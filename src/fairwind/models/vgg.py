"""VGG11 for 32×32 images.

Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition. 2015.
"""

from typing import Literal

from torch import nn

from fairwind.models.dense import Pixels

Init = Literal["pytorch", "he"]

WIDTHS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def vgg11(classes: int = 10, *, init: Init = "pytorch") -> nn.Module:
    """VGG11 for (3, 32, 32) images, without batch norm, with one dense layer: 9.2 M parameters.

    `init` draws initial weights as PyTorch's layers do, or by He et al.: N(0, 2 / inputs), biases zero.
    """
    layers: list[nn.Module] = [Pixels()]
    inputs = 3
    for width in WIDTHS:
        if isinstance(width, int):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
        else:
            layers.append(nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, classes))
    if init == "he":
        for name, parameter in model.named_parameters():
            if name.endswith("weight"):
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
            else:
                nn.init.zeros_(parameter)
    return model
