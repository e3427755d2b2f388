"""`pytest -p tests.support.without_torch`: tests run as where torch, and what brings it, is not installed."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder

MISSING = ("torch", "triton", "transformer_lens", "nnsight", "model")


def blind(find: Callable[..., ModuleSpec | None]) -> Callable[..., ModuleSpec | None]:
    """The search for a module, which finds the missing ones no more."""
    return lambda name, *rest: None if name.partition(".")[0] in MISSING else find(name, *rest)


for finder in sys.meta_path:
    finder.find_spec = blind(finder.find_spec)
PathFinder.find_spec = blind(PathFinder.find_spec)
