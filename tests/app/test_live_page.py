"""The page of live edits, run in process on tiny networks."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from tests.support.app_pages import drawn, page
from tests.support.configs import TINY, TINY_BASELINE
from tests.support.networks import tiny_network

PROMPT = "ab ab ab"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a Baseline, a looped network, and one cut short."""
    root = tmp_path_factory.mktemp("root")
    tiny_network(TINY_BASELINE).save_pretrained(root / "baseline", readme="")
    tiny_network(TINY).save_pretrained(root / "tiny", readme="")
    (root / "cut").mkdir()
    for name in ("config.json", "model.safetensors"):
        (root / "cut" / name).write_bytes((root / "tiny" / name).read_bytes()[:50])
    return root


def test_the_page_shows_what_its_code_gives_and_every_kind_of_edit_can_be_chosen(root: Path) -> None:
    choices = {"edit": "zero", "site": "attn.hook_z", "layers": "2", "visit": "every", "heads": "3"}
    test = page("live", root, prompt=PROMPT, other="ba ab ba", **choices)
    assert not test.warning
    assert test.selectbox(key="network").value == "tiny"  # the first with a loop
    seen: dict[str, object] = {}
    with redirect_stdout(io.StringIO()):
        exec(test.code[-1].value, seen)
    assert "zero(Target('attn.hook_z', (1, 3), heads=(2,)))" in test.code[-1].value
    _, arrays = drawn(test)
    np.testing.assert_array_equal(arrays["values"], seen["seen"].coloured().values_T)
    assert test.dataframe[0].value.equals(seen["seen"].next_tokens)
    assert test.dataframe[1].value.equals(seen["seen"].tokens)
    for kind in test.selectbox(key="edit").options:
        test.selectbox(key="edit").set_value(kind).run()
        assert not test.exception
        assert not test.error, test.error[0].value
        assert {"patch": "resample"}.get(kind, kind) + "(" in test.code[-1].value
    test.selectbox(key="edit").set_value("skip").run()
    test.text_area(key="prompt").set_value("")
    test.button[0].click().run()
    assert [each.value for each in test.error] == [
        "a prompt must be 2 to 64 tokens of this network, BOS included; got 1"
    ]


def test_a_network_that_runs_each_layer_once_is_looped_by_the_page_as_by_its_code(root: Path) -> None:
    test = page("live", root, network="baseline", prompt=PROMPT, loop="2-3", times="3", edit="clamp", visit="every")
    assert not test.error
    assert "Opening(loop=LoopedSpan(layers=LayerRange(start=1, stop=3), visits=3, factor=0.333" in test.code[-1].value
    assert "clamp(network, 'attn.hook_pattern', [3, 4, 5, 6])" in test.code[-1].value
    test.selectbox(key="network").set_value("tiny").run()
    assert [each.value for each in test.error] == [
        "--loop must be of a network that runs each layer once; got one with a loop of its own"
    ]
    assert test.text_area(key="prompt").value == PROMPT  # is not lost


def test_wrong_choices_fall_back_and_what_does_not_fit_is_one_line(root: Path) -> None:
    wrong = {"network": "../x", "loop": "x", "edit": "burn", "visit": "9", "layers": "99"}
    test = page("live", root, **wrong, prompt="a" * 70)
    assert [each.value.split()[2] for each in test.warning] == ["network", "looped", "edit", "layers", "visit"]
    assert [each.value for each in test.error] == [
        "a prompt must be 2 to 64 tokens of this network, BOS included; got 71"
    ]
    for prompt in ("🦊 é\u202e", "a\x00\x1b[31m\x85b"):
        test.text_area(key="prompt").set_value(prompt)
        test.button[0].click().run()
        assert not test.exception
        assert not test.error
        assert repr(prompt) in test.code[-1].value
    (warning,) = page("live", root, prompt="a" * 10_000).warning
    assert warning.value.startswith("The address: prompt must be at most 4096 characters; got 10000: shown is")
    test.selectbox(key="network").set_value("cut").run()
    (error,) = test.error
    assert "config.json must hold JSON" in error.value


def test_a_root_without_a_checkpoint_says_what_one_is(tmp_path: Path) -> None:
    test = page("live", tmp_path)
    assert not test.error
    assert "There is no checkpoint below" in test.info[0].value
