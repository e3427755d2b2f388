"""A probe's options as a page has them."""

from dataclasses import fields

import pytest
from streamlit.testing.v1 import AppTest

from app.widgets.address import query_of
from app.widgets.options import option_help, option_words, parse_option
from probes.running import catalog, command
from smelt_interp.errors import UserError
from smelt_interp.terminal.from_one import as_typed

CHANGED = {
    "attention_sink": {"heads": "2 4", "t_min": "2", "content": "brackets", "sink_threshold": "0.5"},
    "projection_similarity": {"compare": "1 2", "heads": "concatenated", "t_min": "0"},
    "massive_activations": {"floor": "50.5"},
}
"""Of the probes whose pages are tried with options; the others are tried with none."""


@pytest.mark.parametrize("name", catalog.NAMES)
def test_a_page_has_the_options_of_the_command_and_no_other_and_an_address_gives_the_same(name: str) -> None:
    address = CHANGED.get(name, {})

    def script(name: str) -> None:
        import streamlit as st

        from app.widgets.options import choose_options
        from probes.running import catalog

        st.session_state["made"] = choose_options(catalog.load(name).Options)

    test = AppTest.from_function(script, args=(name,), default_timeout=30)
    test.query_params.update(address)
    made = test.run().session_state["made"]
    module = catalog.load(name)
    kinds = (test.selectbox, test.multiselect, test.number_input, test.text_input, test.toggle)
    widgets = {widget.key: widget.help for kind in kinds for widget in kind}
    help_of = option_help(module.Options)
    assert set(widgets) == {field.name for field in fields(module.Options)}
    assert {key: widgets[key] for key in help_of} == help_of
    assert all(help_of.values())
    arguments = command.parse(name, module, ["--capture", "x", *option_words(made)])
    assert arguments.measure == made
    for key, text in address.items():
        assert query_of({key: as_typed(made)[key]}) == {key: text.removesuffix(".0")}


def test_words_that_are_no_option_are_refused() -> None:
    assert parse_option("layers", "3 1", tuple[int, ...]) == (3, 1)
    with pytest.raises(UserError, match=r"layers must be whole numbers separated by spaces; got 1\.5"):
        parse_option("layers", "1.5", tuple[int, ...])
    with pytest.raises(UserError, match="scale must be number; got nothing"):
        parse_option("scale", "", float)
