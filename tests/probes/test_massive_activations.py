"""What is planted on the first token comes back as ratios of norms and as massive channels."""

import numpy as np
import pytest

from cache.batch import Batch
from probes import massive_activations
from probes.massive_activations import SITES, Options
from tests.support.answers import measure, rows_of
from tests.support.planted import LOOPED, NESTED, pick, planted_batch, random_sites, text_samples


def planted() -> Batch:
    """A residual of ones with one channel of 2000 at the start, and keys three times as long there, on visit 1."""
    samples = text_samples(4, 15)
    sites = random_sites(LOOPED, samples, tuple(SITES.values()))
    resid_BTD = np.ones((4, 15, LOOPED.width), np.float32)
    resid_BTD[:, 0, 5] = 2000
    key_BTGC = np.ones((4, 15, 2, 6), np.float32)
    key_BTGC[:, 0] = 3
    for step in (1, 2):
        sites[step, "hook_resid_pre"], sites[step, "attn.hook_k"] = resid_BTD, key_BTGC
    return planted_batch(LOOPED, samples, sites)


def found(quantity: str, options: Options) -> dict[str, object]:
    rows = rows_of(massive_activations, [planted()], options)
    return pick(rows, quantity=quantity, visit=1, level="headline")


def test_norms_at_the_start_by_those_elsewhere() -> None:
    assert found("key norm, start/other", Options())["value"] == pytest.approx(3, abs=1e-6)
    residual = found("residual norm, start/other", Options())
    assert residual["value"] == pytest.approx(np.sqrt((2000**2 + 7) / 8), rel=1e-6)
    assert residual["n"] == 4


def test_massive_channels_are_counted_at_the_start_and_elsewhere() -> None:
    massive = found("massive channels", Options())
    assert (massive["value"], massive["null_other_tokens"]) == (1, 0)
    largest = found("largest channel/median", Options())
    assert (largest["value"], largest["null_other_tokens"], largest["note"]) == (2000, 1, "channel 6 in 100%")
    assert found("massive channels", Options(times=3000))["value"] == 0
    assert found("massive channels", Options(floor=2000.0))["value"] == 0


def test_every_loop_of_a_dense_network_has_its_rows_and_a_figure() -> None:
    samples = text_samples(3, 10, padding=2)
    result = measure(
        massive_activations, [planted_batch(NESTED, samples, random_sites(NESTED, samples, tuple(SITES.values())))]
    )
    headline = [entry for entry in result.rows() if entry["level"] == "headline"]
    assert {(entry["layers"], entry["visit"]) for entry in headline} == {
        ("looped 1, 3", 1), ("looped 1, 3", 2), *(("looped 2", visit) for visit in (1, 2, 3, 4))
    }  # fmt: skip
    (drawn,) = result.figures.values()
    assert all(len(trace.x) == len(NESTED.steps) for trace in drawn.data)
