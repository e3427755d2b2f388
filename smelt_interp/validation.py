"""Records whose fields carry their rules: a value outside its rule is a `UserError` that names field, rule and value.

    @validated
    class Options:
        samples: Annotated[int, Field(ge=1, le=10**6)] = 64
        \"\"\"Rows.\"\"\"

`Options(samples=0)` says "samples must be at least 1; got 0". The record is a frozen dataclass with keyword arguments,
made by pydantic and read by tyro as any other. Types are strict: True is no number, 3.0 no whole one, a list no tuple.
Every number has a bound on both sides. Rules between fields are `__post_init__`'s.
"""

from collections.abc import Callable
from functools import wraps
from typing import Annotated, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from smelt_interp.errors import UserError, shown

Record = TypeVar("Record")

Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Share = Annotated[float, Field(ge=0, le=1)]

_BOUNDS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "multiple_of": "a multiple of {multiple_of}",
    "finite_number": "finite",
}
_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a tuple",
    "literal_error": "{expected}",
    "is_instance_of": "a {class}",
    "dataclass_type": "a {class_name}",
    "dataclass_exact_type": "a {class_name}",
}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def validated(record: type[Record]) -> type[Record]:
    """Make a class a frozen dataclass whose fields are checked when it is made, and by `dataclasses.replace`."""
    strict = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
    made = dataclass(frozen=True, slots=True, kw_only=True, config=strict)(record)
    checks = cast("Callable[..., None]", made.__init__)

    @wraps(checks)
    def __init__(self: object, **values: object) -> None:
        try:
            checks(self, **values)
        except ValidationError as error:
            raise _in_one_line(record.__name__, error) from None

    type.__setattr__(made, "__init__", __init__)
    return cast("type[Record]", made)


def different(name: str, values: tuple[object, ...]) -> None:
    """Raise `UserError` unless there is a value and none of them twice."""
    if not values or len(set(values)) < len(values):
        raise UserError(f"{name} must be one or more different values; got {' '.join(map(str, values)) or 'none'}")


def _in_one_line(record: str, error: ValidationError) -> Exception:
    """What is wrong first: a rule of the record's own as it stands, else the field, its rule and its value."""
    found = error.errors(include_url=False)
    own = found[0].get("ctx", {}).get("error")
    if isinstance(own, Exception):
        return own
    # A key that is missing or unknown is told with the others of its kind.
    kind = found[0]["type"]
    if kind in ("missing", "unexpected_keyword_argument"):
        names = ", ".join(sorted(str(each["loc"][0]) for each in found if each["type"] == kind))
        missing = f"{names} must be given; got nothing"
        return UserError(missing if kind == "missing" else f"only fields of {record} may be given; got {names}")
    # A field of several types is told of once a type; one whose bound was broken was of the right type.
    field = [each for each in found if each["loc"][0] == found[0]["loc"][0]]
    bound = [each for each in field if each["type"] in _BOUNDS]
    rules = dict.fromkeys(_rule(each) for each in bound[:1] or field)
    # What follows the name is a place in a tuple, or the type that was tried, which the rule says better.
    name = ".".join(str(part) for part in field[0]["loc"] if isinstance(part, int) or part == field[0]["loc"][0])
    return UserError(f"{name} must be {' or '.join(rules)}; got {shown((bound or field)[0]['input'])}")


def _rule(error: ErrorDetails) -> str:
    """The words for one of pydantic's errors; its own where there are none here."""
    if error["input"] != error["input"]:
        return "a number"  # NaN breaks whatever bound is asked first
    words = _BOUNDS.get(error["type"]) or _KINDS.get(error["type"])
    context = {name: f"{at:g}" if isinstance(at, float) else at for name, at in error.get("ctx", {}).items()}
    return words.format(**context) if words else error["msg"]
