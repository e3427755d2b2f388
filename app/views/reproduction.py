"""The paper's figures beside ours, as `python -m probes.reproduction --out` wrote them into the folder."""

import inspect
from pathlib import Path

import streamlit as st
from pandas import DataFrame

from probes import reproduction
from smelt_interp.errors import UserError

COMMAND = "python -m probes.reproduction --pair checkpoints/demo-smelt checkpoints/demo-baseline --out {folder}"


def reproduction_page(folder: Path) -> None:
    """The card that the folder holds, or what to type to have one."""
    question, _, definition = inspect.cleandoc(reproduction.__doc__ or "").partition("\n\n")
    st.title("Reproduction")
    st.markdown(question)
    with st.expander("How it is measured"):
        st.code(definition, language=None, wrap_lines=True)
    try:
        card = reproduction.read_card(folder)
    except UserError as error:
        there = (folder / reproduction.CARD).exists()
        said = f"{error}:" if there else f"There is no card in `{folder}` yet. This writes one; then reload this page:"
        st.info(said, icon=":material/inbox:")
        st.code(COMMAND.format(folder=folder), language=None, wrap_lines=True)
        return
    table = reproduction.table(card.rows, card.name, reproduction.BESIDE)
    st.subheader(card.name)
    texts = table.texts()
    whole = {next(iter(texts)): st.column_config.TextColumn(width=230)}  # the name of a figure is not cut
    st.dataframe(DataFrame(texts), hide_index=True, height="content", row_height=30, column_config=whole, key="card")
    st.caption("  \n".join([*table.notes, f"intervals: {card.intervals}"]))
    st.subheader("The same on the command line")
    st.code(card.command, language=None, wrap_lines=True)
