"""Real text: splits by document, windows inside documents, a user's own file."""

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from smelt_interp.data import text
from smelt_interp.data.marked_text import Row
from smelt_interp.data.samples import Role
from smelt_interp.data.text import (
    EXCERPTS_FOLDER,
    Corpus,
    Document,
    Windows,
    corpus,
    corpus_samples,
    own_corpus,
    split_corpus,
    split_of,
)
from smelt_interp.data.tokenizer import BOS, BYTES
from smelt_interp.errors import UserError


@pytest.mark.parametrize("domain", ["code", "prose", "math"])
def test_no_document_is_on_both_sides_and_neither_side_is_empty(domain):
    train, held_out = (corpus(domain, split).documents for split in ("train", "held_out"))
    assert train
    assert held_out
    assert not {document.name for document in train} & {document.name for document in held_out}
    assert not {document.data for document in train} & {document.data for document in held_out if document.data}


def test_the_side_is_pinned_to_the_name():
    """A change of the hash would move held-out documents of shipped checkpoints into training."""
    assert split_of("prose", "41-mark") == "held_out"
    assert split_of("prose", "08-ruth") == "train"
    held_out = sum(split_of("code", str(number)) == "held_out" for number in range(4000))
    assert held_out / 4000 == pytest.approx(0.15, abs=0.03)


def test_code_is_the_library_of_this_interpreter_without_packages_and_tests():
    documents = {d.name: d.data for split in ("train", "held_out") for d in corpus("code", split).documents}
    assert documents["json/decoder.py"] == (Path(sysconfig.get_paths()["stdlib"]) / "json/decoder.py").read_bytes()
    assert not [name for name in documents if {"site-packages", "test", "tests"} & set(name.split("/"))]
    assert len(documents) > 300


@pytest.mark.parametrize("domain", ["code", "prose", "math"])
def test_rows_are_bos_and_a_run_of_bytes_of_one_document_of_the_split(domain):
    samples = samples_of_domain(domain, 12, 200, seed=3)
    documents = [document.data for document in corpus(domain, "held_out").documents]
    assert samples.ids_NT.shape == (12, 200)
    assert (samples.length_N == 200).all()
    for ids in samples.ids_NT:
        assert ids[0] == BOS
        data = BYTES.decode_bytes(ids)
        assert len(data) == 199
        assert any(data in document for document in documents)
    assert set(samples.domain_N.tolist()) == {domain.encode()}
    assert (samples.role_NT[:, 0] == Role.BOS).all()
    assert (samples.role_NT[:, 1:] == Role.TEXT).all()
    assert (samples.segment_start_NT == 0).all()
    assert (samples.episode_N["shots"] == -1).all()


def test_same_seed_same_rows():
    one, again, other = (samples_of_domain("math", 5, 64, seed).digest() for seed in (1, 1, 2))
    assert one == again != other


def samples_of_domain(domain, num, length, seed=0, cut="tiled"):
    return corpus_samples(corpus(domain, "held_out"), num, length=length, seed=seed, tokenizer=BYTES, cut=cut)


def planted(*sizes: int) -> Corpus:
    """Documents whose bytes name them and count up."""
    documents = [
        Document(name=str(number), data=bytes(range(35 * number, 35 * number + size)))
        for number, size in enumerate(sizes)
    ]
    return Corpus(domain="code", documents=tuple(documents))


def rows_of(texts, num, length, cut="tiled", seed=0):
    return corpus_samples(texts, num, length=length, seed=seed, tokenizer=BYTES, cut=cut)


def test_every_window_inside_a_document_is_equally_likely_and_none_crosses():
    """Sizes 5, 2 (too short), 4 at three bytes after bos: starts 0 1 2 of the first and 0 1 of the last."""
    rows = Windows(planted(5, 2, 4), 4, BYTES).draw((np.arange(1000) + 0.5) / 1000)
    draws = np.stack([row.tokens.ids_T for row in rows])
    starts, counts = np.unique(draws[:, 1], return_counts=True)
    assert starts.tolist() == [0, 1, 2, 70, 71]
    assert counts.tolist() == [200] * 5
    assert (np.diff(draws[:, 1:], axis=1) == 1).all()


