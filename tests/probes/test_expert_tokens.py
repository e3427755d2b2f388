"""What experts fire on: planted routings of planted tokens give the shares, nulls and contexts that were planted."""

from dataclasses import replace

import numpy as np
import pytest

from cache.batch import Batch
from probes import expert_tokens as probe
from probes.running.command import Measured
from probes.running.probe import Result, needed_sites
from probes.running.source import SampleSet, Subject
from probes.statistics.arrays import is_token
from probes.statistics.experts import INDICES, WEIGHTS
from smelt_interp.data.samples import Role, role_name
from smelt_interp.errors import UserError
from tests.support.answers import measure
from tests.support.planted import (
    BASELINE,
    LOOPED,
    NESTED,
    pick,
    planted_batch,
    random_sites,
    split_batch,
    text_samples,
    uniform_pattern,
)

NUM, LENGTH = 6, 12
LETTER = "a"


def planted(config=LOOPED) -> Batch:
    """Layer 2: on visit 1 every `a` chooses expert 3 first and half of them 4 too, on visit 2 all choose 5 and 6; other
    tokens choose 1 and 2 on both visits. Weights .9 on the first `a` of each sample, .6 elsewhere, .1 less a sample."""
    samples = text_samples(NUM, LENGTH, padding=2)
    ids_NT = np.where(samples.ids_NT == ord("a"), ord("b"), samples.ids_NT)
    ids_NT[:, 3:7] = ord("a")
    text = replace(samples.text, data=np.where(samples.text.data == ord("a"), ord("b"), samples.text.data))
    samples = replace(samples, ids_NT=ids_NT.astype(np.int32), text=text)
    for row in range(NUM):
        first = samples.text.offsets[row * LENGTH + 3]
        samples.text.data[first : first + 4] = ord("a")
    sites = random_sites(config, samples, (INDICES, WEIGHTS))
    is_a = ids_NT == ord("a")
    early, late = (np.tile([0, 1], (NUM, LENGTH, 1)) for _ in range(2))
    early[is_a], late[is_a] = (2, 3), (4, 5)
    early[:, 5:7, 1] = 6
    weight = np.tile([0.6, 0.4], (NUM, LENGTH, 1)) - 0.02 * np.arange(NUM)[:, None, None]
    weight[:, 4, 0] += 0.3
    sites |= {(1, INDICES): early, (1, WEIGHTS): weight.astype(np.float32)}
    if config is LOOPED:
        sites[3, INDICES] = late
    return planted_batch(config, samples, sites)


@pytest.fixture(scope="module")
def result() -> Result:
    return measure(probe, [planted()], probe.Options(layers=(1,)))


def find(result: Result, quantity: str, **where: object) -> dict[str, object]:
    return pick(result.rows(), quantity=quantity, **where)


def test_the_token_that_an_expert_fires_on_stands_first_beside_its_share_of_all(result: Result) -> None:
    tokens = 6 * 12 - 6  # two rows lack one, two lack two
    found = find(result, "token share", visit=1, expert=3, token="a")
    assert (found["value"], found["low"], found["high"], found["n"]) == (1.0, 1.0, 1.0, NUM)
    assert found["null_uniform"] == pytest.approx(24 / tokens)
    # Dealt out within each sample: 4 of its 12, 11 or 10 tokens are `a`.
    assert found["null_shuffled"] == pytest.approx(np.mean([4 / 12, 4 / 11, 4 / 10]))
    others = [row for row in result.rows() if row["quantity"] == "token share" and row["expert"] == 1]
    assert "a" not in {row["token"] for row in others if row["visit"] == 1}
    assert {row["expert"] for row in result.rows() if row["quantity"] == "token share" and row["visit"] == 1} == {
        1, 2, 3, 4, 7,
    }  # fmt: skip


