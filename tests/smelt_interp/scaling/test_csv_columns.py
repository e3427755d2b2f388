"""CSV files are read by column name, and every bad value is named with its line."""

from pathlib import Path

import pandas as pd
import pytest

from smelt_interp.errors import UserError
from smelt_interp.scaling.csv_columns import ANY, LOSS, SHARE, read_columns


def read(path: Path) -> pd.DataFrame:
    numbers = {"loss": LOSS, "sparsity": SHARE, "score": ANY}
    return read_columns(path, words=("name",), numbers=numbers, optional=("domain",))


def test_columns_are_found_by_name_in_any_order_beside_others(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("﻿score, name ,extra,loss,sparsity\n-1,a,x,2.5,0\n1e3,b,y,3,0.95\n", encoding="utf-8")
    assert read(path).to_dict("list") == {
        "name": ["a", "b"],
        "loss": [2.5, 3.0],
        "sparsity": [0.0, 0.95],
        "score": [-1.0, 1000.0],
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "name,loss\na,1\n",
            r"must have the columns name, loss, sparsity, score, .*; missing sparsity, score in the header 'name,loss'",
        ),
        ("", r"missing name, loss, sparsity, score in the header ''"),
        ("name;loss;sparsity;score\n", r"separated by commas; missing .* in the header 'name;loss;sparsity;score'"),
        ("name,loss,sparsity,score\n", r"must hold at least one row below its header; got none"),
        (
            "name,loss,sparsity,score\na,1,0,0\nb,nan,0,0\n",
            r"line 3: loss must be a number from 1e-6 to 1e6; got 'nan'",
        ),
        (
            "name,loss,sparsity,score\na,-2,0,0\n",
            r"line 2: loss must be a number from 1e-6 to 1e6; got '-2'",
        ),
        ("name,loss,sparsity,score\na,1,1,0\n", r"line 2: sparsity must be a share of at least 0 and below 1; got '1'"),
        ("name,loss,sparsity,score\na,1,0,inf\n", r"line 2: score must be a finite number within 1e100; got 'inf'"),
        ("name,loss,sparsity,score\na,1,0,good\n", r"line 2: score must be a finite number within 1e100; got 'good'"),
        ("name,loss,sparsity,score\na,1,0\n", r"line 2: score must be a finite number within 1e100; got ''"),
        ("name,loss,sparsity,score\n ,1,0,0\n", r"line 2: name must be given; got nothing"),
        ("name,loss,sparsity,score,loss\na,1,0,0,1\n", r"must name each column once"),
        ("name,loss,sparsity,score\n\na,1,0,0\n\nb,0,0,0\n", r"line 5: loss must be .*; got '0'"),
        ("name,loss,sparsity,score\na,1,0,0,7\n", r"must be a CSV file in UTF-8; .*Expected 4 fields in line 2, saw 5"),
        ("name,loss,sparsity,score\na,1e300,0,0\n", r"line 2: loss must be .* to 1e6; got '1e300'"),
        ("name,loss,sparsity,score\na,0x10,0,0\n", r"line 2: loss must be .*; got '0x10'"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        read(path)


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a CSV file must exist; got"):
        read(tmp_path / "absent.csv")
    with pytest.raises(UserError, match=r"a CSV file must be a plain file; got .*, a folder"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"a CSV file must be a plain file; got /dev/zero, a device or pipe"):
        read(Path("/dev/zero"))
    path = tmp_path / "runs.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="must be a CSV file in UTF-8"):
        read(path)
