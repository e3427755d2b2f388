"""Data by name: each name gives the rows of its own generator, and what does not fit is refused with a way out."""

from pathlib import Path

import numpy as np
import pytest

from smelt_interp.data.backcopy import backcopy_samples
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.dyck import DyckOptions, dyck_samples
from smelt_interp.data.samples import Role
from smelt_interp.data.text import corpus, corpus_samples
from smelt_interp.data.tokenizer import BOS, BYTES
from smelt_interp.errors import UserError


def test_dyck_is_the_generator_with_episode_pairing() -> None:
    samples = load_samples(DataOptions(samples=5, shots=(3,), seed=7), 160, BYTES)
    expected = dyck_samples(DyckOptions(shots=(3,)), 5, seed=7, length=160, tokenizer=BYTES)
    assert samples.digest() == expected.digest()
    assert (samples.episode_N["shots"] == 3).all()


def test_a_row_does_not_depend_on_how_many_are_drawn() -> None:
    few, many = (load_samples(DataOptions(data=("code",), samples=n, length=40), 160, BYTES) for n in (3, 9))
    assert np.array_equal(few.ids_NT, many.ids_NT[:3])


@pytest.mark.parametrize("domain", ["code", "prose", "math"])
def test_text_is_the_held_out_split(domain: str) -> None:
    samples = load_samples(DataOptions(data=(domain,), samples=4, length=64, seed=1), 160, BYTES)
    assert (
        samples.digest() == corpus_samples(corpus(domain, "held_out"), 4, length=64, seed=1, tokenizer=BYTES).digest()
    )
    assert samples.ids_NT.shape == (4, 64)
    assert set(samples.domain_N) == {domain.encode()}


def test_backcopy_is_the_generator() -> None:
    samples = load_samples(DataOptions(data=("backcopy",), samples=3, length=50, seed=2), 160, BYTES)
    assert samples.digest() == backcopy_samples(3, length=50, seed=2, tokenizer=BYTES).digest()


def test_a_file_gives_windows_of_its_own_bytes(tmp_path: Path) -> None:
    text = "".join(f"line {number} of the file, with an ö\n" for number in range(40)).encode()
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    samples = load_samples(DataOptions(data=(str(path),), samples=6, length=32), 160, BYTES)
    assert (samples.ids_NT[:, 0] == BOS).all()
    assert (samples.role_NT[:, 1:] == Role.TEXT).all()
    assert all(BYTES.decode_bytes(ids_T) in text for ids_T in samples.ids_NT)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"samples": 0}, r"samples must be at least 1; got 0"),
        ({"samples": 10**30}, r"samples must be at most 1000000; got 10{30}$"),
        ({"seed": -1}, r"seed must be at least 0; got -1"),
        ({"length": 1}, r"length must be at least 2; got 1"),
        ({"num_types": 5}, r"num_types must be at most 4; got 5"),
        ({"data": ()}, r"data must be one or more different values; got none"),
        ({"data": ("code", "code")}, r"data must be one or more different values; got code code"),
        ({"cut": "sliced"}, r"cut must be 'tiled' or 'drawn'; got 'sliced'"),
    ],
)
def test_options_outside_their_rules(changes: dict[str, object], match: str) -> None:
    with pytest.raises(UserError, match=match):
        DataOptions(**changes)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            DataOptions(data=("code",), length=161),
            r"length must be at most the network's context of 160 tokens; got 161",
        ),
        (
            DataOptions(shots=(30,)),
            r"shots must be at most 10, the largest number that always fits rows of 160 tokens",
        ),
        (
            DataOptions(data=("verse",)),
            r"data must be one of dyck, code, prose, math, backcopy, repeats, or a file or folder; got 'verse'",
        ),
    ],
)
def test_data_that_cannot_be_had(options: DataOptions, match: str) -> None:
    with pytest.raises(UserError, match=match):
        load_samples(options, 160, BYTES)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", r"must not be empty"),
        (b" \n\n", r"must not be empty"),
        (b"fine so far, then \xff\xfe and more", r"must be UTF-8"),
        (b"short", r"text rows must be at most 6 tokens here"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=match):
        load_samples(DataOptions(data=(str(path),), length=32), 160, BYTES)


def test_names_follow_one_another(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("words and more words " * 30)
    names = ("dyck", str(tmp_path / "own.txt"))
    both = load_samples(DataOptions(data=names, samples=3, length=60, shots=(1,)), 160, BYTES)
    assert both.domain_N.tolist() == [b"dyck"] * 3 + [b"file:own"] * 3
    assert both.num_documents == 4
