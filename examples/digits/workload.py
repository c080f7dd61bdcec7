"""What is trained, and on what: the same for one process and for many.

The 1797 images of handwritten digits come with scikit-learn (`load_digits`: 8 x 8 pixels, from the
UCI repository). Everything that is random has a seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

EPOCHS = 25
BATCH = 96
"""Images of one step, of all ranks together; must be a multiple of the number of ranks."""

LEARNING_RATE = 0.05
_TEST_SHARE = 5  # one image in five


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 float32 in 0..1, and which digits they show."""

    train_images: Tensor
    train_digits: Tensor
    test_images: Tensor
    test_digits: Tensor


def load() -> Digits:
    from sklearn.datasets import load_digits  # slow to import, and only one rank needs it

    images, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(7))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(digits)[order]
    tested = len(x) // _TEST_SHARE
    return Digits(x[tested:], y[tested:], x[:tested], y[:tested])


def make_model() -> nn.Module:
    torch.manual_seed(11)
    # Smooth, so that what rounding changes stays small: a unit of ReLU that is at zero but for
    # rounding is on with the kernels of one kind of processor, off with those of another.
    return nn.Sequential(
        nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 10)
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def steps(images: int) -> int:
    """How many batches all epochs have; images that do not fill a batch wait for the next one."""
    return EPOCHS * (images // BATCH)


def batches(images: int) -> Iterator[Tensor]:
    """The indices of each batch, in a new order every epoch."""
    generator = torch.Generator().manual_seed(13)
    for _ in range(EPOCHS):
        order = torch.randperm(images, generator=generator)
        yield from order[: images // BATCH * BATCH].split(BATCH)


def backward(model: nn.Module, images: Tensor, digits: Tensor) -> float:
    """Compute the gradients of the mean loss; the loss."""
    model.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(images), digits)
    loss.backward()
    return loss.item()


def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of test images that are recognised."""
    with torch.no_grad():
        guesses = model(digits.test_images).argmax(dim=1)
    return (guesses == digits.test_digits).float().mean().item()
