"""Which networks a command is about: a named pair, or config files."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from smelt_interp.config import ModelConfig
from smelt_interp.costs.presets import causal_mean, pair
from smelt_interp.errors import UserError
from smelt_interp.validation import validated

AttendedTokens = Annotated[float, Field(ge=0, le=1e12)]


class NamedNetwork(NamedTuple):
    """One network of a command."""

    name: str
    config: ModelConfig
    attended_tokens: float
    """Mean positions that a query attends to."""


@validated
class NetworkChoice:
    """The networks of a command."""

    pair: str | None = None
    """A named pair: 100M, 200M, 600M or 1.6B of the paper's grid, or demo."""
    config: tuple[Path, ...] = ()
    """One config file (JSON), or two: the network, then the one that it is matched to."""

    def networks(self, attended_tokens: float | Literal["own"] = "own") -> tuple[NamedNetwork, ...]:
        """The networks, the matched one before its reference, with an attended length given or their own.

        Their own is 390 for the paper's grid, and the causal mean over a full sequence, (context + 1) / 2, for any
        other network. Raises `UserError` unless either a pair or files are named.
        """
        if (self.pair is None) == (not self.config):
            got = "both" if self.config else "neither"
            raise UserError(f"the networks must be named by either --pair or --config; got {got}")
        if len(self.config) > 2:
            raise UserError(f"--config must name one file or two; got {len(self.config)}")
        if self.pair is not None:
            named = pair(self.pair)
            found = [
                NamedNetwork("smelt", named.smelt, named.attended_tokens),
                NamedNetwork("baseline", named.baseline, named.attended_tokens),
            ]
        else:
            configs = [(str(path), ModelConfig.load(path)) for path in self.config]
            found = [NamedNetwork(name, config, causal_mean(config.context)) for name, config in configs]
            if len({network.name for network in found}) < len(found):
                found[1] = found[1]._replace(name=f"{found[1].name}, again")
        if attended_tokens == "own":
            return tuple(found)
        return tuple(network._replace(attended_tokens=attended_tokens) for network in found)
