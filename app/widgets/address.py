"""What the address says of the choices on a page: a wrong value gives way to the default, and the page says so."""

from collections.abc import Callable, Mapping, Sequence

import streamlit as st

from smelt_interp.errors import UserError, shown

MISTAKES = "mistakes in the address"
"""Where a visitor's are kept until the page that falls back is drawn."""


def check_address(name: str, check: Callable[[str], object], fallback: object) -> None:
    """Call before the widget of that name is drawn: `check` raises UserError for a text that is no value of it.

    A wrong one is taken out of the address and the page starts again, since a widget reads the address as it was when
    the run began.
    """
    if name in st.session_state or name not in st.query_params:
        return
    given = st.query_params.get_all(name)
    try:
        if len(given) > 1:
            raise UserError(f"{name} must be given once in an address; got {len(given)} values")
        check(given[0])
    except UserError as error:
        forget(name, f"{error}: shown is {fallback}")


def check_one_of(name: str, known: list[str], fallback: object) -> None:
    """The same for a choice of one of these words."""

    def check(text: str) -> None:
        if text not in known:
            raise UserError(f"{name} must be one of {_some(known)}; got {shown(text)}")

    check_address(name, check, fallback)


def check_each_of(name: str, known: list[str]) -> None:
    """The same for a choice of any of these words: all go when one is unknown."""
    if name in st.session_state or name not in st.query_params:
        return
    unknown = [text for text in st.query_params.get_all(name) if text and text not in known]
    if unknown:
        forget(name, f"{name} must be among {_some(known)}; got {shown(unknown[0])}: shown are all")


def carry_over(name: str, known: Sequence[int] | Sequence[str]) -> None:
    """Call before the widget of that name is drawn: what another page left is written as here, or no choice here."""
    kept = st.session_state.get(name)
    if kept is None or kept in known:
        return
    same = [value for value in known if str(value) == str(kept)]
    if same:
        st.session_state[name] = same[0]
    else:
        del st.session_state[name]


def forget(name: str, mistake: str) -> None:
    """Take a choice out of the address, keep why, and start the page again."""
    st.session_state[MISTAKES] = (*st.session_state.get(MISTAKES, ()), str(UserError(mistake)))
    del st.query_params[name]
    st.rerun()


def kept_choices(*names: str) -> dict[str, list[str]]:
    """What the address says of these, for a link to another page."""
    return {name: [*dict.fromkeys(st.query_params.get_all(name))] for name in names if name in st.query_params}


def query_of(options: Mapping[str, object]) -> dict[str, str]:
    """The address that sets the widgets to these options, given as values of a result's JSON."""
    return {
        name: option_text(value).lower() if isinstance(value, bool) else option_text(value)
        for name, value in options.items()
    }


def option_text(value: object) -> str:
    """An option's value as it is typed: words separated by spaces."""
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def link_to(pages: Mapping[str, st.Page], name: str, label: str, **choices: str | Sequence[str]) -> None:
    """A link to a page of these by its name, with these choices in its address; it opens in the same tab."""
    if name in pages:
        st.page_link(pages[name], label=label, icon=":material/arrow_forward:", query_params=choices)


def show_mistakes() -> None:
    """One line each, once."""
    for mistake in st.session_state.pop(MISTAKES, ()):
        st.warning(f"The address: {mistake}", icon=":material/link_off:")


def _some(known: list[str]) -> str:
    return ", ".join(known[:8]) + (", ..." if len(known) > 8 else "") if known else "none"
