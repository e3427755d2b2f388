"""Serving costs: weights, cache and FLOPs counted step by step, and what a cache model saves."""

from dataclasses import replace

import numpy as np
import pytest

from smelt_interp.costs.budget import budget
from smelt_interp.costs.presets import DEMO_BASELINE, DEMO_SMELT, PAPER_PAIRS
from smelt_interp.costs.serving import Gpu, Load, distinct_experts, gpu, gpus, main, roof, serving
from smelt_interp.errors import UserError
from smelt_interp.paper import printed
from tests.support.commands import Command

SMALL_GPU = Gpu(
    full_name="small", memory_bytes=1e9, memory_bandwidth=1e9, peak_flops=1e12, l2_bytes=1e5, source="this test"
)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_distinct_experts_are_what_uniform_routing_touches(tokens: int) -> None:
    generator = np.random.default_rng(0)
    touched = [len(np.unique([generator.choice(16, 2, replace=False) for _ in range(tokens)])) for _ in range(2000)]
    assert distinct_experts(16, 2, tokens) == pytest.approx(np.mean(touched), rel=0.02)


def test_one_token_of_a_baseline_reads_its_active_parameters() -> None:
    found = serving(DEMO_BASELINE, SMALL_GPU, Load(batch=1, context=100))
    counts = budget(DEMO_BASELINE, 100)
    assert found.decode.weight_bytes == pytest.approx(2 * counts.parameters.active)
    assert found.decode.kv_bytes == 101 * counts.kv_bytes
    assert found.decode.flops == counts.flops.forward
    assert found.reused_share == 0


def test_without_reuse_each_visit_reads_its_layers_again() -> None:
    once, twice, thrice = (
        serving(replace(DEMO_SMELT, num_visits=visits), SMALL_GPU, Load(cache="none")) for visits in (1, 2, 3)
    )
    more = twice.decode.weight_bytes - once.decode.weight_bytes
    assert more == pytest.approx(twice.looped_block.touched_bytes)
    assert thrice.decode.weight_bytes - twice.decode.weight_bytes == pytest.approx(more)


def test_ideal_reuse_of_every_kept_expert_costs_no_second_read() -> None:
    once = serving(replace(DEMO_SMELT, num_visits=1), SMALL_GPU, Load(cache="none"))
    all_kept = serving(DEMO_SMELT, SMALL_GPU, Load(cache="ideal", kept_share=1.0))
    assert all_kept.decode.weight_bytes == pytest.approx(once.decode.weight_bytes)
    assert all_kept.reused_share == pytest.approx(1)
    none_kept = serving(DEMO_SMELT, SMALL_GPU, Load(cache="ideal", kept_share=0.0))
    experts = DEMO_SMELT.top_k * 3 * DEMO_SMELT.width * DEMO_SMELT.expert_width * 2
    assert none_kept.decode.weight_bytes - once.decode.weight_bytes == pytest.approx(4 * experts)


@pytest.mark.parametrize("batch", [1, 8])
def test_reuse_is_the_chance_that_a_chosen_expert_was_read_a_visit_before(batch: int) -> None:
    generator, hits = np.random.default_rng(1), []
    for _ in range(3000):
        first = np.stack([generator.permutation(16)[:2] for _ in range(batch)])
        # Token 0 keeps an expert with probability 0.4, else takes one that it did not have.
        own = first[0, 0] if generator.random() < 0.4 else generator.choice(np.setdiff1d(np.arange(16), first[0]))
        hits.append(own in first)
    found = serving(DEMO_SMELT, SMALL_GPU, Load(batch=batch, cache="ideal", kept_share=0.4))
    none = serving(DEMO_SMELT, SMALL_GPU, Load(batch=batch, cache="none"))
    experts = distinct_experts(16, 2, batch) * 3 * DEMO_SMELT.width * DEMO_SMELT.expert_width * 2 * 4
    dense = none.looped_block.touched_bytes - experts
    saved = none.decode.weight_bytes - found.decode.weight_bytes
    assert (saved - dense) / experts == pytest.approx(np.mean(hits), abs=0.035)


def test_l2_helps_only_when_a_visit_fits() -> None:
    touched = serving(DEMO_SMELT, SMALL_GPU, Load()).looped_block.touched_bytes
    fits, spills = (replace(SMALL_GPU, l2_bytes=touched + more) for more in (0, -1))
    ideal = serving(DEMO_SMELT, fits, Load(cache="ideal"))
    assert serving(DEMO_SMELT, fits, Load()).decode == ideal.decode
    assert serving(DEMO_SMELT, fits, Load()).looped_block.touched_fits_l2
    assert serving(DEMO_SMELT, spills, Load()).decode == serving(DEMO_SMELT, spills, Load(cache="none")).decode
    assert not serving(DEMO_SMELT, spills, Load()).looped_block.touched_fits_l2


