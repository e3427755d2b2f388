"""What a visit is worth is recovered from runs that follow a planted law."""

import json

import numpy as np
import pandas as pd
import pytest

from smelt_interp.errors import UserError
from smelt_interp.scaling import repeat


def planted(phi: float, noise: float = 0.0) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    rows = [
        {"once": size, "repeated": size, "visits": visits, "tokens": tokens, "loss": loss * np.exp(noise * draw)}
        for size in (1e6, 4e6, 1.6e7)
        for visits in (1, 2, 3, 4)
        for tokens in (1e7, 4e7, 1.6e8, 6.4e8)
        for loss in [1.6 + 400 / (size + visits**phi * size) ** 0.4 + 300 / tokens**0.35]
        for draw in [generator.normal()]
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize("phi", [0.0, 0.46, 1.0])
def test_the_exponent_of_a_planted_law_is_found(phi):
    found, _ = repeat.fit(planted(phi), draws=2, seed=0)
    assert dict(zip(repeat.NAMES, found, strict=True)) == pytest.approx(
        {"E": 1.6, "A": 400, "K": 300, "a": 0.4, "c": 0.35, "phi": phi}, rel=1e-3, abs=1e-3
    )


def test_with_noise_it_is_near_and_has_an_interval(tmp_path, capsys, monkeypatch):
    planted(0.46, noise=1e-3).to_csv(tmp_path / "runs.csv", index=False)
    monkeypatch.setattr("sys.argv", ["repeat", str(tmp_path / "runs.csv"), "--draws", "100", "--json"])
    repeat.main()
    phi = json.loads(capsys.readouterr().out)["phi"]
    assert phi["value"] == pytest.approx(0.46, abs=0.02)
    assert 0.44 < phi["low"] < phi["value"] < phi["high"] < 0.48


def test_runs_that_cannot_tell_are_refused():
    runs = planted(0.46)
    with pytest.raises(UserError, match="runs must have at least 2 different visits to tell the exponent; got 1"):
        repeat.fit(runs[runs["visits"] == 2], draws=2, seed=0)
