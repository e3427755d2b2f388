"""A probe's options as widgets, as an address, and as the words of its command: all from the same dataclass."""

import ast
import inspect
import textwrap
import types
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from math import isfinite
from typing import Literal, Union, get_args, get_origin, get_type_hints

import streamlit as st

from app.widgets.address import check_address, option_text
from smelt_interp.costs.spans import LayerRange
from smelt_interp.errors import UserError
from smelt_interp.terminal.from_one import as_typed, from_one, shifted

LARGEST_EXACT = 2**53 - 1
"""A browser's numbers are exact up to here."""


def option_help(options: type) -> dict[str, str]:
    """The docstring under each field, inherited ones too: what the command prints for `--help`."""
    found = {}
    for parent in filter(is_dataclass, reversed(options.__mro__)):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(parent))).body
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match following:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        found[statement.target.id] = inspect.cleandoc(text)
    return found


def choose_options(options: type) -> object:
    """One widget a field, its value in the address; the options they make. Raises UserError as the options do."""
    made: object = options(**choose_values(options, [field.name for field in fields(options)]))
    return made


def choose_values(options: type, names: Sequence[str]) -> dict[str, object]:
    """One widget for each of these fields, and the values they stand at. Raises UserError once all are drawn."""
    kinds, texts, counted = get_type_hints(options), option_help(options), from_one(options)
    defaults = {field.name: _default(field) for field in fields(options) if field.name in names}
    chosen: dict[str, object] = {}
    problems: list[UserError] = []
    for name in names:
        try:
            by = 1 if name in counted else 0  # a page counts layers, visits and heads from 1
            default = shifted(defaults[name], by)
            check_address(name, partial(_check, options, name, kinds[name], by), option_text(default) or "none")
            shown = _widget(name, kinds[name], default, texts[name])
            chosen[name] = shifted(shown, -by)
        except UserError as problem:
            problems.append(problem)
    if problems:
        raise problems[0]
    return chosen


def option_words(options: object) -> list[str]:
    """The words of the command line that give these options; those at their default need none."""
    words: list[str] = []
    for name, value in changed_options(options).items():
        flag = name.replace("_", "-")
        if is_dataclass(value) and not isinstance(value, LayerRange):
            words += option_words(value)
        elif isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *(map(str, value) if isinstance(value, (tuple, list)) else [str(value)])]
    return words


def changed_options(options: object) -> dict[str, object]:
    """The options that are not at their default, with the values that the command takes."""
    values = as_typed(options)
    defaults = {field.name: field.default for field in fields(options)}  # type: ignore[arg-type]  # a dataclass
    return {name: values[name] for name in values if getattr(options, name) != defaults[name]}


def label_of(name: str) -> str:
    """What a page calls an option: `num_kv_heads` is KV heads."""
    words = name.removeprefix("num_").replace("_", " ").capitalize()
    return words.replace("Kv", "KV").replace("kv", "KV").replace("flops", "FLOPs")


def parse_option(name: str, text: str, kind: object) -> object:
    """A typed value as the command line reads it: words separated by spaces. Raises UserError."""
    try:
        return _parsed(text.strip(), kind)
    except ValueError:
        raise UserError(f"{name} must be {_described(kind)}; got {text or 'nothing'}") from None


def _check(options: type, name: str, kind: object, by: int, text: str) -> None:
    """Raise UserError for a text that is no value of this option by itself."""
    value = parse_option(name, text, kind)
    if kind is int and isinstance(value, int) and abs(value) > LARGEST_EXACT:
        raise UserError(f"{name} must be at most {LARGEST_EXACT} on a page, where numbers are a browser's; got {value}")
    try:
        options(**{name: shifted(value, -by)})
    except UserError as error:
        if str(error).startswith(name):  # else a rule between options, which the page tells once all are drawn
            raise


def _widget(name: str, kind: object, default: object, help_text: str) -> object:
    label = label_of(name)
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        index = choices.index(default)
        return st.selectbox(label, choices, index=index, key=name, help=help_text, bind="query-params")
    if isinstance(default, bool):
        return st.toggle(label, default, key=name, help=help_text, bind="query-params")
    if kind is int and isinstance(default, int):
        return st.number_input(label, value=default, step=1, key=name, help=help_text, bind="query-params")
    if kind is float and isinstance(default, float):
        return st.number_input(label, value=default, format="%g", key=name, help=help_text, bind="query-params")
    text = st.text_input(label, option_text(default), key=name, help=help_text, bind="query-params")
    return parse_option(name, text or "", kind)


def _default(field: "Field[object]") -> object:
    assert field.default is not MISSING, f"option {field.name} has no default"
    return field.default


def _parsed(text: str, kind: object) -> object:
    arguments = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        for member in arguments:
            with suppress(ValueError):
                return _parsed(text, member)
    elif get_origin(kind) is Literal:
        if text in arguments:
            return text
    elif get_origin(kind) is tuple:
        return tuple(_parsed(word, arguments[0]) for word in text.split())
    elif kind is LayerRange:
        return LayerRange.parse(text)
    elif kind is bool:
        if text in ("true", "false"):
            return text == "true"
    elif kind in (int, float, str):
        value: object = kind(text)
        if not isinstance(value, float) or isfinite(value):
            return value
    raise ValueError(text)


def _described(kind: object) -> str:
    arguments = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(map(_described, arguments))
    if get_origin(kind) is Literal:
        return " or ".join(map(str, arguments))
    if get_origin(kind) is tuple:
        return f"{_described(arguments[0])}s separated by spaces"
    if kind is LayerRange:
        return "first-last"
    if kind is bool:
        return "true or false"
    return "whole number" if kind is int else "number" if kind is float else "text"