def test_tiles_cover_each_document_without_overlap_and_are_all_that_there_is():
    """Sizes 7, 2 (too short), 5 at two bytes after bos: three tiles, one, and two; odd ends are left out."""
    samples = rows_of(planted(7, 2, 5), 6, 3)
    assert sorted(samples.ids_NT[:, 1].tolist()) == [0, 2, 4, 35, 70, 72]
    assert samples.num_documents == 3
    with pytest.raises(UserError, match=r"samples must be at most 6, the rows of 3 tokens that code holds .*; got 7"):
        rows_of(planted(7, 2, 5), 7, 3)


def test_only_the_rows_that_are_asked_for_are_made(monkeypatch):
    made = []
    monkeypatch.setattr(text, "Row", lambda tokens, source: made.append(tokens) or Row(tokens, source))
    assert len(rows_of(planted(99), 3, 2)) == len(made) == 3


def test_rows_share_a_document_exactly_when_they_are_of_one():
    samples = rows_of(planted(9, 9, 9), 9, 4)
    number_N = samples.ids_NT[:, 1] // 35
    same_NN = samples.document_N[:, None] == samples.document_N
    assert np.array_equal(same_NN, number_N[:, None] == number_N)


def test_a_row_does_not_depend_on_how_many_are_taken_and_the_seed_changes_the_order():
    few, many, other = (
        rows_of(planted(30, 30), 4, 3),
        rows_of(planted(30, 30), 12, 3),
        rows_of(planted(30, 30), 12, 3, seed=1),
    )
    assert np.array_equal(few.ids_NT, many.ids_NT[:4])
    assert not np.array_equal(many.ids_NT, other.ids_NT)


def test_rows_longer_than_every_document_are_refused_with_the_longest_that_works():
    with pytest.raises(UserError, match=r"at most 6 tokens here, .*; got 7"):
        rows_of(planted(5, 2), 1, 7)
    assert rows_of(planted(5, 2), 1, 6).ids_NT.tolist() == [[BOS, 0, 1, 2, 3, 4]]
    with pytest.raises(UserError, match="at least 1 row of at least 2 tokens; got 0 of 6"):
        rows_of(planted(5), 0, 6)


def test_a_corpus_digest_sees_names_contents_and_boundaries():
    digests = {
        Corpus(domain="code", documents=documents).digest()
        for documents in (
            (Document(name="a", data=b"xy"), Document(name="b", data=b"z")),
            (Document(name="a", data=b"x"), Document(name="b", data=b"yz")),
            (Document(name="ab", data=b"xy"), Document(name="", data=b"z")),
            (Document(name="a", data=b"xy"),),
        )
    }
    assert len(digests) == 4


@pytest.mark.parametrize("domain", ["code", "prose", "math"])
def test_held_out_texts_are_enough_to_measure_on(domain):
    held_out = corpus(domain, "held_out")
    assert len(held_out.documents) >= 20
    assert held_out.num_bytes() >= 60_000
    samples = samples_of_domain(domain, 256, 160)
    assert samples.num_documents >= 15


def test_committed_texts_carry_their_licence():
    for domain in ("prose", "math"):
        assert len((EXCERPTS_FOLDER / domain / "LICENSE").read_text()) > 200
        assert sum(path.stat().st_size for path in (EXCERPTS_FOLDER / domain).iterdir()) < 1_000_000


