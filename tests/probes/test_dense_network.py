"""A network that is not ours: dense, nested, byte-pair tokens. It records, verifies, and every probe that it allows
measures it, on its own loops, from the file as from the running network."""

import numpy as np
import pandas as pd
import pytest
import torch

from cache.record import record, run_batches
from cache.store import Capture
from cache.verify import verify
from probes.running import catalog
from probes.running.probe import Result, refusal, run
from smelt_interp.architecture import Loop
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.samples import Samples
from smelt_interp.errors import UserError
from tests.support.dense import CONTEXT, SITES, DenseNested, tokenizer

NETWORK = DenseNested().eval()
MEASURED = ("attention_sink", "projection_similarity", "residual_updates", "massive_activations", "dyck_icl",
            "representation_similarity", "domain_loss", "length_gain")  # fmt: skip
REFUSED = ("expert_overlap", "expert_load", "expert_tokens")


@pytest.fixture(scope="module")
def samples() -> Samples:
    return load_samples(
        DataOptions(data=("dyck", "prose"), samples=6, length=96, max_total=8, shots=(1, 2), rendering="compact"),
        CONTEXT,
        tokenizer(),
    )


@pytest.fixture(scope="module")
def capture(samples, tmp_path_factory) -> Capture:
    out = tmp_path_factory.mktemp("captures") / "dense"
    return record(NETWORK, samples, out, suffixes=SITES, dtype="float32", batch_size=4)


@pytest.fixture(scope="module")
def results(capture) -> dict[str, Result]:
    return run(capture.batches(SITES, 4), {name: asked(name) for name in MEASURED})


def asked(name: str) -> tuple[object, object]:
    probe = catalog.load(name)
    return probe, probe.Options()


def test_every_probe_is_one_that_it_allows_or_refuses():
    assert {*MEASURED, *REFUSED} == set(catalog.NAMES)
    for name in catalog.NAMES:
        told = refusal(catalog.load(name).needs(NETWORK.architecture), NETWORK.architecture)
        assert told == ("dense-nested has no router: its layers are dense" if name in REFUSED else "")


def test_a_capture_of_it_is_whole_and_holds_its_plan(capture, samples):
    verify(capture.path)
    again = Capture(capture.path)
    assert again.architecture == NETWORK.architecture
    assert again.architecture.loops == (Loop((0, 1), 2), Loop((2, 3), 6))
    assert again.samples.digest() == samples.digest()


@torch.no_grad()
def test_a_capture_holds_what_each_step_saw(capture, samples):
    tokens_BT = torch.from_numpy(samples.ids_NT[:4].astype(np.int64))
    start_BT = torch.from_numpy(samples.segment_start_NT[:4].astype(np.int64))
    _, cache = NETWORK.run_with_cache(tokens_BT, segment_start_BT=start_BT)
    batch = next(iter(capture.batches(SITES, 4)))
    for step, (layer, visit) in enumerate(NETWORK.plan):
        for site in SITES:
            if site != "attn.hook_attn_scores":
                np.testing.assert_array_equal(batch.sites[step, site], cache[site, (layer, visit)], err_msg=site)


def test_a_site_that_it_does_not_have_is_not_recorded(samples, tmp_path):
    with pytest.raises(UserError, match=r"mlp\.hook_router_logits"):
        record(NETWORK, samples, tmp_path / "it", suffixes=("mlp.hook_router_logits",))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", MEASURED)
def test_a_probe_answers_from_the_network_as_from_the_file(name, results, samples):
    needs = catalog.load(name).needs(NETWORK.architecture)
    streamed = run(run_batches(NETWORK, samples, needs, batch_size=5), {name: asked(name)})[name]
    assert len(streamed.table) > 0
    assert streamed.samples == results[name].samples
    pd.testing.assert_frame_equal(streamed.table, results[name].table, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_the_start_mass_of_each_loop_and_visit_is_that_of_the_patterns(samples, results):
    """By hand, over both loops of the nested plan: the mean, over layers, heads and every query but the first of its
    row, of the mass on the row's first key."""
    _, cache = NETWORK.run_with_cache(torch.from_numpy(samples.ids_NT.astype(np.int64)))
    table = results["attention_sink"].table
    found = table[(table["level"] == "headline") & (table["quantity"] == "start mass") & (table["head"] == "mean")]
    expected = []
    for loop in NETWORK.architecture.loops:
        for visit in range(loop.num_visits):
            patterns = [cache["attn.hook_pattern", (layer, visit)] for layer in loop.layers]
            rows = [x[row, :, 1:length, 0] for x in patterns for row, length in enumerate(samples.length_N)]
            expected.append(float(torch.cat([row.flatten() for row in rows]).double().mean()))
    of_a_visit = found[found["visit"].astype(str).str.isdigit()]  # the others are differences of visits
    assert list(of_a_visit["visit"].astype(int)) == [1, 2, 1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(of_a_visit["value"], expected, rtol=1e-6)
