"""The config: its rules, each with its message, and its JSON form."""

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from smelt_interp.config import ModelConfig, default_loop_scale
from smelt_interp.errors import UserError
from tests.support.configs import TINY, VARIANTS

RULES = [
    ("num_layers", 0, "num_layers must be at least 1; got 0"),
    ("top_k", 0, "top_k must be at least 1; got 0"),
    ("width", 10**400, r"width must be at most 1000000000000; got a number of 1329 bits"),
    ("num_layers", 10**9, "layers times visits must be at most 10000 steps; got 1000000002"),
    ("num_visits", 10**9, "layers times visits must be at most 10000 steps; got 2000000002"),
    ("top_k", 1, r"renormalise_top_k must be false when top_k is 1 of 6 experts; got True"),
    ("top_k", 7, r"top_k must be at most num_experts \(6\); got 7"),
    ("num_heads", 3, r"num_heads must be a multiple of num_kv_heads \(2\); got 3"),
    ("head_width", 7, "head_width must be even with a rotary embedding; got 7"),
    ("loop_stop", 5, r"the looped span must satisfy .* <= num_layers \(4\); got 1\.\.5"),
    ("loop_start", 4, r"the looped span must satisfy .*; got 4\.\.3"),
    ("loop_start", -1, "loop_start must be at least 0; got -1"),
    ("loop_start", 3, r"a span of at least one layer must be looped when num_visits is 2; got 3\.\.3"),
    ("num_visits", 0, "num_visits must be at least 1; got 0"),
    ("loop_scale", 0.0, "loop_scale must be above 0; got 0.0"),
    ("loop_scale", 1.01, "loop_scale must be at most 1; got 1.01"),
    ("loop_scale", float("nan"), "loop_scale must be a number; got nan"),
    ("num_experts", 10**12, "num_experts x 2 x expert_width x width must be at most 1000000000000; got 384"),
    ("head_width", 10**12, "num_heads x head_width x width must be at most 1000000000000; got 64"),
    ("vocab_size", 10**12, "vocab_size x width must be at most 1000000000000; got 16000000000000"),
    ("norm_eps", 0.0, "norm_eps must be above 0; got 0.0"),
    ("norm_eps", float("inf"), "norm_eps must be at most 1; got inf"),
    ("norm_eps", float("nan"), "norm_eps must be a number; got nan"),
    ("norm_eps", 10**400, "norm_eps must be a number; got a number of 1329 bits"),
    ("rope_base", 1.0, "rope_base must be above 1; got 1.0"),
    ("rope_base", float("inf"), r"rope_base must be at most 1e\+12; got inf"),
    ("rope_base", float("nan"), "rope_base must be a number; got nan"),
    ("rope_base", 10**400, "rope_base must be a number; got a number of 1329 bits"),
    ("router", "hash", "router must be 'softmax' or 'sigmoid'; got 'hash'"),
    ("width", 16.0, "width must be a whole number; got 16.0"),
    ("width", True, "width must be a whole number; got True"),
    ("qk_norm", 1, "qk_norm must be true or false; got 1"),
    ("qk_norm_over", "layer", "qk_norm_over must be 'head' or 'all heads'; got 'layer'"),
    ("qk_norm_over", "all heads", "qk_norm_over must be 'head' when qk_norm is false; got 'all heads'"),
    ("loop_scale", "half", "loop_scale must be a number; got 'half'"),
    ("rope_base", "none", "rope_base must be a number; got 'none'"),
]


@pytest.mark.parametrize(("field", "value", "message"), RULES)
def test_a_field_outside_its_rule_is_named(field, value, message):
    with pytest.raises(UserError, match=message):
        replace(TINY, **{field: value})


@pytest.mark.parametrize("field", ["width", "rope_base", "router", "tied_unembedding", "loop_start"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_too_long_to_be_shown_is_named(field, sign):
    with pytest.raises(UserError, match=f"{field} must be .*; got a number of 16610 bits"):
        replace(TINY, **{field: sign * 10**5000})


def test_a_network_without_a_rotary_embedding_may_have_odd_heads():
    assert replace(TINY, rope_base=None, head_width=7).head_width == 7


def test_a_config_does_not_change():
    with pytest.raises(FrozenInstanceError):
        TINY.num_visits = 3


def test_the_scale_of_a_new_network_is_one_over_its_visits():
    assert [default_loop_scale(visits) for visits in (1, 2, 4)] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_config_is_its_json(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_json()), encoding="utf-8")
    assert ModelConfig.load(path) == config


def test_fields_with_defaults_may_be_left_out_and_no_others():
    left_out = ("qk_norm", "qk_norm_over", "rope_base", "router")
    required = {key: value for key, value in TINY.to_json().items() if key not in left_out}
    assert ModelConfig.from_json(required) == TINY
    del required["loop_scale"], required["width"]
    with pytest.raises(UserError, match="loop_scale, width must be given; got nothing"):
        ModelConfig.from_json(required)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json must hold JSON; "),
        ("[" * 100_000, "config.json must hold JSON; "),
        ('{"width": 1' + "0" * 5000 + "}", "config.json must hold JSON; "),
        ("[1]", "config.json must hold one JSON object; got list"),
        (
            json.dumps(TINY.to_json() | {"num_loops": 2, "d_model": 4}),
            "only fields of ModelConfig may be given; got d_model, num_loops",
        ),
        (json.dumps(TINY.to_json() | {"top_k": 99}), r"config.json: top_k must be at most num_experts \(6\); got 99"),
        (json.dumps(TINY.to_json() | {"width": None}), "config.json: width must be a whole number; got None"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path, text, message):
    path: Path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        ModelConfig.load(path)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path):
    with pytest.raises(UserError, match=r"a config file must exist; got .*none.json"):
        ModelConfig.load(tmp_path / "none.json")
    with pytest.raises(UserError, match=r"a config file must be a plain file; got .*, a folder"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"config\.json must hold JSON; "):
        ModelConfig.load(tmp_path / "config.json")
