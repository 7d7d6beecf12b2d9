"""Adam, and the learning rate's course."""

from __future__ import annotations

import math
from types import ModuleType

from .layers import Array

WARMUP_STEPS = 50
FINAL_FRACTION = 0.05  # of the peak, at the last step
BETAS = 0.9, 0.98
EPS = 1e-8


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Linear warm-up, then half a cosine down to `FINAL_FRACTION` of the peak."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, num_steps - 1 - WARMUP_STEPS)
    return peak * (FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress)))


class Adam:
    """Adam with bias correction; it updates the parameters in place."""

    def __init__(self, xp: ModuleType, params: dict[str, Array]) -> None:
        self.xp, self.params, self.num_steps = xp, params, 0
        self.mean = {name: xp.zeros_like(value) for name, value in params.items()}
        self.square = {name: xp.zeros_like(value) for name, value in params.items()}

    def step(self, grads: dict[str, Array], rate: float) -> None:
        self.num_steps += 1
        beta_1, beta_2 = BETAS
        correct_1, correct_2 = 1 - beta_1**self.num_steps, 1 - beta_2**self.num_steps
        for name, value in self.params.items():
            grad, mean, square = grads[name], self.mean[name], self.square[name]
            mean += (1 - beta_1) * (grad - mean)
            square += (1 - beta_2) * (grad * grad - square)
            value -= (rate / correct_1) * mean / (self.xp.sqrt(square / correct_2) + EPS)
