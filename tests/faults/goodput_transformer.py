"""Python's manual, and a small transformer of torch that says which character comes next: a larger
task for `goodput.py`. See `goodput_digits` for what a task has.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

RATE = 0.2
BATCH, WINDOW, WIDTH, LAYERS = 8, 32, 32, 2

torch.set_num_threads(1)  # the warm process forks, so it must have no other threads
torch.manual_seed(0)
CHARACTERS = sorted(set("".join(topics.values())))
TEXT = torch.tensor([CHARACTERS.index(one) for one in "".join(topics.values())])
LAYER = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
MASK = nn.Transformer.generate_square_subsequent_mask(WINDOW, dtype=torch.float64)
MODEL = nn.ModuleDict(
    {
        "letters": nn.Embedding(len(CHARACTERS), WIDTH),
        "places": nn.Embedding(WINDOW, WIDTH),
        "layers": nn.TransformerEncoder(LAYER, LAYERS, enable_nested_tensor=False),
        "scores": nn.Linear(WIDTH, len(CHARACTERS)),
    }
).double()
PARAMETERS = list(MODEL.parameters())
START = parameters_to_vector(PARAMETERS).detach().numpy().copy()


def start() -> np.ndarray:
    return START.copy()


def gradient(weights: np.ndarray, step: int, rank: int) -> tuple[np.ndarray, float]:
    last = len(TEXT) - WINDOW - 1
    starts = torch.tensor(np.random.default_rng((step, rank)).integers(0, last, BATCH))
    windows = TEXT[starts[:, None] + torch.arange(WINDOW + 1)]
    vector_to_parameters(torch.tensor(weights), PARAMETERS)
    x = MODEL["letters"](windows[:, :-1]) + MODEL["places"](torch.arange(WINDOW))
    scores = MODEL["scores"](MODEL["layers"](x, MASK, is_causal=True))
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
    found = torch.autograd.grad(loss, PARAMETERS)
    return parameters_to_vector(found).numpy(), loss.item()
