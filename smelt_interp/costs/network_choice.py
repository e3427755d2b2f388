"""Which networks a command is about: a named pair, or config files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smelt_interp.config import ModelConfig
from smelt_interp.costs.presets import causal_mean, pair
from smelt_interp.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """One network of a command."""

    name: str
    config: ModelConfig
    attended_tokens: float
    """Mean positions that a query attends to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkChoice:
    """The networks of a command."""

    pair: str | None = None
    """A named pair: 100M, 200M, 600M or 1.6B of the paper's grid, or demo."""
    config: tuple[Path, ...] = ()
    """One config file (JSON), or two: the network, then the one that it is matched to."""

    def networks(self, attended_tokens: float | Literal["own"] = "own") -> tuple[Network, ...]:
        """The networks, the matched one before its reference, with an attended length given or their own.

        Their own is 390 for the paper's grid, and the causal mean over a full sequence, (context + 1) / 2, for any
        other network. Raises `UserError` unless either a pair or files are named.
        """
        if (self.pair is None) == (not self.config):
            got = "both" if self.config else "neither"
            raise UserError(f"the networks must be named by either --pair or --config; got {got}")
        if self.pair is not None:
            named = pair(self.pair)
            own = named.attended_tokens
            found = [("smelt", named.smelt, own), ("baseline", named.baseline, own)]
        elif len(self.config) > 2:
            raise UserError(f"--config must name one file or two; got {len(self.config)}")
        else:
            names = [str(path) for path in self.config]
            if len(set(names)) < len(names):
                names[1] += ", again"
            loaded = [ModelConfig.load(path) for path in self.config]
            found = [(name, config, causal_mean(config.context)) for name, config in zip(names, loaded, strict=True)]
        return tuple(
            Network(name=name, config=config, attended_tokens=own if attended_tokens == "own" else attended_tokens)
            for name, config, own in found
        )
