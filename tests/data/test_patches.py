"""Fixed features of pictures, against arithmetic done again in NumPy and float64."""

import numpy as np
import pytest
import torch

from fairwind.data import patches
from fairwind.data.patches import patch_features

SAMPLE = 20_000  # patches, of which the first 64 are the dictionary


def pictures(n: int, high: int = 256) -> np.ndarray:
    """CIFAR-10's shape; neighbouring pixels are alike, as in photographs."""
    noise = np.random.RandomState(n).randint(0, high, (n, 3, 32, 32))
    return ((noise + np.roll(noise, 1, 2) + np.roll(noise, 1, 3)) // 3).astype(np.uint8)


def with_even_contrast(patch: np.ndarray) -> np.ndarray:
    values = patch.astype(np.float64).ravel()
    out: np.ndarray = (values - values.mean()) / np.sqrt(values.var() + 10)
    return out


def features_by_numpy(pictures: np.ndarray, seed: int) -> np.ndarray:
    """Picture by picture and place by place; random places are drawn as the package draws them."""
    draw = torch.Generator().manual_seed(seed)
    which, top, left = (
        torch.randint(most, (SAMPLE,), generator=draw).tolist() for most in (len(pictures), 27, 27)
    )
    cut = (pictures[i, :, t : t + 6, u : u + 6] for i, t, u in zip(which, top, left, strict=True))
    drawn = np.stack([with_even_contrast(patch) for patch in cut])
    mean = drawn.mean(0)
    values, vectors = np.linalg.eigh(np.cov(drawn.T, bias=True))
    whitening = vectors @ np.diag(1 / np.sqrt(values + 0.1)) @ vectors.T
    dictionary = (drawn[:64] - mean) @ whitening
    dictionary /= np.linalg.norm(dictionary, axis=1, keepdims=True)
    sums = np.zeros((len(pictures), 2, 64, 2, 2))  # picture, sign, patch, upper or lower, left or right
    for n, picture in enumerate(pictures):
        for row in range(14):
            for column in range(14):
                patch = with_even_contrast(picture[:, 2 * row :, 2 * column :][:, :6, :6])
                alike = dictionary @ (whitening @ (patch - mean))
                sums[n, 0, :, row // 7, column // 7] += np.maximum(alike - 0.25, 0)
                sums[n, 1, :, row // 7, column // 7] += np.maximum(-alike - 0.25, 0)
    flat = sums.reshape(len(pictures), -1)
    out: np.ndarray = (flat - flat.mean(0)) / flat.std(0, ddof=1)
    return out


@pytest.mark.parametrize("seed", [0, 3])
def test_features_are_those_computed_in_numpy_and_float64(seed: int) -> None:
    few = pictures(5)
    np.testing.assert_allclose(patch_features(few, seed), features_by_numpy(few, seed), atol=1e-4)


def test_features_have_mean_0_and_variance_1() -> None:
    found = patch_features(pictures(300))
    assert found.shape == (300, patches.FEATURES)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.mean(0, dtype=np.float64), 0, atol=1e-5)
    np.testing.assert_allclose(found.var(0, ddof=1, dtype=np.float64), 1, atol=1e-4)


def test_the_same_pictures_have_the_same_features_bit_for_bit() -> None:
    some = pictures(20)
    before = some.copy()
    found = patch_features(some)
    assert patch_features(some).tobytes() == found.tobytes()
    assert np.array_equal(some, before)
    assert not np.allclose(patch_features(some, seed=1), found, atol=0.1)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_number_of_pictures_at_a_time_does_not_matter(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = pictures(20)
    found = patch_features(some)
    monkeypatch.setattr(patches, "CHUNK", chunk)
    np.testing.assert_allclose(patch_features(some), found, atol=1e-4)


def test_brightness_does_not_matter() -> None:
    dark = pictures(10, high=200)
    found = patch_features(np.concatenate([dark, dark + np.uint8(55)]))
    np.testing.assert_allclose(found[:10], found[10:], atol=1e-4)


@pytest.mark.parametrize(
    "some",
    [
        pictures(1),
        np.repeat(pictures(1), 300, 0),
        np.full((3, 3, 32, 32), 7, np.uint8),
        np.concatenate([np.zeros((2, 3, 32, 32), np.uint8), pictures(1)]),
    ],
    ids=["one", "equal", "grey", "black but one"],
)
def test_pictures_that_are_alike_have_finite_features(some: np.ndarray) -> None:
    found = patch_features(some)
    assert np.isfinite(found).all()
    if (some == some[0]).all():
        assert np.abs(found).max() < 0.5  # a deviation of rounding alone is not blown up
