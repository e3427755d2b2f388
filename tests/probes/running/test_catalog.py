"""Every probe of the catalog is a whole probe: its question, its options with help, its measure, figure and main."""

from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest

from cache.record import DEFAULT_SITES
from probes.running import catalog
from probes.running.probe import refusal
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES
from tests.support.planted import BASELINE, LOOPED, NESTED


@pytest.mark.parametrize("name", [*catalog.NAMES, *catalog.APART])
def test_a_probe_has_all_that_a_probe_has(name: str) -> None:
    probe = catalog.load(name)
    assert "?" in probe.__doc__.split("\n\n")[0], "the docstring opens with the probe's question"
    assert probe.TITLE
    assert is_dataclass(probe.Options)
    assert probe.Options.__dataclass_params__.frozen
    assert probe.Options() == probe.Options(), "every option has a default"
    assert get_type_hints(probe.Options).keys() >= {field.name for field in fields(probe.Options)}
    assert all(callable(part) for part in (probe.needs, probe.start, probe.result, probe.main))
    assert probe.DATA.data
    assert all("quantity" in where for where in probe.OVERVIEW)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_a_probe_reads_known_sites_of_any_network(name: str) -> None:
    for architecture in (LOOPED.architecture(), BASELINE.architecture(), NESTED):
        assert set(catalog.load(name).needs(architecture)) <= set(SITES)


def test_a_dense_network_is_refused_by_what_asks_for_a_router_alone() -> None:
    refused = {name: refusal(catalog.load(name).needs(NESTED), NESTED) for name in catalog.NAMES}
    assert refused["expert_overlap"] == refused["expert_load"] == "nested has no router: its layers are dense"
    assert [refused[name] for name in ("attention_sink", "massive_activations", "dyck_icl")] == [""] * 3


def test_a_capture_with_default_sites_serves_every_probe() -> None:
    read = {suffix for name in catalog.NAMES for suffix in catalog.load(name).needs(LOOPED.architecture())}
    assert read <= set(DEFAULT_SITES)


def test_a_name_that_is_no_probe_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"a probe must be one of .*; got 'atention_sink'; nearest: attention_sink"):
        catalog.load("atention_sink")
