"""What a prompt shows under an edit: of tiny networks, against passes run by hand."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from model.families.opening import Opening, open_network
from model.hooks.interventions import PATTERN, UPDATES, skip
from model.network import LoopedMoE
from model.tokenizers import HuggingFaceTokenizer
from probes.running.live import (
    KINDS,
    LAYER,
    MOST_CHARACTERS,
    Change,
    Kind,
    Made,
    checkpoints_below,
    code,
    first_to_show,
    kinds_of,
    look,
    made,
    sites_of,
    stamp_of,
)  # fmt: skip
from smelt_interp.costs.spans import LayerRange
from smelt_interp.errors import UserError
from smelt_interp.looped_span import LoopedSpan
from tests.support.configs import TINY_BASELINE
from tests.support.families import hooked
from tests.support.networks import tiny_network

PROMPT, OTHER = "ab ab ab", "ba ab ba"


@pytest.fixture(scope="module")
def network() -> LoopedMoE:
    return tiny_network()


def every_edit(network: LoopedMoE) -> dict[tuple[Kind, str], Made]:
    architecture = network.architecture
    layers = architecture.loops[0].layers
    return {
        (kind, site): made(network, Change(kind=kind, layers=layers, visits=(1,), site=site))
        for kind in kinds_of(architecture)
        for site in sites_of(kind, architecture) or [""]
    }


def hand_made(kind: Kind, site: str = "hook_mlp_out", visit: int = 1) -> Change:
    return Change(kind=kind, layers=(1,), visits=(visit,), site=site)


def without_third_head(x_BTQC: torch.Tensor, hook: object) -> torch.Tensor:
    return x_BTQC * torch.tensor([1.0, 1.0, 0.0, 1.0])[:, None]


def test_numbers_are_those_of_passes_run_by_hand(network: LoopedMoE) -> None:
    change = Change(kind="zero", layers=(2,), visits=(1,), site="attn.hook_z", heads=(2,))
    edit = made(network, change)
    assert edit.text == "zero(Target('attn.hook_z', (4,), heads=(2,)))"
    found = look(network, PROMPT, edit.edit)
    tokens_BT = network.to_tokens(PROMPT)
    next_T1 = tokens_BT[0, 1:, None]
    for name, hooks in (("before", []), ("edited", [("blocks.4.attn.hook_z", without_third_head)])):
        with torch.no_grad():
            logprob_TW = network.run_with_hooks(tokens_BT, fwd_hooks=hooks)[0].double().log_softmax(-1)
        loss_T = -logprob_TW[:-1].gather(-1, next_T1)[:, 0]
        np.testing.assert_allclose(found.tokens[name][1:], loss_T, atol=1e-6)
        chance = found.next_tokens.set_index("id")[name]
        np.testing.assert_allclose(chance, logprob_TW[-1].exp()[chance.index.tolist()], atol=1e-6)
    assert np.isnan(found.tokens["before"][0])
    assert (found.tokens["edited"][1:] != found.tokens["before"][1:]).all()
    assert found.next_tokens[["before", "edited"]].max(axis=1).is_monotonic_decreasing
    np.testing.assert_array_equal(found.coloured().values_T, found.tokens["change"].astype(np.float32))


def test_start_mass_is_the_patterns_mean_and_a_clamped_visit_has_the_first_ones(network: LoopedMoE) -> None:
    edit = made(network, Change(kind="clamp", layers=(1, 2), visits=(1,), site="attn.hook_pattern")).edit
    mass = look(network, PROMPT, edit).start_mass().set_index(["layer", "visit"])
    _, cache = network.run_with_cache(network.to_tokens(PROMPT))
    for index, step in enumerate(network.plan):
        expected = float(cache[f"blocks.{index}.attn.hook_pattern"][0, :, 1:, 0].mean())
        assert mass["before"][str(step.layer + 1), step.visit + 1] == pytest.approx(expected, abs=1e-6)
    for layer in ("2", "3"):
        assert mass["edited"][layer, 2] == pytest.approx(mass["before"][layer, 1], abs=1e-6)
        assert mass["random"][layer, 2] != pytest.approx(mass["before"][layer, 2], abs=1e-6)
    before_the_edit = mass.iloc[:3]  # layer 1, and both layers' first visits
    np.testing.assert_array_equal(before_the_edit["edited"], before_the_edit["before"])
    assert set(mass["uniform"]) == {np.mean(1 / np.arange(2, 10))}


def test_a_patch_takes_from_the_other_prompt_and_a_mean_is_over_the_prompts_own_tokens(network: LoopedMoE) -> None:
    _, own = network.run_with_cache(network.to_tokens(PROMPT))
    _, others = network.run_with_cache(network.to_tokens(OTHER))
    updates = [f"blocks.3.{site}" for site in UPDATES]
    for kind, site, given in (
        ("patch", "hook_mlp_out", {updates[1]: others[updates[1]]}),
        ("mean", LAYER, {name: own[name].mean(1, keepdim=True).expand_as(own[name]) for name in updates}),
    ):
        hooks = [(name, lambda x, hook, value=value: value) for name, value in given.items()]
        with torch.no_grad():
            logits_BTW = network.run_with_hooks(network.to_tokens(PROMPT), fwd_hooks=hooks)
        found = look(network, PROMPT, made(network, hand_made(kind, site)).edit, OTHER).next_tokens.set_index("id")
        expected = logits_BTW[0, -1].softmax(-1)[found.index.tolist()]
        np.testing.assert_allclose(found["edited"], expected, atol=1e-6)
        assert (found["edited"] != found["before"]).all()


def test_every_edit_at_every_site_changes_the_text(network: LoopedMoE) -> None:
    edits = every_edit(network)
    assert {kind for kind, _ in edits} == set(KINDS)
    for (kind, site), edit in edits.items():
        change = look(network, PROMPT, edit.edit, OTHER).tokens["change"]
        assert change[1:].abs().max() > 0, (kind, site)


def test_the_code_of_each_kind_of_edit_runs_and_gives_the_same(network: LoopedMoE, tmp_path: Path) -> None:
    network.save_pretrained(tmp_path / "tiny", readme="")
    for kind, edit in {kind: edit for (kind, _), edit in every_edit(network).items()}.items():
        seen, printed = {}, io.StringIO()
        other = OTHER if kind == "patch" else ""
        with redirect_stdout(printed):
            exec(code(str(tmp_path / "tiny"), None, PROMPT, edit, other), seen)
        assert seen["seen"].tokens.equals(look(network, PROMPT, edit.edit, other).tokens), kind
        assert "uniform" in printed.getvalue()
    # A Baseline's layers are looped by the same words as on the page.
    tiny_network(TINY_BASELINE).save_pretrained(tmp_path / "baseline", readme="")
    loop = LoopedSpan(layers=LayerRange(1, 3), visits=2, factor=0.5)
    looped = open_network(tmp_path / "baseline", Opening(loop=loop))
    edit = made(looped, hand_made("clamp"))
    with redirect_stdout(io.StringIO()):
        exec(code(str(tmp_path / "baseline"), loop, PROMPT, edit), seen := {})
    assert seen["seen"].tokens.equals(look(looped, PROMPT, edit.edit).tokens)


def test_looks_at_once_are_what_each_is_alone_and_no_hook_stays(network: LoopedMoE) -> None:
    edits = [every_edit(network)[chosen].edit for chosen in (("skip", ""), ("swap", PATTERN), ("mean", LAYER))]
    alone = [look(network, PROMPT, edit).tokens for edit in edits]
    found: dict[int, object] = {}

    def ask(at: int) -> None:
        found[at] = look(network, PROMPT, edits[at]).tokens

    threads = [Thread(target=ask, args=(at,)) for at in range(len(edits))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at, tokens in enumerate(alone):
        assert tokens.equals(found[at])
    assert network.hooked() == []


def test_a_network_without_a_loop_has_no_first_visit_to_copy() -> None:
    assert kinds_of(tiny_network(TINY_BASELINE).architecture) == ["skip", "patch", "zero", "mean"]
    llama = hooked("llama")
    assert kinds_of(llama.architecture) == ["skip", "patch", "zero", "mean"]
    edit = made(llama, Change(kind="zero", layers=(1,), visits=(0,), site="hook_mlp_out")).edit
    found = look(llama, PROMPT, edit)
    assert (found.tokens["change"][1:] != 0).all()
    assert len(found.mass_rows) == 4


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("", r"a prompt must be 2 to 64 tokens of this network, BOS included; got 1"),
     ("a" * 64, r"a prompt must be 2 to 64 tokens of this network, BOS included; got 65"),
     ("a" * (MOST_CHARACTERS + 1), r"a prompt must be at most 4096 characters; got 4097")],
)  # fmt: skip
def test_a_prompt_that_does_not_fit_is_one_line(network: LoopedMoE, prompt: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        look(network, prompt, skip([3]))


def test_what_cannot_be_done_is_one_line(network: LoopedMoE) -> None:
    clamp = Change(kind="clamp", layers=(1, 2), visits=(0,), site="attn.hook_z")
    for change, said in (
        (replace(clamp, visits=(2,)), "an edit must have at least one layer that runs on the chosen visit; got none"),
        (clamp, "a step must be a later visit of its layer to be given the first one's; got layer 2, visit 1"),
        (replace(clamp, kind="swap"), "a swap must be with a later visit than the first; got visit 1"),
        (replace(clamp, kind="zero", heads=(4,)), "heads of attn.hook_z must be 0 to 3; got 4"),
    ):
        with pytest.raises(UserError, match=said):
            look(network, PROMPT, made(network, change).edit)
    with pytest.raises(UserError, match="the other prompt must have as many tokens as the first, 9; got 3"):
        look(network, PROMPT, made(network, hand_made("patch")).edit, "ab")
    with pytest.raises(UserError, match=r"mlp\.hook_router_logits"):
        look(hooked("llama"), PROMPT, made(network, hand_made("clamp", "mlp.hook_router_logits")).edit)
    with pytest.raises(UserError, match="a live network must predict the next token; albert fills in others"):
        look(hooked("albert"), PROMPT, skip([1]))
    assert network.hooked() == []


def test_characters_that_the_tokenizer_lacks_are_named(network: LoopedMoE, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"<unk>": 0, "ab": 1, "e": 2}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    names = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    file = {"version": "1.0", **dict.fromkeys(names), "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    monkeypatch.setattr(network, "_tokenizer", HuggingFaceTokenizer(json.dumps({**file, "model": model})))
    assert len(look(network, "ab e", skip([3])).tokens) == 2
    with pytest.raises(UserError, match="a prompt must be of characters that the tokenizer has; got 'ж': leave it out"):
        look(network, "ab Ж e", skip([3]))


def test_checkpoints_are_found_below_the_root_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    for name in ("a", "runs/one/step-2", ".hidden", "x/x/x/x/deep"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text("{}")
        (root / name / "model.safetensors").write_bytes(b"12")
    (root / "link").symlink_to(root / "a")
    (root / "other").mkdir()
    assert checkpoints_below(root) == ["a", "runs/one/step-2"]
    assert first_to_show(root, ["a", "runs/one/step-2"]) == "a"
    before = stamp_of(root / "a")
    (root / "a" / "model.safetensors").write_bytes(b"123")
    assert stamp_of(root / "a") != before
    monkeypatch.setattr("probes.running.live.MOST_BYTES", 2)
    with pytest.raises(UserError, match="weights on a page must be at most 2 bytes; got 3"):
        stamp_of(root / "a")
    with pytest.raises(UserError, match=r"a network must be there and readable; got .*gone: No such file"):
        stamp_of(root / "gone")
