"""The page of experts, run in process on planted captures."""

from dataclasses import replace
from pathlib import Path

from cache.recording import write_capture
from cache.store import Capture
from probes import expert_tokens
from tests.support.answers import measure
from tests.support.app_captures import episodes
from tests.support.app_pages import page


def test_an_expert_has_its_tokens_and_roles_on_both_visits_and_where_they_went(folder: Path) -> None:
    capture = Capture(folder / "looped")
    frame = measure(expert_tokens, capture.batches(expert_tokens.needs(capture.architecture))).table
    of_layer = frame[(frame["layers"] == "3") & (frame["level"] == "head")]
    one = of_layer[of_layer["expert"] == 5]
    test = page("experts", folder, {}, capture="looped", layer="3", expert="5")
    tables = [each.value for each in test.dataframe]
    stays = of_layer[of_layer["quantity"] == "stays"]
    assert tables[0]["expert"].tolist() == [str(number) for number in stays["expert"]]
    assert [text.split()[0] for text in tables[0]["null: popularity"]] == [f"{x:.3g}" for x in stays["null_popularity"]]
    for visit, (tokens, roles) in ((1, tables[1:3]), (2, tables[3:5])):
        of_visit = one[one["visit"] == visit]
        for table, quantity, name in ((tokens, "token share", "token"), (roles, "role share", "role")):
            rows = of_visit[of_visit["quantity"] == quantity]
            assert table[name].tolist() == rows[name].tolist()
            assert [text.split()[0] for text in table["share of its tokens [95%]"]] == [
                f"{x:.3g}" for x in rows["value"]
            ]
            assert {"null: uniform", "null: shuffled"} <= set(table)
    went = one[one["quantity"].isin(["stays", "goes to"])]
    assert len(tables[5]) == len(went)
    assert {"null: uniform", "null: popularity", "null: shuffled"} <= set(tables[5])
    contexts = one[one["quantity"] == "context"]
    assert [each.value for each in test.code[:-1]] == contexts["context"].tolist()
    assert test.code[-1].value == f"python -m probes.expert_tokens --capture {folder / 'looped'}"


def test_a_capture_without_choices_of_experts_is_one_line(tmp_path: Path) -> None:
    batch = episodes()
    kept = {key: array for key, array in batch.sites.items() if key[1] == "hook_resid_pre"}
    write_capture(tmp_path / "resid", [replace(batch, sites=kept, heads={})])
    (error,) = page("experts", tmp_path, {}, capture="resid").error
    assert "mlp.hook_expert_indices" in error.value


def test_a_layer_outside_the_loop_stays_chosen_and_says_how_it_is_measured(folder: Path) -> None:
    test = page("experts", folder, {}, capture="looped", layer="1")
    assert (len(test.info), len(test.warning), test.selectbox(key="layer").value) == (1, 0, "1")
    assert test.code[0].value.endswith(f"{folder / 'looped'} --layers 1 --level head")
