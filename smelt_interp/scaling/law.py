"""The paper's scaling law, its compute-optimal frontier, and the compute that one architecture saves over another.

    L(F, S, D) = E + A (1 - S)^b / F^a + K / D^c                                     (arXiv:2609.01343)

F training FLOPs a token, S sparsity, D training tokens, L loss in nats a token. At compute C = F D the smallest loss is

    F* = (a A' / (c K))^(1 / (a + c)) C^(c / (a + c)),   D* = C / F*,   A' = A (1 - S)^b
    L* = E + k C^-gamma,   gamma = a c / (a + c)

A compute-efficiency gain is 1 - C_looped / C_baseline at equal loss, C_baseline being the budget.
"""

import itertools
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smelt_interp.paper import printed

Floats = NDArray[np.float64]
Numbers = float | Floats

FLOPS_PER_PARAMETER = 6
"""Training FLOPs a token for each parameter of a dense network."""

COEFFICIENTS = ("E", "A", "K", "a", "b", "c")
"""The letters of the formula, in the order of a law's fields."""


beyond_numbers = np.errstate(over="ignore", divide="ignore", invalid="ignore")
"""A law fitted to absurd runs may leave the range of numbers: it is infinite there, or no number, without a warning."""


class ScalingLaw(NamedTuple):
    """One law, or as many as its arrays are long."""

    floor: Numbers
    """E, nats a token."""
    compute_scale: Numbers
    """A."""
    token_scale: Numbers
    """K."""
    compute_exponent: Numbers
    """a."""
    sparsity_exponent: Numbers
    """b."""
    token_exponent: Numbers
    """c."""

    def figures(self) -> dict[str, Numbers]:
        """The coefficients by the letters of the formula, and gamma."""
        return {**dict(zip(COEFFICIENTS, self, strict=True)), "gamma": self.gamma}

    def best(self, compute: Numbers, sparsity: Numbers) -> dict[str, Numbers]:
        """The point of the frontier at a compute budget."""
        return {
            "flops_per_token": self.best_flops_per_token(compute, sparsity),
            "tokens": self.best_tokens(compute, sparsity),
            "tokens_per_parameter": self.tokens_per_parameter(compute, sparsity),
            "loss": self.best_loss(compute, sparsity),
        }

    @beyond_numbers
    def loss(self, flops_per_token: Numbers, sparsity: Numbers, tokens: Numbers) -> Numbers:
        """Loss in nats a token."""
        return (
            self.floor
            + self._scale_at(sparsity) / flops_per_token**self.compute_exponent
            + self.token_scale / tokens**self.token_exponent
        )

    @property
    def gamma(self) -> Numbers:
        """Exponent of compute on the frontier, a c / (a + c)."""
        return self.compute_exponent * self.token_exponent / (self.compute_exponent + self.token_exponent)

    @beyond_numbers
    def best_flops_per_token(self, compute: Numbers, sparsity: Numbers) -> Numbers:
        """F*, the training FLOPs a token of the least loss at a compute budget."""
        a, c = self.compute_exponent, self.token_exponent
        balance = (a * self._scale_at(sparsity) / (c * self.token_scale)) ** (1 / (a + c))
        return balance * compute ** (c / (a + c))

    @beyond_numbers
    def best_tokens(self, compute: Numbers, sparsity: Numbers) -> Numbers:
        """D*, the training tokens of the least loss at a compute budget."""
        return compute / self.best_flops_per_token(compute, sparsity)

    @beyond_numbers
    def best_loss(self, compute: Numbers, sparsity: Numbers) -> Numbers:
        """L*, the least loss at a compute budget."""
        flops_per_token = self.best_flops_per_token(compute, sparsity)
        return self.loss(flops_per_token, sparsity, compute / flops_per_token)

    @beyond_numbers
    def tokens_per_parameter(self, compute: Numbers, sparsity: Numbers) -> Numbers:
        """D* over the parameters F* / 6 of the dense network with the same FLOPs."""
        flops_per_token = self.best_flops_per_token(compute, sparsity)
        return compute / flops_per_token / (flops_per_token / FLOPS_PER_PARAMETER)

    @beyond_numbers
    def compute_for(self, loss: Numbers, sparsity: Numbers) -> Floats:
        """The compute at which the frontier has this loss; infinite at or below the floor."""
        # On the frontier L* - E is a pure power of compute, so its value at C = 1 is the factor k.
        factor = np.asarray(self.best_loss(1.0, sparsity)) - self.floor
        above = np.asarray(loss - self.floor)
        safe = np.where(above > 0, above, 1.0)
        return np.where(above > 0, (factor / safe) ** (1 / np.asarray(self.gamma)), np.inf)

    def _scale_at(self, sparsity: Numbers) -> Numbers:
        return self.compute_scale * (1 - sparsity) ** self.sparsity_exponent


@beyond_numbers
def compute_gain(baseline: ScalingLaw, looped: ScalingLaw, compute: float, sparsity: float) -> Floats:
    """1 - C_looped / C_baseline at equal loss on both frontiers; minus infinity where the loss is never reached."""
    return 1 - looped.compute_for(baseline.best_loss(compute, sparsity), sparsity) / compute


Architecture = Literal["baseline", "smelt"]


def printed_law(architecture: Architecture) -> ScalingLaw:
    """The law with the coefficients that the paper prints."""
    return ScalingLaw(*(printed.number("scaling_law", architecture, letter) for letter in COEFFICIENTS))


def rounding_corners(architecture: Architecture) -> ScalingLaw:
    """The 64 corners of the box of coefficients that round to the printed ones."""
    ends = [printed.figure("scaling_law", architecture, letter).bounds for letter in COEFFICIENTS]
    return ScalingLaw(*np.array(list(itertools.product(*ends))).T)


def rounding_interval(compute: float, sparsity: float) -> tuple[float, float]:
    """Smallest and largest gain that coefficients rounding to the printed ones allow, over both boxes' corners.

    A gain is monotone in each coefficient over so small a box, so the corners hold its extremes.
    """
    baseline, looped = rounding_corners("baseline"), rounding_corners("smelt")
    losses = np.asarray(baseline.best_loss(compute, sparsity))
    needed = [float(value) for loss in losses for value in looped.compute_for(float(loss), sparsity)]
    return 1 - max(needed) / compute, 1 - min(needed) / compute
