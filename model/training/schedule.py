"""The learning rate: linear warm-up, a stable phase, cosine decay to zero; and where branches of a run begin."""

import math

from model.training.options import TrainOptions


def rate(options: TrainOptions, step: int) -> float:
    """Learning rate of a step, counted from 0; the step after the last would have 0."""
    warm = min(1.0, (step + 1) / max(1, options.warmup))
    through = (step - decay_start(options)) / max(1, options.steps - decay_start(options))
    return options.learning_rate * warm * (1 + math.cos(math.pi * min(1.0, max(0.0, through)))) / 2


def decay_start(options: TrainOptions) -> int:
    """The first step of the decay: until then, runs that differ in their number of steps alone are the same run."""
    return options.steps - round(options.decay * options.steps)
