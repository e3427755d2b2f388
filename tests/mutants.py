"""Deliberate faults, one at a time, and whether a test sees them: by hand, since it takes an hour or more.

    pip install coverage
    python -m tests.mutants --files smelt_interp/similarity.py probes/statistics --sample 100

First the tests run once while `coverage` notes which of them reach which line. Then each fault (a comparison, an
operation, a number or a truth value that is another) is put into a module as it is imported, in its own process, and
the tests that reach its line run, the quickest first. Bounds of options, messages and defaults of types are left alone.
"""

import ast
import io
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from pydantic import Field

from smelt_interp.errors import run_command
from smelt_interp.terminal.command_line import parse
from smelt_interp.validation import Seed, validated

ROOT = Path(__file__).parents[1]
PRODUCT = ("smelt_interp", "model", "cache", "probes")
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Add: "-", ast.Sub: "+",
    ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Mod: "*", ast.Pow: "*", ast.And: "or", ast.Or: "and",
    ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
SIGNS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Add: "+", ast.Sub: "-",
    ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.And: "and", ast.Or: "or",
    ast.BitAnd: "&", ast.BitOr: "|",
}  # fmt: skip
PYTEST = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Plugins that this process has imported already are not asserted about."""
LEFT_ALONE = (ast.Raise, ast.JoinedStr, ast.AnnAssign, ast.arguments, ast.Assert)


@validated
class Options:
    """Which faults are tried."""

    files: tuple[Path, ...]
    """Modules, or folders of them, below the root."""
    tests: tuple[str, ...] = ("tests/smelt_interp", "tests/model", "tests/cache", "tests/probes")
    sample: Annotated[int, Field(ge=1, le=10**6)] = 100
    """So many of the faults, drawn at random."""
    seed: Seed = 0
    seconds: Annotated[float, Field(gt=0, le=3600)] = 20.0
    """Tests of so many seconds, as they took without a fault, are given a fault."""
    reached: Path = Path("/tmp/smelt-interp-reached.json")
    """Which tests reach which lines; made when it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One change of one place."""

    path: str
    line: int
    start: int
    stop: int
    old: str
    new: str

    def of(self, source: bytes) -> bytes:
        """The source with the fault in it."""
        return source[: self.start] + self.new.encode() + source[self.stop :]


def faults(path: Path) -> Iterator[Fault]:
    """Every fault of a module. Offsets count bytes."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def fault(node: ast.AST, stop: int, start: int, new: str) -> Fault:
        old = source[start:stop].decode()
        name = str(path.relative_to(ROOT))
        return Fault(path=name, line=node.lineno, start=start, stop=stop, old=old, new=new)  # type: ignore[attr-defined]  # of a node with a place

    def begin(node: ast.expr) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def end(node: ast.expr) -> int:
        return starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)

    def between(left: ast.expr, right: ast.expr, sign: ast.AST) -> Iterator[Fault]:
        gap = source[end(left) : begin(right)].decode()
        if type(sign) in SWAPS and (at := gap.find(SIGNS[type(sign)])) >= 0 and "#" not in gap:
            start = end(left) + at
            yield fault(left, start + len(SIGNS[type(sign)]), start, SWAPS[type(sign)])

    def within(node: ast.AST) -> Iterator[Fault]:
        if isinstance(node, LEFT_ALONE):
            return
        match node:
            case ast.Compare(left=left, ops=[sign], comparators=[right]):
                yield from between(left, right, sign)
            case ast.BinOp(left=left, op=sign, right=right):
                yield from between(left, right, sign)
            case ast.BoolOp(op=sign, values=values):
                yield from between(values[0], values[1], sign)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield fault(node, begin(operand), begin(node), "")
            case ast.Constant(value=bool(value)):
                yield fault(node, end(node), begin(node), str(not value))
            case ast.Constant(value=int(value)):
                yield fault(node, end(node), begin(node), str(value + 1))
            case ast.Constant(value=float(value)):
                yield fault(node, end(node), begin(node), repr(value * 1.1 if value else 0.1))
        for child in ast.iter_child_nodes(node):
            yield from within(child)

    yield from within(ast.parse(source))


