"""A model behind a wall that counts and times itself, and a tally of promises kept: what several
scripts measure with. Run alone it does nothing."""

import time
from dataclasses import dataclass

import numpy as np

from keyhole.models.attention import Attention


class Box:
    """Counts its queries and the time it takes."""

    def __init__(self, model: Attention, single: bool = False) -> None:
        self.model = model.astype(np.float32) if single else model
        self.truth = self.model.astype(np.float64)  # a float32 box has float32 parameters
        self.width, self.seen, self.seconds = model.width, 0, 0.0

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        start = time.perf_counter()
        answers = self.model(tokens)
        self.seconds += time.perf_counter() - start
        self.seen += len(tokens)
        return answers


@dataclass
class Tally:
    """How many rows kept the promise."""

    rows: int = 0
    met: int = 0