def test_where_its_tokens_went_on_the_other_visit(result: Result) -> None:
    stays = {row["expert"]: row for row in result.rows() if row["quantity"] == "stays" and row["level"] == "head"}
    assert stays.keys() == {1, 2}
    assert [stays[expert]["value"] for expert in (1, 2)] == [1.0, 1.0]
    # Of all experts together: how popular each is on the other visit, weighed by its tokens on the first.
    batch = planted()
    early, late = (batch.sites[step, INDICES][is_token(batch.samples)] for step in (1, 3))
    use, popular = np.bincount(early.ravel(), minlength=8) / early.size, np.bincount(late.ravel()) / len(late)
    assert find(result, "stays", level="headline")["null_popularity"] == pytest.approx(use[: len(popular)] @ popular)
    goes = {(row["expert"], row["to"]): row for row in result.rows() if row["quantity"] == "goes to"}
    assert [goes[3, f"expert {to}"]["value"] for to in (5, 6)] == [1.0, 1.0]
    assert goes[7, "expert 5"]["value"] == 1.0
    found = goes[3, "expert 5"]
    assert found["null_uniform"] == 2 / 8
    assert found["null_popularity"] == pytest.approx(24 / 66)
    assert found["null_shuffled"] == pytest.approx(np.mean([4 / 12, 4 / 11, 4 / 10]))
    # 42 of 66 tokens keep both, the others none.
    together = find(result, "stays", level="headline", visit="1 vs 2")
    assert together["value"] == pytest.approx(42 / 66)
    assert together["null_popularity"] == pytest.approx(42 / 66 * 42 / 66)


def test_roles_beside_their_share_of_all_tokens(result: Result) -> None:
    of_a = find(result, "role share", visit=1, expert=3, role="text")
    assert of_a["value"] == 1.0
    # Dealt out within each sample, one of its 12, 11 or 10 tokens is the first.
    assert of_a["null_shuffled"] == pytest.approx(1 - np.mean([1 / 12, 1 / 11, 1 / 10]))
    first = find(result, "role share", visit=1, expert=1, role="bos")
    assert first["value"] == pytest.approx(6 / 42)
    assert first["null_uniform"] == pytest.approx(6 / 66)


def test_contexts_are_of_the_largest_weights_one_a_sample_in_the_text_around_them(result: Result) -> None:
    shown = [row for row in result.rows() if row["quantity"] == "context" and row["expert"] == 3 and row["visit"] == 1]
    assert [(row["sample"], row["position"]) for row in shown] == [(1, 5), (2, 5), (3, 5)]
    assert [row["value"] for row in shown] == pytest.approx([0.9, 0.88, 0.86])
    assert str(shown[0]["context"]).startswith("<bos>")
    assert "a⟦a⟧aa" in str(shown[0]["context"])
    near = measure(probe, [planted()], probe.Options(layers=(1,), around=1))
    assert find(near, "context", visit=1, expert=3, sample=1)["context"] == "a⟦a⟧a"


def test_a_context_does_not_reach_into_another_document() -> None:
    batch = planted()
    start_T = np.select([np.arange(LENGTH) < 4, np.arange(LENGTH) < 6], [0, 4], 6)
    start_NT = np.tile(start_T.astype(np.int32), (NUM, 1))
    batch = replace(batch, samples=replace(batch.samples, segment_start_NT=start_NT))
    found = measure(probe, [batch], probe.Options(layers=(1,), around=2))
    assert find(found, "context", visit=1, expert=3, sample=1)["context"] == "⟦a⟧a"


def test_a_large_vocabulary_is_counted_without_intervals_and_too_large_a_table_is_refused() -> None:
    batch = planted()
    large, larger = (
        replace(batch, architecture=replace(batch.architecture, vocab_size=size)) for size in (10**6, 10**9)
    )
    assert probe.lay_out(large, probe.Options(layers=(1,)), batch.architecture.loops).groups == 1
    with pytest.raises(UserError, match=r"^experts times steps times tokens must be at most 67108864; got 32000000000"):
        probe.lay_out(larger, probe.Options(), batch.architecture.loops)


def test_a_baseline_has_tokens_and_no_other_visit() -> None:
    found = measure(probe, split_batch(planted(BASELINE), 4))
    assert find(found, "stays")["note"].startswith("needs two visits")
    assert find(found, "token share", layers="2", visit=1, expert=3, token="a")["value"] == 1.0
    assert set(found.figures) == {"roles"}


def test_layers_that_were_not_recorded_and_dense_networks_are_refused() -> None:
    with pytest.raises(UserError, match=r"^layers must be recorded ones, 1-4; got 9$"):
        measure(probe, [planted()], probe.Options(layers=(8,)))
    with pytest.raises(UserError, match=r"^routing must be measured on a network with experts; got nested"):
        measure(probe, [planted_batch(NESTED, text_samples(), {})])


