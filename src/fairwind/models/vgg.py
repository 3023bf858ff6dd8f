"""VGG11 for 32×32 images.

Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition. 2015.
"""

from typing import Literal

from torch import nn

from fairwind.models.pixels import Pixels

Init = Literal["pytorch", "he"]

# Outputs of each convolution, and whether they are pooled
WIDTHS = (
    *((64, True), (128, True), (256, False), (256, True)),
    *((512, False), (512, True), (512, False), (512, True)),
)


def vgg11(classes: int = 10, *, init: Init = "pytorch") -> nn.Module:
    """VGG11 for 32×32 colour images, without batch norm, with one dense layer: 9.2 M parameters.

    `init` draws initial weights as PyTorch's layers do, or by He et al.: N(0, 2 / inputs), biases zero.
    """
    layers: list[nn.Module] = [Pixels()]
    inputs = 3
    for width, pooled in WIDTHS:
        # ReLU is monotonic, so it can follow pooling, where it is cheaper.
        layers += [nn.Conv2d(inputs, width, 3, padding=1), *[nn.MaxPool2d(2)] * pooled, nn.ReLU()]
        inputs = width
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, classes))
    if init == "he":
        for name, parameter in model.named_parameters():
            if name.endswith("weight"):
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
            else:
                nn.init.zeros_(parameter)
    return model
