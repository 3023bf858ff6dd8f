"""Modules of the kinds users bring, each with clients to train it; `python tests/zoo` checks them."""

from zoo import dense, huggingface, own_parts, stateful, tasks, text, vision
from zoo.specimen import Specimen
from zoo.vision import leaf_cnn, resnet18

__all__ = ["ZOO", "Specimen", "leaf_cnn", "resnet18"]

ZOO: dict[str, Specimen] = {
    specimen.name: specimen
    for kind in (dense, stateful, vision, text, tasks, huggingface, own_parts)
    for specimen in kind.SPECIMENS
}