def looking(network=LOOPED) -> Batch:
    """Two documents a row. In the second layer's first run head 2 gives .7 to the first key of its document and .3 to
    itself, other heads attend uniformly, as all do elsewhere."""
    samples = planted(BASELINE).samples
    start_NT = np.tile(np.where(np.arange(LENGTH) < 5, 0, 5).astype(np.int32), (NUM, 1))
    samples = replace(samples, segment_start_NT=start_NT)
    architecture = network if network is NESTED else network.architecture()
    uniform_BQTS = uniform_pattern(samples, architecture.num_heads)
    sites = {(step, probe.PATTERN): uniform_BQTS for step in range(len(architecture.steps))}
    planted_BQTS = uniform_BQTS.copy()
    planted_BQTS[:, 1] = 0
    for query, first in enumerate(start_NT[0]):
        planted_BQTS[:, 1, query, first] += 0.7
        planted_BQTS[:, 1, query, query] += 0.3
    return planted_batch(network, samples, {**sites, (1, probe.PATTERN): planted_BQTS})


def test_a_head_fires_on_the_keys_that_take_its_attention_beside_uniform_attention() -> None:
    batch = looking()
    found = measure(probe, split_batch(batch, 4), probe.Options(of="heads", layers=(1,), around=1))
    # By hand: what each key takes of head 2's queries and of uniform ones, by its token and its role.
    tokens: dict[int, np.ndarray] = {}
    roles: dict[int, np.ndarray] = {}
    for ids_T, role_T, length in zip(batch.samples.ids_NT, batch.samples.role_NT, batch.samples.length_N, strict=True):
        for query in range(length):
            first = 0 if query < 5 else 5
            for key in range(first, query + 1 if query > first else first):
                taken = np.array([0.7 * (key == first) + 0.3 * (key == query), 1 / (query - first + 1)])
                for into, name in ((tokens, ids_T[key]), (roles, role_T[key])):
                    into[name] = into.get(name, 0) + taken
    of_a, all_taken = tokens[ord("a")], sum(tokens.values())
    row = find(found, "token share", visit=1, head=2, token="a")
    assert (row["value"], row["null_uniform"]) == pytest.approx(tuple(of_a / all_taken))
    for role, taken in roles.items():
        row = find(found, "role share", layers="2", visit=1, head=2, role=role_name(Role(role)))
        assert (row["value"], row["null_uniform"]) == pytest.approx(tuple(taken / all_taken))
        mean = find(found, "role share", level="headline", visit=1, head="mean", role=role_name(Role(role)))
        assert mean["value"] == pytest.approx((taken[0] + 3 * taken[1]) / (4 * all_taken[1]))
        for row in (row for row in found.rows() if row["quantity"] == "role share" and row["head"] == 3):
            assert row["value"] == pytest.approx(row["null_uniform"])
    # The first key of the whole row's longest document: .7 of its six queries, less uniform's.
    row = find(found, "context", visit=1, head=2, sample=1)
    assert (row["position"], row["value"]) == (6, pytest.approx(6 * 0.7 - sum(1 / n for n in range(2, 8))))
    assert str(row["context"]).startswith("⟦a⟧")
    assert "stays" not in {row["quantity"] for row in found.rows()}


def test_heads_of_a_dense_network_are_measured_though_its_experts_are_not() -> None:
    asked = probe.Options(of="heads")
    assert needed_sites(probe, NESTED, asked) == ("attn.hook_pattern",)
    found = measure(probe, [looking(NESTED)], asked)
    assert found.figures["roles"].data[0].y[1].endswith("visit 1, head 2")
    assert find(found, "role share", level="headline", layers="looped 2", visit=1, head="mean", role="bos")


def test_the_command_prints_a_table_of_each_kind_of_rows_without_columns_of_dashes() -> None:
    batch, options = planted(), probe.Options(layers=(1,))
    measured = Measured(
        name="expert_tokens",
        probe=probe,
        options=options,
        data=SampleSet(name="x", samples=batch.samples),
        subjects=(
            Subject(
                name="planted", architecture=batch.architecture, described={}, batches=lambda data, suffixes: iter(())
            ),
        ),
        results=(measure(probe, [batch], options),),
    )
    (stays,) = measured.tables("headline")
    assert stays.columns == ["value [95%]", "null: uniform", "null: popularity", "null: shuffled"]
    columns = {
        table.title.partition("quantity ")[2].partition(",")[0]: table.columns for table in measured.tables("head")
    }
    assert columns["context"] == ["visit", "expert", "sample", "position", "context", "value [95%]"]
    assert columns["goes to"][:3] == ["expert", "to", "value [95%]"]
    assert set(columns) == {"stays", "goes to", "role share", "token share", "context"}
