"""The names of what a step holds."""

import pytest

from smelt_interp.errors import UserError
from smelt_interp.sites import SITES, TOP_LEVEL_SITES, check_suffix, hook_name, nearest, site_of


def test_a_name_is_transformer_lens_own():
    assert hook_name(3, "attn.hook_pattern") == "blocks.3.attn.hook_pattern"
    assert len(SITES) == 22
    assert list(TOP_LEVEL_SITES) == ["hook_embed", "ln_final.hook_scale", "ln_final.hook_normalized"]
    assert [suffix for suffix, site in SITES.items() if site.integer] == ["mlp.hook_expert_indices"]


def test_a_name_leads_to_its_site():
    assert all(site_of(hook_name(12, suffix)) is site for suffix, site in SITES.items())
    assert all(site_of(name) is site for name, site in TOP_LEVEL_SITES.items())


def test_axes_are_letters_of_the_legend_batch_first():
    for site in (SITES | TOP_LEVEL_SITES).values():
        assert site.axes[0] == "B"
        assert set(site.axes) <= set("BTSDQGCEK1")


@pytest.mark.parametrize(
    ("suffix", "close"),
    [
        ("attn.hook_patern", "attn.hook_pattern"),
        ("resid_pre", "hook_resid_pre"),
        ("hook_attn_scores", "attn.hook_attn_scores"),
    ],
)
def test_an_unknown_suffix_raises_with_the_nearest(suffix, close):
    with pytest.raises(UserError, match=rf"hook suffixes of a step; got '{suffix}'; nearest: .*{close}"):
        check_suffix(suffix)
    with pytest.raises(UserError, match="hook suffixes of a step"):
        hook_name(0, suffix)


def test_what_is_near_nothing_gets_no_advice():
    assert nearest("zzzz", SITES) == ""
