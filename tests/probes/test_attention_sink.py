"""The sink probe gives back what was planted, whatever the batches, and says when a row does not add up."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.batch import Batch, take
from probes import attention_sink
from probes.attention_sink import PARTS, Options, keys, masses, needs, read_pattern
from smelt_interp.architecture import Architecture
from smelt_interp.config import ModelConfig
from smelt_interp.data.samples import Role, Samples
from smelt_interp.errors import UserError
from smelt_interp.plan import plan
from tests.support import answers
from tests.support.planted import (
    BASELINE,
    LOOPED,
    NESTED,
    dyck_samples_of,
    pick,
    planted_batch,
    random_sites,
    same_numbers,
    split_batch,
    start_pattern,
    text_samples,
    uniform_pattern,
)
from tests.support.planted_captures import planted_capture

PATTERN = "attn.hook_pattern"
HEADLINE = {"level": "headline", "head": "mean"}
Rows = list[dict[str, object]]


def measured(batches: Iterable[Batch], options: Options) -> Rows:
    return answers.rows_of(attention_sink, batches, options)


def with_patterns(
    samples: Samples, pattern_of: dict[int, NDArray[np.float64]], config: ModelConfig | Architecture = LOOPED
) -> Batch:
    """Random sites, with these patterns at these steps."""
    sites = random_sites(config, samples, (PATTERN, "attn.hook_v"))
    for step, pattern_BQTS in pattern_of.items():
        sites[step, PATTERN] = pattern_BQTS.astype(np.float32)
    return planted_batch(config, samples, sites)


def planted(samples: Samples, first: float = 0.6, second: float = 0.02) -> Batch:
    """Start mass `first` in every looped layer on visit 1, `second` on visit 2."""
    mass = {s: (first, second)[step.visit] for s, step in enumerate(plan(LOOPED)) if step.layer in (1, 2)}
    return with_patterns(samples, {s: start_pattern(samples, LOOPED.num_heads, m) for s, m in mass.items()})


def dyck() -> Samples:
    """Two episodes of one shot, of different lengths."""
    shot, query = Role.DEMONSTRATION_INPUT, Role.QUERY
    rows = [
        [("(:", shot), (")\n", Role.DEMONSTRATION_ANSWER), ("[(:", query), (")]\n", Role.ANSWER)],
        [("[[:", shot), ("]]\n", Role.DEMONSTRATION_ANSWER), ("({}:", query), (")\n", Role.ANSWER)],
    ]
    return dyck_samples_of(rows, [(1, 2, 2, False, False), (1, 2, 1, False, False)])


def packed() -> Samples:
    """Text whose second half is a document of its own."""
    samples = text_samples(5, 12, padding=2)
    start_NT = samples.segment_start_NT.copy()
    start_NT[:, 6:] = 6
    return replace(samples, segment_start_NT=start_NT)


# The planted answers


def test_the_planted_start_mass_comes_back_from_memory() -> None:
    rows = measured([planted(text_samples(6, 20, padding=3))], Options())
    for visit, mass in ((1, 0.6), (2, 0.02)):
        found = pick(rows, quantity="start mass", visit=visit, **HEADLINE)
        assert found["value"] == pytest.approx(mass, abs=1e-6)
        assert (found["low"], found["high"]) == (pytest.approx(mass, abs=1e-6),) * 2
        assert found["n"] == 6
    change = pick(rows, quantity="start mass", visit="2 - 1", **HEADLINE)
    assert change["value"] == pytest.approx(-0.58, abs=1e-6)


def test_the_planted_start_mass_comes_back_from_a_float16_file(tmp_path: Path) -> None:
    capture = planted_capture(tmp_path / "planted.h5", planted(text_samples(6, 20, padding=3)))
    rows = measured(capture.batches(needs(LOOPED.architecture()), 4), Options())
    for visit, mass in ((1, 0.6), (2, 0.02)):
        assert pick(rows, quantity="start mass", visit=visit, **HEADLINE)["value"] == pytest.approx(mass, abs=5e-4)
        assert "within" in str(pick(rows, quantity="null mass", visit=visit, **HEADLINE)["note"])


def test_a_segment_start_is_the_start_of_its_own_document() -> None:
    rows = measured([planted(packed(), 0.6, 0.3)], Options())
    assert pick(rows, quantity="start mass", visit=1, **HEADLINE)["value"] == pytest.approx(0.6, abs=1e-6)
    assert pick(rows, quantity="start mass", visit=2, **HEADLINE)["value"] == pytest.approx(0.3, abs=1e-6)


@pytest.mark.parametrize("content", ["demonstration_answers", "brackets", "whitespace"])
def test_the_partition_equals_a_loop_over_every_key(content: str) -> None:
    samples = dyck()
    batch = with_patterns(samples, {})
    options = Options(content=content)  # type: ignore[arg-type]  # a parameter of the test
    rows = measured([batch], options)
    pattern_BQTS = np.asarray(batch.sites[2, PATTERN], np.float64)
    mass, share, queries = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0), 0
    chosen = {"brackets": b"()[]{}<>", "whitespace": b" \n"}.get(content, b"")
    for row, length in enumerate(samples.length_N):
        for query in range(1, length):
            queries += 1
            for key in range(query + 1):
                is_content = samples.role_NT[row, key] == Role.DEMONSTRATION_ANSWER
                if chosen:
                    is_content = samples.ids_NT[row, key] in list(chosen)
                part = "start" if key == 0 else "self" if key == query else "content" if is_content else "other"
                mass[part] += pattern_BQTS[row, :, query, key].mean()
                share[part] += 1 / (query + 1)
    for part in PARTS:
        found = pick(rows, quantity=f"{part} mass", level="layer", layers="3", visit=1)
        assert found["value"] == pytest.approx(mass[part] / queries, abs=1e-6)
        assert found["null_uniform"] == pytest.approx(share[part] / queries, abs=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("content", ["brackets", "letters", "demonstration_answers"])
def test_every_key_that_a_query_sees_is_in_exactly_one_part(content: str, causal: bool) -> None:
    for samples in (dyck(), packed()):
        found = keys(samples, Options(content=content), causal)  # type: ignore[arg-type]  # a parameter of the test
        found = found._replace(averaged_BT=np.ones_like(found.averaged_BT))
        for query, key in np.ndindex(found.seen_BTS.shape[1:]):
            one_BQTS = np.zeros_like(found.seen_BTS)[:, None]
            one_BQTS[:, 0, query, key] = 1
            read = read_pattern(one_BQTS, np.ones(one_BQTS[:, :, 0].shape), found)
            parts_BP = masses(read, found).mass_BQM[:, 0, : len(PARTS)]
            assert np.array_equal(np.sort(parts_BP, 1)[:, :-1], np.zeros((len(samples), 3)))
            assert np.array_equal(parts_BP.sum(1), found.seen_BTS[:, query, key])


def test_mass_on_keys_that_a_query_cannot_see_is_missing_from_its_row() -> None:
    samples = packed()
    pattern_BQTS = uniform_pattern(samples, LOOPED.num_heads)
    pattern_BQTS[2, 1, 8, 3] = 0.5  # a key of the document before
    pattern_BQTS[2, 1, 8] /= pattern_BQTS[2, 1, 8].sum()
    rows = measured([with_patterns(samples, {1: pattern_BQTS})], Options())
    assert "FAILS" in str(pick(rows, quantity="null mass", level="head", layers="2", visit=1, head=2)["note"])


def test_uniform_attention_is_its_own_null() -> None:
    samples = packed()
    uniform = {step: uniform_pattern(samples, LOOPED.num_heads) for step in range(len(plan(LOOPED)))}
    for entry in measured([with_patterns(samples, uniform)], Options(content="letters")):
        if entry.get("null_uniform") is not None and entry["value"] is not None:
            assert entry["value"] == pytest.approx(entry["null_uniform"], abs=1e-6), entry


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_answer_does_not_depend_on_the_batches(size: int) -> None:
    batch = planted(packed())
    shuffled = take(batch, np.array([3, 0, 4, 1, 2]))
    options = Options(sink_tokens=4)
    assert same_numbers(measured([batch], options), measured(split_batch(shuffled, size), options))


# Rows that do not sum to 1


def test_one_row_scaled_by_1_1_fails_the_check_and_no_other_step_does() -> None:
    samples = text_samples(6, 20)
    pattern_BQTS = start_pattern(samples, LOOPED.num_heads, 0.6)
    pattern_BQTS[4, 2, 11] *= 1.1
    rows = measured([with_patterns(samples, {1: pattern_BQTS})], Options())
    note = {entry["layers"]: entry["note"] for entry in rows if (entry["quantity"], entry["level"], entry["visit"]) ==
            ("null mass", "layer", 1)}  # fmt: skip
    assert str(note["2"]).startswith("FAILS: a row's parts miss 1 by 0.1")
    assert all("FAILS" not in str(note[layer]) for layer in ("1", "3", "4"))
    assert "FAILS" in str(pick(rows, quantity="null mass", visit=1, **HEADLINE)["note"])


def test_a_learned_sink_takes_the_null() -> None:
    samples = text_samples(4, 15)
    pattern_BQTS = 0.7 * start_pattern(samples, LOOPED.num_heads, 0.5)
    rows = measured([with_patterns(samples, {1: pattern_BQTS, 2: pattern_BQTS})], Options())
    assert pick(rows, quantity="null mass", visit=1, **HEADLINE)["value"] == pytest.approx(0.3, abs=1e-6)
    assert pick(rows, quantity="start mass", visit=1, **HEADLINE)["value"] == pytest.approx(0.35, abs=1e-6)


# The other quantities


def test_the_strongest_key_need_not_be_the_first_token() -> None:
    samples = text_samples(4, 30)
    pattern_BQTS = 0.5 * uniform_pattern(samples, LOOPED.num_heads)
    pattern_BQTS[:, :, :3] *= 2
    pattern_BQTS[:, :, 3:, 3] += 0.5
    found = pick(
        measured([with_patterns(samples, {1: pattern_BQTS, 2: pattern_BQTS})], Options()),
        quantity="strongest key", visit=1, **HEADLINE,
    )  # fmt: skip
    assert found["note"] == "key 4, text"
    queries = np.arange(1, 30)
    expected = np.where(queries >= 3, 0.5 + 0.5 / (queries + 1), 0).mean()
    assert found["value"] == pytest.approx(expected, abs=1e-6)


def test_the_strongest_key_under_a_sink_is_the_start_and_its_mass_the_start_mass() -> None:
    rows = measured([planted(packed(), 0.6, 0.3)], Options())
    for level in ({**HEADLINE, "visit": 1}, {"level": "head", "layers": "2", "visit": 1, "head": 3}):
        found = pick(rows, quantity="strongest key", **level)
        assert found["value"] == pytest.approx(0.6, abs=1e-6)
        assert str(found["note"]).startswith("key 1, ")


def test_sink_1_counts_heads_and_leaves_short_samples_out() -> None:
    samples = text_samples(4, 70, padding=10)  # lengths 70 69 68 67
    pattern_BQTS = uniform_pattern(samples, LOOPED.num_heads)
    pattern_BQTS[:, 0] = start_pattern(samples, 1, 0.9)[:, 0]
    batch = with_patterns(samples, {1: pattern_BQTS, 2: pattern_BQTS})
    found = pick(measured([batch], Options()), quantity="Sink_1^0.3", visit=1, **HEADLINE)
    assert (found["value"], found["n"], found["null_uniform"]) == (0.25, 4, 0.0)
    longer = pick(measured([batch], Options(sink_tokens=69)), quantity="Sink_1^0.3", visit=1, **HEADLINE)
    assert (longer["value"], longer["n"]) == (0.25, 2)
    none = pick(measured([batch], Options(sink_tokens=71)), quantity="Sink_1^0.3", visit=1, **HEADLINE)
    assert none["value"] is None
    assert "no sample has 71 tokens" in str(none["note"])


def test_sink_1_includes_the_first_query_itself() -> None:
    # 64 queries, the first puts 1 on itself, the others m: the mean is (1 + 63 m) / 64.
    samples = text_samples(2, 64)
    for mass, share in ((0.2888, 0.0), (0.2890, 1.0)):
        pattern = start_pattern(samples, LOOPED.num_heads, mass)
        rows = measured([with_patterns(samples, {1: pattern, 2: pattern})], Options())
        assert pick(rows, quantity="Sink_1^0.3", visit=1, **HEADLINE)["value"] == share


def test_values_of_norm_zero_at_the_start_take_the_weighted_mass_away() -> None:
    batch = planted(text_samples(4, 15))
    sites = dict(batch.sites)
    value_BTGC = np.array(sites[1, "attn.hook_v"])
    value_BTGC[:, 0] = 0
    sites[1, "attn.hook_v"] = value_BTGC
    sites[2, "attn.hook_v"] = np.ones_like(value_BTGC)  # every value has the same norm: the weights change nothing
    rows = measured([replace(batch, sites=sites)], Options())
    weighted = {layer: pick(rows, quantity="value-weighted start mass", level="layer", layers=layer, visit=1)
                for layer in ("2", "3")}  # fmt: skip
    assert (weighted["2"]["value"], weighted["2"]["null_uniform"]) == (0, 0)
    assert weighted["3"]["value"] == pytest.approx(0.6, abs=1e-6)


# Options


def test_queries_that_predict_an_answer_are_those_before_one() -> None:
    samples = dyck()
    pattern_BQTS = start_pattern(samples, LOOPED.num_heads, 0.1)
    answers = samples.role_NT == Role.ANSWER
    for row, position in zip(*np.nonzero(answers), strict=True):
        pattern_BQTS[row, :, position - 1] = start_pattern(samples, LOOPED.num_heads, 0.8)[row, :, position - 1]
    batch = with_patterns(samples, {1: pattern_BQTS, 2: pattern_BQTS})
    rows = measured([batch], Options(queries="predict_answer"))
    assert pick(rows, quantity="start mass", visit=1, **HEADLINE)["value"] == pytest.approx(0.8, abs=1e-6)
    nowhere = measured([planted(text_samples())], Options(queries="predict_answer"))
    found = pick(nowhere, quantity="start mass", visit=1, **HEADLINE)
    assert (found["value"], found["n"]) == (None, None)
    assert "no query of the averaging set" in str(found["note"])


def test_content_is_not_defined_on_text_until_a_token_class_is_given() -> None:
    batch = planted(text_samples())
    found = pick(measured([batch], Options()), quantity="content mass", visit=1, **HEADLINE)
    assert (found["value"], found["null_uniform"]) == (None, None)
    assert "not defined" in str(found["note"])
    letters = pick(measured([batch], Options(content="letters")), quantity="content mass", visit=1, **HEADLINE)
    assert float(str(letters["value"])) > 0


def test_heads_and_layers_choose_what_is_averaged() -> None:
    samples = text_samples(3, 10)
    pattern_BQTS = start_pattern(samples, LOOPED.num_heads, 0.1)
    pattern_BQTS[:, 2] = start_pattern(samples, 1, 0.7)[:, 0]
    batch = with_patterns(samples, {2: pattern_BQTS})
    rows = measured([batch], Options(heads=(2,), layers=(2,)))
    found = pick(rows, quantity="start mass", visit=1, **HEADLINE)
    assert found["value"] == pytest.approx(0.7, abs=1e-6)
    assert {entry["layers"] for entry in rows} == {"3", "looped 3"}
    prelude = measured([batch], Options(layers=(0,)))
    assert {(entry["level"], entry["layers"]) for entry in prelude} == {("layer", "1"), ("head", "1")}


def test_a_capture_of_some_heads_uses_the_values_that_serve_them() -> None:
    batch = planted(text_samples(4, 15))
    sites = {key: array[:, [1, 3]] if key[1] == PATTERN else array for key, array in batch.sites.items()}
    kept = replace(batch, sites=sites, heads={**batch.heads, PATTERN: (1, 3)})
    whole, part = (measured([each], Options(heads=(3,))) for each in (batch, kept))
    assert same_numbers(whole, part)
    with pytest.raises(UserError, match=r"heads must be among the recorded \[2, 4\]; got 1"):
        measured([kept], Options(heads=(0,)))


def test_a_baseline_says_what_it_can() -> None:
    samples = text_samples(4, 15)
    pattern = start_pattern(samples, BASELINE.num_heads, 0.45)
    rows = measured([with_patterns(samples, {1: pattern, 2: pattern}, BASELINE)], Options())
    found = pick(rows, quantity="start mass", visit=1, **HEADLINE)
    assert (found["layers"], found["value"]) == ("middle 2-3", pytest.approx(0.45, abs=1e-6))
    change = pick(rows, quantity="start mass", visit="2 - 1", **HEADLINE)
    assert (change["value"], "needs two visits" in str(change["note"])) == (None, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"t_min": 0}, "t_min must be at least 1"),
        ({"sink_threshold": 1.0}, "sink_threshold must be below 1; got 1.0"),
        ({"sink_tokens": 0}, "sink_tokens must be at least 1; got 0"),
        ({"layers": (8,)}, "layers must be recorded layers of 1 to 4; got 9"),
        ({"layers": (2, 8)}, "layers must be recorded layers of 1 to 4; got 3, 9"),
        ({"heads": (4,)}, r"heads must be among the recorded \[1, 2, 3, 4\]; got 5"),
    ],
)
def test_options_outside_their_rule_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        measured([planted(text_samples())], Options(**options))


def test_a_missing_site_and_no_samples_are_refused() -> None:
    batch = planted(text_samples())
    sites = {key: array for key, array in batch.sites.items() if key[1] != "attn.hook_v"}
    with pytest.raises(UserError, match=r"a capture must hold .* on the same steps; got .*: record it again"):
        measured([replace(batch, sites=sites)], Options())
    with pytest.raises(UserError, match="samples to measure must be at least one; got 0"):
        measured([], Options())
    with pytest.raises(UserError, match="sample ids must be distinct; got 4 of them twice"):
        measured([batch, batch], Options())


def test_the_figure_shows_the_partition_and_every_head() -> None:
    (drawn,) = answers.measure(attention_sink, [planted(text_samples())]).figures.values()
    start = next(trace for trace in drawn.data if trace.name == "start")
    assert list(start.y[1:3]) == [pytest.approx(0.6, abs=1e-6)] * 2
    heat = next(trace for trace in drawn.data if trace.type == "heatmap")
    assert np.asarray(heat.z).shape == (LOOPED.num_heads, len(plan(LOOPED)))


# Other networks


def test_two_nested_loops_have_each_visit_of_their_own() -> None:
    samples = text_samples(4, 15)
    mass = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    patterns = {step: start_pattern(samples, 4, m) for step, m in enumerate(mass)}
    rows = measured([with_patterns(samples, patterns, NESTED)], Options())
    found = {
        (entry["layers"], entry["visit"]): entry["value"]
        for entry in rows
        if entry["quantity"] == "start mass" and entry["level"] == "headline" and entry["head"] == "mean"
    }
    expected = {
        ("looped 1, 3", 1): 0.25, ("looped 1, 3", 2): 0.65, ("looped 1, 3", "2 - 1"): 0.4,
        ("looped 2", 1): 0.2, ("looped 2", 2): 0.3, ("looped 2", 3): 0.6, ("looped 2", 4): 0.7,
        ("looped 2", "2 - 1"): 0.1, ("looped 2", "3 - 1"): 0.4, ("looped 2", "4 - 1"): 0.5,
    }  # fmt: skip
    assert found == {place: pytest.approx(value, abs=1e-6) for place, value in expected.items()}


def test_attention_that_is_not_causal_is_partitioned_over_every_key_of_the_segment() -> None:
    samples = packed()
    both_ways = replace(NESTED, causal=False)
    real_BT = np.arange(12) < samples.length_N[:, None]
    same_BTS = (samples.segment_start_NT[:, :, None] == samples.segment_start_NT[:, None]) & real_BT[:, None]
    even_BTS = same_BTS / same_BTS.sum(-1, keepdims=True)
    patterns = {step: np.repeat(even_BTS[:, None], 4, 1) for step in range(8)}
    rows = measured([with_patterns(samples, patterns, both_ways)], Options(content="letters"))
    for part in PARTS:
        found = pick(rows, quantity=f"{part} mass", level="layer", layers="2", visit=1)
        assert found["value"] == pytest.approx(found["null_uniform"], abs=1e-6)
    start = pick(rows, quantity="start mass", level="layer", layers="2", visit=1)
    lengths = [(6, length - 6) for length in samples.length_N]
    queries = [1 / size for pair in lengths for size in pair for _ in range(size - 1)]
    assert start["value"] == pytest.approx(np.mean(queries), abs=1e-6)
    assert "within" in str(pick(rows, quantity="null mass", level="layer", layers="2", visit=1)["note"])