def test_the_bound_is_the_slower_of_memory_and_compute() -> None:
    for bandwidth, bound in ((1e6, "memory"), (1e15, "compute")):
        roofline = serving(DEMO_SMELT, replace(SMALL_GPU, memory_bandwidth=bandwidth), Load(batch=4)).decode
        moved = roofline.weight_bytes + roofline.kv_bytes
        assert roofline.bound == bound
        assert roofline.seconds == pytest.approx(max(moved / bandwidth, roofline.flops / 1e12))
        assert roofline.intensity == pytest.approx(roofline.flops / moved)


def test_every_pass_lies_on_its_gpus_roof() -> None:
    found = [serving(config, gpu("l4"), Load(batch=64)) for config in (DEMO_SMELT, PAPER_PAIRS["200M"].smelt)]
    corners = roof(gpu("l4"), found)
    (low, slope), (ridge, peak), (high, flat) = corners.items()
    assert (peak, flat) == (gpu("l4").peak_flops, gpu("l4").peak_flops)
    assert slope / low == pytest.approx(peak / ridge)
    for roofline in (one for served in found for one in (served.decode, served.prefill)):
        assert low < roofline.intensity < high
        assert roofline.flops_per_second == pytest.approx(
            np.interp(roofline.intensity, [0, ridge, high], [0, peak, flat])
        )


def test_prefill_computes_the_causal_half_and_writes_the_cache() -> None:
    found = serving(DEMO_SMELT, SMALL_GPU, Load(batch=3, context=100)).prefill
    assert found.flops == pytest.approx(3 * sum(budget(DEMO_SMELT, seen).flops.forward for seen in range(1, 101)))
    assert found.kv_bytes == 3 * 100 * budget(DEMO_SMELT).kv_bytes


def test_memory_holds_all_experts_and_the_cache() -> None:
    found = serving(DEMO_SMELT, SMALL_GPU, Load(batch=2, context=50))
    counts = budget(DEMO_SMELT)
    assert found.memory_bytes == 2 * counts.parameters.total + 100 * counts.kv_bytes
    assert found.fits_memory
    assert not serving(DEMO_SMELT, replace(SMALL_GPU, memory_bytes=1e6), Load()).fits_memory


def test_every_gpu_has_its_source_and_the_printed_l2() -> None:
    assert all(device.source for device in gpus().values())
    assert gpu("h100").l2_bytes == printed.number("systems_200M", "l2_bytes", "h100_sxm")
    assert gpu("b200").l2_bytes == printed.number("systems_200M", "l2_bytes", "b200")


def test_one_token_touches_half_of_the_active_parameters_in_the_looped_block() -> None:
    block = serving(PAPER_PAIRS["200M"].smelt, gpu("h100"), Load()).looped_block
    active = budget(PAPER_PAIRS["200M"].smelt).parameters.active
    # Half of the layers, two bytes a parameter; the final norm is in no layer.
    assert block.touched_bytes == pytest.approx(active, rel=1e-4)


def test_the_command_puts_both_side_by_side_and_takes_own_numbers(command: Command) -> None:
    report = command.json(
        main, "--pair", "demo", "--gpu", "l4", "--batch", 8, "--memory-bandwidth", 1e9, "--l2-bytes", 1e5
    )
    device = replace(gpu("l4"), memory_bandwidth=1e9, l2_bytes=1e5)
    for name, config in (("smelt", DEMO_SMELT), ("baseline", DEMO_BASELINE)):
        found = serving(config, device, Load(batch=8))
        assert report[name]["decode"]["seconds"] == found.decode.seconds
        assert report[name]["prefill"]["bound"] == found.prefill.bound
    assert report["gpu"]["peak_flops"] == gpu("l4").peak_flops


def test_bad_input_ends_in_one_line(command: Command) -> None:
    assert "a GPU must be one of h100" in command.refusal(main, "--pair", "demo", "--gpu", "h1000")
    assert "l2_bytes must be at least 1; got -1.0" in command.refusal(main, "--pair", "demo", "--l2-bytes", -1)
    assert "batch must be at least 1; got 0" in command.refusal(main, "--pair", "demo", "--batch", 0)
    assert "kept_share must be at most 1; got 2.0" in command.refusal(main, "--pair", "demo", "--kept-share", 2)
    with pytest.raises(UserError, match="cache must be 'none', 'l2' or 'ideal'; got 'l3'"):
        Load(cache="l3")
    with pytest.raises(UserError, match="context must be at least 1; got 0"):
        Load(context=0)