class Reached:
    """A plugin of pytest that notes the lines that each test reaches, and how long it takes."""

    def __init__(self, folders: list[str]) -> None:
        import coverage

        self.coverage = coverage.Coverage(data_file=None, source=folders, messages=False)
        self.seconds: dict[str, float] = {}
        self.passed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Everything that happens for one test, its fixtures included."""
        self.coverage.switch_context(item.nodeid)
        began = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - began
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that fails without a fault sees none."""
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)


def reach(tests: tuple[str, ...], folders: list[str], path: Path) -> None:
    """Run the tests once, and write down what they reach."""
    plugin = Reached(folders)
    plugin.coverage.start()
    pytest.main([*PYTEST, "-m", "not browser", *tests], plugins=[plugin])
    plugin.coverage.stop()
    data, lines = plugin.coverage.get_data(), defaultdict(list)
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            lines[f"{Path(file).relative_to(ROOT)}:{line}"] = sorted(set(contexts) & plugin.passed)
    path.write_text(json.dumps({"lines": lines, "seconds": plugin.seconds}), encoding="utf-8")


def tried(fault: Fault, tests: list[str], seconds: float) -> str:
    """What the tests say of a fault: killed, survived or, when they do not end, timeout. Each runs in a fork."""
    process = os.fork()
    if process == 0:
        code = 97
        try:
            signal.alarm(int(60 + 10 * seconds))
            wrong, load = str(ROOT / fault.path), SourceFileLoader.get_data
            SourceFileLoader.get_data = lambda self, path: (  # type: ignore[method-assign]  # how the fault gets in
                fault.of(load(self, path)) if path == wrong else load(self, path)
            )
            sys.dont_write_bytecode = True
            for name in [name for name in sys.modules if name.partition(".")[0] in PRODUCT]:
                del sys.modules[name]
            # Compiled files of the module stand beside it without the fault.
            SourceFileLoader.path_stats = lambda self, path: (_ for _ in ()).throw(OSError)  # type: ignore[method-assign]  # likewise
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                code = pytest.main([*PYTEST, "-x", *tests])
        finally:
            os._exit(int(code))
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return "survived" if status == 0 else "timeout" if status == -signal.SIGALRM else "killed"


def main() -> None:
    """Try a sample of the faults; print those that no test sees."""
    options = parse(Options, prog="python -m tests.mutants", description="Faults that no test sees.")
    paths = [ROOT / path for path in options.files]
    modules = [each for path in paths for each in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    if not options.reached.exists():
        if os.fork() == 0:
            reach(
                options.tests,
                [str(ROOT / name) for name in PRODUCT],
                options.reached,
            )
            os._exit(0)
        os.wait()
    known = json.loads(options.reached.read_text(encoding="utf-8"))
    import h5py, pandas, scipy.optimize, scipy.stats, torch, transformer_lens  # noqa: E401, F401, I001  # once, for all forks

    every = [fault for module in modules for fault in faults(module)]
    chosen = np.random.default_rng(options.seed).permutation(len(every))[: options.sample]
    ends: dict[str, int] = defaultdict(int)
    for number in chosen:
        fault, left, tests = every[number], options.seconds, []
        for test in sorted(known["lines"].get(f"{fault.path}:{fault.line}", ()), key=known["seconds"].__getitem__):
            left -= known["seconds"][test]
            if left > 0 or not tests:
                tests.append(test)
        end = tried(fault, tests, options.seconds) if tests else "not reached"
        ends[end] += 1
        if end not in ("killed", "timeout"):
            text = (ROOT / fault.path).read_text(encoding="utf-8").splitlines()[fault.line - 1].strip()
            print(f"{end}: {fault.path}:{fault.line}: {fault.old!r} -> {fault.new!r} in: {text}", flush=True)
    print(f"{len(every)} faults, of which {len(chosen)} tried: {dict(ends)}")


if __name__ == "__main__":
    run_command(main)