def test_own_file_is_one_document(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("grüße " * 50)
    samples = rows_of(own_corpus(path), 2, 40)
    assert set(samples.domain_N.tolist()) == {b"file:mine"}
    assert samples.num_documents == 1
    assert BYTES.decode_bytes(samples.ids_NT[0]) in path.read_bytes()


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfab\xef\xbb\xbfcd")
    (document,) = own_corpus(tmp_path / "marked.txt").documents
    assert document.data == b"ab\xef\xbb\xbfcd"  # inside a text it is a character as any other


def test_every_file_of_a_folder_that_is_not_hidden_is_a_document(tmp_path):
    (tmp_path / "poems" / "late").mkdir(parents=True)
    for name in ("b.txt", "a.md", "late/c.txt", ".hidden", "late/.DS_Store"):
        (tmp_path / "poems" / name).write_text(f"{name} and some words after it")
    texts = own_corpus(tmp_path / "poems")
    assert [document.name for document in texts.documents] == ["a.md", "b.txt", "late/c.txt"]
    assert texts.domain == "file:poems"
    assert rows_of(texts, 6, 10).num_documents == 3
    sides = [split_corpus(texts, split).documents for split in ("train", "held_out")]
    assert sorted(document.name for side in sides for document in side) == ["a.md", "b.txt", "late/c.txt"]


def test_the_name_of_a_file_becomes_a_printable_domain(tmp_path):
    path = tmp_path / "ünder \n a very long name.txt"
    path.write_text("words")
    assert own_corpus(path).domain == "file:_nder___a_v"[:16]


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev/stdin"])
def test_devices_are_refused_unread(path):
    with pytest.raises(UserError, match=r"a text file must be a plain file; got .*, a device or pipe"):
        own_corpus(Path(path))


def test_a_pipe_is_refused_unread_in_a_folder_too(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(UserError, match=r"must be a plain file; got .*pipe, a device or pipe"):
            own_corpus(path)


def test_a_folder_has_a_largest_number_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MOST_FILES", 2)
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("words")
    with pytest.raises(UserError, match="a folder of text must hold at most 2 files; got more in"):
        own_corpus(tmp_path)


def test_texts_together_have_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "LARGEST_TEXT", 10)
    for name in ("a", "b"):
        (tmp_path / name).write_text("sixsix")
    assert len(own_corpus(tmp_path / "a").documents) == 1
    with pytest.raises(UserError, match=r"a text file must have at most 4 bytes; got .*b, which has more"):
        own_corpus(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "must not be empty; got .* with 0 bytes"),
        (b" \n\n", "must not be empty; got .* with 3 bytes"),
        (b"\xef\xbb\xbf\n", "must not be empty; got .* with 4 bytes"),
        ("words".encode("utf-16"), "must be UTF-8; got .* with byte 0xff at 0: convert it"),
        (b"caf\xe9 au lait", "must be UTF-8; got .* with byte 0xe9 at 3: convert it"),
    ],
)
def test_bad_files_are_refused(tmp_path, data, message):
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
        own_corpus(path)


def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"a text file must exist; got .*none.txt"):
        own_corpus(tmp_path / "none.txt")
    with pytest.raises(UserError, match=r"a folder of text must hold a file; got none in"):
        own_corpus(tmp_path)


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="domain must be one of code, prose, math; got poems"):
        corpus("poems", "train")
    with pytest.raises(UserError, match="split must be one of train, held_out; got test"):
        corpus("code", "test")
    with pytest.raises(UserError, match="source must be one of excerpts, fetched; got web"):
        corpus("prose", "train", "web")


def test_fetched_texts_are_asked_for_by_name_and_their_absence_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ways = "run `python -m smelt_interp.data.fetch_texts`, or say `--mixture.source excerpts`"
    with pytest.raises(UserError, match=f"must be in {tmp_path}.*: {ways}"):
        corpus.__wrapped__("prose", "train", "fetched")
    folder = tmp_path / "smelt-interp" / "texts" / "prose"
    folder.mkdir(parents=True)
    (folder / "08-ruth.txt").write_text("whole book")
    (found,) = corpus.__wrapped__("prose", "train", "fetched").documents
    assert (found.name, found.data) == ("08-ruth", b"whole book")


def test_excerpts_are_as_committed():
    """The digest of the excerpts that samples of default seeds are drawn from."""
    sha = hashlib.sha256()
    for domain in ("prose", "math"):
        for split in ("train", "held_out"):
            sha.update(corpus(domain, split).digest().encode())
    assert sha.hexdigest()[:16] == "546ee1c801c6def3"
