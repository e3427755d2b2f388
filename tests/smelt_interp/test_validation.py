"""A record says in one line which field is outside which rule."""

from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro
from pydantic import Field

from smelt_interp.errors import UserError
from smelt_interp.terminal.command_line import parse
from smelt_interp.validation import Seed, Share, Threads, validated


@validated
class Load:
    """Part of another."""

    threads: Threads = 1


@validated
class Options:
    """What the tests make."""

    load: tyro.conf.OmitArgPrefixes[Load] = Load()
    samples: Annotated[int, Field(ge=1, le=10**6)] = 64
    """Rows."""
    rate: Annotated[float, Field(gt=0, lt=10)] = 1.0
    share: Share = 0.5
    seed: Seed = 0
    kind: Literal["raw", "centred"] = "raw"
    length: Annotated[float, Field(ge=0, le=100)] | Literal["own"] = "own"
    layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    folder: Path | None = None
    reverse: bool = False

    def __post_init__(self) -> None:
        if self.samples == 13:
            raise UserError("samples must not be unlucky; got 13")


@validated
class Child(Options):
    """One field more, and that one must be given."""

    name: str


WRONG = [
    ({"samples": 0}, "samples must be at least 1; got 0"),
    ({"samples": 10**7}, "samples must be at most 1000000; got 10000000"),
    ({"samples": 10**6000}, "samples must be at most 1000000; got a number of 19932 bits"),
    ({"samples": 3.0}, "samples must be a whole number; got 3.0"),
    ({"samples": True}, "samples must be a whole number; got True"),
    ({"samples": "3"}, "samples must be a whole number; got '3'"),
    ({"samples": 13}, "samples must not be unlucky; got 13"),
    ({"rate": 0}, "rate must be above 0; got 0"),
    ({"rate": 10.0}, "rate must be below 10; got 10.0"),
    ({"rate": float("nan")}, "rate must be a number; got nan"),
    ({"rate": float("inf")}, "rate must be below 10; got inf"),
    ({"share": 1.5}, "share must be at most 1; got 1.5"),
    ({"seed": -1}, "seed must be at least 0; got -1"),
    ({"kind": "mean"}, "kind must be 'raw' or 'centred'; got 'mean'"),
    ({"length": -1.0}, "length must be at least 0; got -1.0"),
    ({"length": "long"}, "length must be a number or 'own'; got 'long'"),
    ({"layers": [1]}, r"layers must be a tuple; got \[1\]"),
    ({"layers": (0, -1)}, "layers.1 must be at least 0; got -1"),
    ({"folder": "here"}, "folder must be a Path; got 'here'"),
    ({"reverse": 1}, "reverse must be true or false; got 1"),
    ({"load": None}, "load must be a Load; got None"),
    ({"sample": 1}, "only fields of Options may be given; got sample"),
]


@pytest.mark.parametrize(("values", "says"), WRONG)
def test_the_first_thing_wrong_is_one_line(values: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=f"^{says}$"):
        Options(**values)  # type: ignore[arg-type]  # that is the point


def test_a_whole_number_is_a_number_and_the_record_is_a_frozen_dataclass() -> None:
    options = Options(rate=2)
    assert asdict(options)["rate"] == 2.0
    assert options == Options(rate=2.0)
    with pytest.raises(FrozenInstanceError):
        options.samples = 3  # type: ignore[misc]  # that is the point
    with pytest.raises(UserError, match=r"^samples must be at least 1; got 0$"):
        replace(options, samples=0)


def test_a_child_has_the_rules_of_its_parent_and_says_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"^samples must be at least 1; got 0$"):
        Child(name="a", samples=0)
    with pytest.raises(UserError, match=r"^name must be given; got nothing$"):
        Child()  # type: ignore[call-arg]  # that is the point


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--samples", "0"], "samples must be at least 1; got 0; see tool --help"),
        (["--samples", "9" * 5000], "--samples must be a number; got "),
        (["--threads", "1000000"], "threads must be at most 1024; got 1000000"),
        (["--rate", "inf"], "rate must be below 10; got inf"),
    ],
)
def test_a_command_line_says_the_same(args: list[str], says: str) -> None:
    with pytest.raises(UserError, match=f"^{says}"):
        parse(Options, prog="tool", description="A tool.", args=args)
    assert parse(Options, prog="tool", description="A tool.", args=["--threads", "2"]).load == Load(threads=2)
