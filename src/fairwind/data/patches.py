"""Fixed features of pictures: how much each part of one resembles patches that were drawn at random.

Coates, Ng: The Importance of Encoding Versus Training with Sparse Coding and Vector Quantization. ICML 2011,
with random patches as the dictionary and soft thresholds of both signs. Coates, Ng, Lee: An Analysis of
Single-Layer Networks in Unsupervised Feature Learning. AISTATS 2011, for contrast, whitening and quarters.
Here the dictionary is far smaller, patches lie two pixels apart, not one, and the variances of patches divide
by n, not n − 1.

Nothing is trained and no label is used, so that a linear classifier of these features stands in for a network
where training one would take too long.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

SIZE, STRIDE = 6, 2  # pixels
PATCHES, DRAWN = 64, 20_000  # in the dictionary; for their mean and covariance
CONTRAST, RIDGE, THRESHOLD = 10.0, 0.1, 0.25  # Coates and Ng's
QUARTERS = 2  # a side: features are means over the picture's four quarters
FEATURES = 2 * PATCHES * QUARTERS**2
CHUNK = 250  # pictures at a time


def patch_features(pictures: NDArray[np.uint8], seed: int = 0) -> NDArray[np.float32]:
    """(N, FEATURES) of pictures (N, channels, height, width), each feature with mean 0 and variance 1.

    A feature that all pictures share is near 0. On another processor the last bits may differ.
    """
    x = torch.from_numpy(pictures)
    mean, whitening, dictionary = _dictionary(x, seed)
    directions = (whitening @ dictionary.T).float()
    made = torch.cat([_responses(chunk, mean.float(), directions) for chunk in torch.split(x, CHUNK)])
    deviation = made.std(0, correction=min(1, len(made) - 1))  # a single picture's is 0, not NaN
    return ((made - made.mean(0)) / deviation.clamp(min=1e-6)).numpy()


def _dictionary(x: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of patches, the matrix that whitens them, and the whitened unit patches to compare with."""
    draw = torch.Generator().manual_seed(seed)
    n, _, height, width = x.shape
    which, top, left = (
        torch.randint(most, (DRAWN, 1, 1, 1), generator=draw)
        for most in (n, height - SIZE + 1, width - SIZE + 1)
    )
    channel = torch.arange(x.shape[1]).view(1, -1, 1, 1)
    rows, columns = torch.arange(SIZE).view(1, 1, -1, 1), torch.arange(SIZE)
    patches = _even_contrast(x[which, channel, top + rows, left + columns].flatten(1).double())
    mean = patches.mean(0)
    values, vectors = torch.linalg.eigh((patches - mean).T @ (patches - mean) / DRAWN)
    whitening = (vectors * (values + RIDGE).rsqrt()) @ vectors.T
    return mean, whitening, functional.normalize((patches[:PATCHES] - mean) @ whitening)


def _responses(x: Tensor, mean: Tensor, directions: Tensor) -> Tensor:
    patches = functional.unfold(x.float(), SIZE, stride=STRIDE).mT  # (N, places, pixels)
    found = (_even_contrast(patches) - mean) @ directions
    both = torch.cat([found - THRESHOLD, -found - THRESHOLD], 2).relu()  # alike, and the opposite
    down, across = ((side - SIZE) // STRIDE + 1 for side in x.shape[2:])
    grid = torch.unflatten(both.mT, 2, (down, across))
    return functional.adaptive_avg_pool2d(grid, QUARTERS).flatten(1)


def _even_contrast(patches: Tensor) -> Tensor:
    centred = patches - patches.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + CONTRAST).sqrt()
