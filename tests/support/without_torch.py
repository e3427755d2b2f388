"""Tests as on a machine where torch, and what brings it, is not installed: which can run there, and what is missing."""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

ROOT = Path(__file__).parents[2]
MISSING = ("torch", "triton", "transformer_lens", "nnsight", "model", "benchmarks")


@cache
def needs_torch(path: Path) -> bool:
    """Whether a file of tests imports something that is missing, itself or through `tests.support` and the like."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    ours = [ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in imported if name.startswith("tests.")]
    return any(name.partition(".")[0] in MISSING for name in imported) or any(
        needs_torch(each) for each in ours if each.is_file() and each != path
    )


def take_away() -> None:
    """Let nobody in this process find what is missing."""

    def blind(find: Callable[..., ModuleSpec | None]) -> Callable[..., ModuleSpec | None]:
        return lambda name, *rest: None if name.partition(".")[0] in MISSING else find(name, *rest)

    for finder in sys.meta_path:
        finder.find_spec = blind(finder.find_spec)
    PathFinder.find_spec = blind(PathFinder.find_spec)
