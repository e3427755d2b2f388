"""The matcher meets all three budgets as `budget` counts them, beats the paper's own rows, and says what cannot be."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from smelt_interp.config import ModelConfig
from smelt_interp.costs.budget import PAPER_TOLERANCE, budget, mismatch
from smelt_interp.costs.matching import MatchRequest, main, matched, twin
from smelt_interp.costs.presets import DEMO_BASELINE, PAPER_PAIRS, PAPER_ROWS, pair
from smelt_interp.costs.spans import LayerRange, middle_layers
from smelt_interp.costs.sparsity import fully_active_control, sparsity
from smelt_interp.data.dyck import DyckOptions, most_shots
from smelt_interp.errors import UserError
from smelt_interp.plan import plan
from tests.support.commands import Command

DEMO_ATTENDED = (80.5,)
BASELINE_200M = PAPER_ROWS["200M", "baseline"]
ATTENDED = (390.0,)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.mark.parametrize("scale", PAPER_PAIRS)
def test_the_first_answer_is_a_network_of_the_papers_kind(scale: str) -> None:
    papers = PAPER_PAIRS[scale]
    best = matched(papers.baseline, MatchRequest(), ATTENDED).best[0]
    assert best.mismatch == mismatch(budget(best.config, 390), budget(papers.baseline, 390))
    assert best.mismatch.within(PAPER_TOLERANCE)
    # The 100M row holds F / D and is just beyond the tolerance of FLOPs, so the next shape is the nearest.
    assert abs(best.shape_mismatch) <= (0.11 if scale == "100M" else 0.1)
    assert best.config.num_visits == 2
    assert (best.config.loop_start, best.config.loop_stop) == (papers.smelt.loop_start, papers.smelt.loop_stop)


def test_the_papers_own_200m_row_is_the_best_answer() -> None:
    assert matched(BASELINE_200M, MatchRequest(), ATTENDED).best[0].config == PAPER_ROWS["200M", "smelt"]


@pytest.mark.parametrize("scale", PAPER_PAIRS)
def test_more_visits_give_a_narrower_network(scale: str) -> None:
    baseline = PAPER_ROWS[scale, "baseline"]
    widths = [
        matched(baseline, MatchRequest(visits=visits), ATTENDED, 1).best[0].config.width for visits in (1, 2, 3, 4)
    ]
    assert widths == sorted(set(widths), reverse=True)
    assert widths[0] == baseline.width


def test_no_answer_has_experts_thinner_than_the_floor() -> None:
    baseline = replace(BASELINE_200M, num_layers=16, width=768, num_heads=12, num_experts=64, expert_width=256)
    request = MatchRequest(visits=3)
    found = matched(baseline, request, (2048.5,), 100)
    assert min(candidate.config.expert_width for candidate in found.best) >= request.least_expert_width
    best = found.best[0]
    assert best.config.expert_width / best.config.width == pytest.approx(256 / 768, rel=0.25)
    thick = matched(baseline, replace(request, least_expert_width=160), (2048.5,), 100)
    assert min(candidate.config.expert_width for candidate in thick.best) >= 160


def test_answers_that_hold_the_shape_come_first_and_the_nearest_of_them_before_the_rest() -> None:
    request = MatchRequest()
    found = matched(PAPER_ROWS["600M", "baseline"], request, ATTENDED, 100).best
    held = [abs(candidate.shape_mismatch) <= 0.1 for candidate in found]
    assert held == sorted(held, reverse=True)
    assert 0 < sum(held) < len(held)
    distances = [candidate.distance for candidate in found]
    assert distances[: sum(held)] == sorted(distances[: sum(held)])
    assert distances[sum(held) :] == sorted(distances[sum(held) :])


def test_a_match_at_several_lengths_holds_at_each_of_them_and_between() -> None:
    lengths = (390.0, 32_768.0)
    filled = matched(BASELINE_200M, MatchRequest(), lengths, 1).best[0]
    assert abs(filled.shape_mismatch) > 0.4
    best = matched(BASELINE_200M, MatchRequest(query_heads="scores"), lengths, 1).best[0]
    for attended in (390, 1024, 4096, 32_768):
        off = mismatch(budget(best.config, attended), budget(BASELINE_200M, attended))
        assert off.within(PAPER_TOLERANCE)
        assert abs(off.flops) <= abs(best.mismatch.flops) + 1e-12
    assert abs(best.shape_mismatch) <= 0.1


def test_a_wanted_sparsity_is_the_twins_and_its_baselines() -> None:
    found = matched(BASELINE_200M, MatchRequest(sparsity=0.85), ATTENDED, 1)
    assert found.baseline == replace(BASELINE_200M, num_experts=64)
    control = budget(fully_active_control(found.baseline), 390)
    for config in (found.baseline, found.best[0].config):
        assert sparsity(budget(config, 390), control).sparsity == pytest.approx(0.85, abs=0.015)


def test_named_layers_are_looped_in_place_of_a_span() -> None:
    best = matched(BASELINE_200M, MatchRequest(layers=LayerRange(2, 4)), ATTENDED, 1).best[0].config
    assert (best.loop_start, best.loop_stop, best.num_visits) == (2, 4, 2)


@pytest.mark.parametrize("span", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("visits", [2, 3, 4])
def test_a_twin_of_the_demo_baseline_holds_the_budgets_and_the_shape(span: float, visits: int) -> None:
    request = MatchRequest(
        span=span, visits=visits, loop_scale=1.0, experts_multiple=1, expert_width_multiple=2, width_multiple=4,
        query_heads="scores", max_kv_mismatch=0.1, least_expert_width=8,
    )  # fmt: skip
    found = twin(DEMO_BASELINE, request, 80.5)
    assert mismatch(budget(found, 80.5), budget(DEMO_BASELINE, 80.5)).within(request.tolerance)
    assert found.expert_width / found.width == pytest.approx(80 / 72, rel=0.1)
    assert (found.num_visits, found.loop_scale, found.loop_stop - found.loop_start) == (visits, 1.0, round(8 * span))


def test_a_twin_whose_shape_cannot_be_held_is_refused() -> None:
    with pytest.raises(UserError, match=r"F / D must be held within 10\.0%; the nearest \(12 layers.*\) has -11\.68%"):
        twin(BASELINE_200M, MatchRequest(visits=4), 390)


@pytest.mark.parametrize(
    "request_for",
    [
        *(MatchRequest(span=looped / 12) for looped in range(13)),
        *(MatchRequest(depth=depth) for depth in (9, 12, 15, 18)),
        *(MatchRequest(visits=visits) for visits in (1, 2, 3, 4)),
        MatchRequest(span=1, visits=4),
        MatchRequest(kv_heads="free"),
        MatchRequest(kv_heads=3),
    ],
    ids=str,
)
def test_every_ablation_of_the_paper_can_be_sized(request_for: MatchRequest) -> None:
    found = matched(BASELINE_200M, request_for, ATTENDED)
    reference = budget(BASELINE_200M, 390)
    for candidate in found.best:
        config = candidate.config
        assert mismatch(budget(config, 390), reference).within(PAPER_TOLERANCE)
        assert config.num_heads * config.head_width == config.width
        assert config.top_k == BASELINE_200M.top_k
        assert config.width % 8 == config.expert_width % 8 == config.num_experts % 8 == config.head_width % 2 == 0
    assert len({candidate.config for candidate in found.best}) == len(found.best)


def test_looping_nothing_gives_the_baseline_back() -> None:
    for nothing in (MatchRequest(span=0), MatchRequest(visits=1)):
        best = matched(BASELINE_200M, nothing, ATTENDED).best[0]
        assert best.mismatch.largest == 0
        assert len(plan(best.config)) == BASELINE_200M.num_layers


def test_a_free_depth_is_never_worse_than_the_baselines() -> None:
    depths = [MatchRequest(depth=depth) for depth in ("baseline", "free")]
    fixed, free = (matched(DEMO_BASELINE, request, DEMO_ATTENDED).best[0] for request in depths)
    assert free.order(depths[0]) <= fixed.order(depths[0])


@pytest.mark.parametrize(
    ("width", "head_width", "num_experts", "expert_width", "span"),
    [(72, 24, 11, 80, 0.5), (72, 16, 8, 80, 1.0), (64, 24, 11, 64, 0.5)],
)
def test_no_network_that_a_plain_search_finds_is_more_like_the_baseline(
    width: int, head_width: int, num_experts: int, expert_width: int, span: float
) -> None:
    baseline = replace(
        DEMO_BASELINE, width=width, head_width=head_width, num_experts=num_experts, expert_width=expert_width
    )
    request = MatchRequest(span=span, experts_multiple=2, expert_width_multiple=4, least_expert_width=4)
    reference = budget(baseline, 80.5)
    layers = middle_layers(8, span)
    looped = replace(baseline, loop_start=layers.start, loop_stop=layers.stop, num_visits=2, loop_scale=0.5)
    least = math.inf
    for heads, narrow, experts, thin in itertools.product(
        range(4, 11, 2), range(6, 19, 2), range(4, 81, 2), range(4, 105, 4)
    ):
        if heads * narrow % 8 or not 40 <= heads * narrow <= 64:
            continue
        config = replace(
            looped, width=heads * narrow, num_heads=heads, head_width=narrow, num_experts=experts, expert_width=thin
        )
        off = mismatch(budget(config, 80.5), reference)
        shape = thin / config.width * baseline.width / baseline.expert_width
        if off.within(PAPER_TOLERANCE) and (span == 1.0 or abs(shape - 1) <= 0.1 + 1e-12):
            ratios = (shape, 1 + off.flops, 1 + off.total_parameters, 1 + off.kv_bytes)
            least = min(least, sum(abs(math.log(ratio)) for ratio in ratios))
    if math.isinf(least):
        with pytest.raises(UserError, match="all budgets must be met"):
            matched(baseline, request, DEMO_ATTENDED)
        return
    assert matched(baseline, request, DEMO_ATTENDED).best[0].distance <= least + 1e-9


def test_a_width_fails_only_when_none_of_its_networks_is_within_every_tolerance() -> None:
    # With the paper's own width the sums are least just outside one tolerance.
    found = matched(BASELINE_200M, MatchRequest(), ATTENDED, count=100)
    widths = {candidate.config.width for candidate in found.best}
    assert PAPER_ROWS["200M", "smelt"].width in widths
    # How far each is from the Baseline, by hand.
    assert BASELINE_200M.num_kv_heads > 1
    for candidate in found.best[:3]:
        config, off = candidate.config, candidate.mismatch
        shape = config.expert_width / config.width * BASELINE_200M.width / BASELINE_200M.expert_width
        heads, depth = config.num_kv_heads / BASELINE_200M.num_kv_heads, config.num_layers / BASELINE_200M.num_layers
        ratios = (shape, heads, depth, 1 + off.flops, 1 + off.total_parameters, 1 + off.kv_bytes)
        assert candidate.distance == pytest.approx(sum(abs(math.log(ratio)) for ratio in ratios))
    assert found.next_best is not None
    assert found.next_best.config.width not in widths


@pytest.mark.parametrize("num_layers", [4, 6, 8])
def test_tiny_pairs_for_two_cores_can_be_sized(num_layers: int) -> None:
    layers = middle_layers(num_layers, 0.5)
    baseline = replace(DEMO_BASELINE, num_layers=num_layers, loop_start=layers.start, loop_stop=layers.stop, width=96)
    request = MatchRequest(experts_multiple=1, expert_width_multiple=4, depth="free", kv_heads="free")
    best = matched(baseline, request, DEMO_ATTENDED).best[0]
    assert mismatch(budget(best.config, 80.5), budget(baseline, 80.5)).within(PAPER_TOLERANCE)


@pytest.mark.parametrize(
    "dense", [replace(BASELINE_200M, num_experts=8), replace(BASELINE_200M, num_experts=1, top_k=1)]
)
def test_a_dense_baseline_is_infeasible_and_keeps_two_thirds_of_its_capacity(dense: ModelConfig) -> None:
    says = r"total parameters -3\d\.\d+% .*a dense Baseline has no experts to add back and keeps about 66\.7%"
    with pytest.raises(UserError, match=says):
        matched(dense, MatchRequest(), ATTENDED)


def test_an_impossible_request_says_which_budget_and_by_how_much() -> None:
    with pytest.raises(UserError, match=r"has KV cache \+50\.00% where 3\.6% is allowed: lower the multiples"):
        matched(BASELINE_200M, MatchRequest(head_width_multiple=64), ATTENDED)
    with pytest.raises(UserError, match=r"has KV cache -1\.56% where 0\.1% is allowed"):
        matched(BASELINE_200M, MatchRequest(max_kv_mismatch=0.001), ATTENDED)
    with pytest.raises(UserError, match=r"total parameters .* where 0\.0% is allowed"):
        matched(BASELINE_200M, MatchRequest(max_parameters_mismatch=0.0), ATTENDED)
    # No width of the multiple is near, or no width leaves room for experts: still the budgets and by how much.
    with pytest.raises(UserError, match=r"width 2560.*has training FLOPs \+71\.27% where 3\.9% is allowed"):
        matched(BASELINE_200M, MatchRequest(width_multiple=512), ATTENDED)
    with pytest.raises(UserError, match=r"KV cache \+1071\.88% where 3\.6% is allowed"):
        matched(BASELINE_200M, MatchRequest(kv_heads=1000), ATTENDED)
    with pytest.raises(UserError, match=r"100000 experts x 32\) has training FLOPs \+518"):
        matched(BASELINE_200M, MatchRequest(experts_multiple=100_000), ATTENDED)


def test_the_next_best_breaks_the_tolerance_that_it_is_said_to_break() -> None:
    found = matched(BASELINE_200M, MatchRequest(), ATTENDED)
    assert found.next_best is not None
    assert not found.next_best.mismatch.within(PAPER_TOLERANCE)
    assert found.next_best_fails == f"KV cache {found.next_best.mismatch.kv_bytes:+.2%} where 3.6% is allowed"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"visits": 0}, "visits must be at least 1; got 0"),
        ({"span": 1.5}, r"span must be at most 1; got 1\.5"),
        ({"span": float("nan")}, "span must be a number; got nan"),
        ({"depth": 0}, "depth must be at least 1; got 0"),
        ({"depth": "deep"}, "depth must be a whole number or 'baseline' or 'free'; got 'deep'"),
        ({"kv_heads": -1}, "kv_heads must be at least 1; got -1"),
        ({"experts_multiple": 0}, "experts_multiple must be at least 1; got 0"),
        ({"max_flops_mismatch": -0.1}, r"max_flops_mismatch must be at least 0; got -0\.1"),
        ({"sparsity": 1.0}, r"sparsity must be below 1; got 1\.0"),
    ],
)
def test_a_request_outside_its_rules_is_refused(values: dict[str, float], says: str) -> None:
    with pytest.raises(UserError, match=says):
        MatchRequest(**values)


def test_the_command_prints_what_the_search_found(command: Command, tmp_path: Path) -> None:
    report = command.json(main, "--baseline", "200M", "--visits", 2, "--span", 0.5)
    best = matched(BASELINE_200M, MatchRequest(), ATTENDED).best
    assert [row["config"] for row in report["best"]] == [candidate.config.to_json() for candidate in best]
    assert report["best"][0]["mismatch"]["largest"] == best[0].mismatch.largest
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(DEMO_BASELINE.to_json()))
    text = command.text(main, "--baseline", path, "--span", 0.45)
    assert "span 0.45 of 8 layers loops 3-6, a share of 0.5" in text
    assert "next best: 8 layers" in text
    assert "where 1.0% is allowed" in text
    assert "Baseline: 8 layers, width 72" in text


def test_the_command_refuses_in_one_line(command: Command) -> None:
    assert "a pair must be one of" in command.refusal(main, "--baseline", "300M")
    assert "visits must be at least 1; got 0" in command.refusal(main, "--baseline", "demo", "--visits", 0)
    assert "count must be at least 1; got 0" in command.refusal(main, "--baseline", "demo", "--count", 0)
    assert "where 0.0% is allowed" in command.refusal(main, "--baseline", "demo", "--max-flops-mismatch", 0)


def test_the_long_demo_pair_is_what_the_matcher_finds_and_holds_32_demonstrations() -> None:
    long = pair("long-demo")
    assert matched(long.baseline, MatchRequest(), (long.attended_tokens,)).best[0].config == long.smelt
    assert mismatch(budget(long.smelt), budget(long.baseline)).within(PAPER_TOLERANCE)
    assert most_shots(DyckOptions(), long.smelt.context) >= 32 > most_shots(DyckOptions(), long.smelt.context - 50)
