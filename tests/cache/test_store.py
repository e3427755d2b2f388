"""A capture gives back what was recorded, reads no more than it is asked for, and refuses files that are not one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from cache.batch import Batch
from cache.layout import Contents
from cache.parts import Recording, write_capture
from cache.selection import select
from cache.store import Capture
from smelt_interp.data.tokenizer import BYTES
from smelt_interp.errors import UserError
from smelt_interp.sites import SITES as ALL_SITES
from tests.support.planted import LOOPED, planted_batch, random_sites, split_batch, text_samples
from tests.support.planted_captures import ARCHITECTURE, SITES, planted_capture, random_batch


@pytest.fixture(scope="module")
def batch() -> Batch:
    return random_batch()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, batch: Batch) -> Path:
    return planted_capture(tmp_path_factory.mktemp("written") / "a.h5", batch, dtype="float32").path


@pytest.fixture
def path(tmp_path: Path, written: Path) -> Path:
    """A capture of float32 that the test may damage."""
    shutil.copy(f"{written}.sha256", tmp_path)
    return Path(shutil.copy(written, tmp_path))


def joined(batches: list[Batch], key: tuple[int, str]) -> np.ndarray:
    return np.concatenate([each.sites[key] for each in batches])


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batches_are_what_was_planted(path: Path, batch: Batch, batch_size: int) -> None:
    capture = Capture(path)
    batches = list(capture.batches(SITES, batch_size))
    assert [len(each.samples) for each in batches] == {1: [1] * 7, 3: [3, 3, 1], 8: [7]}[batch_size]
    for key, values in batch.sites.items():
        assert np.array_equal(joined(batches, key), values)
    for name in ("logprob_BT", "argmax_BT", "sample_ids"):
        assert np.array_equal(np.concatenate([getattr(each, name) for each in batches]), getattr(batch, name))
    assert (capture.architecture, capture.samples.digest()) == (ARCHITECTURE, batch.samples.digest())
    assert batches[0].heads == batch.heads


def test_float16_is_within_its_rounding(tmp_path: Path, batch: Batch) -> None:
    capture = planted_capture(tmp_path / "a.h5", batch)
    (read,) = capture.batches(["attn.hook_pattern"], 8)
    for step in range(6):
        values = read.sites[step, "attn.hook_pattern"]
        assert values.dtype == np.float32
        assert np.abs(values - batch.sites[step, "attn.hook_pattern"]).max() < 5e-4


def test_one_head_and_some_samples_of_each_site(tmp_path: Path) -> None:
    batch = random_batch(4, suffixes=tuple(ALL_SITES))
    capture = planted_capture(tmp_path / "a.h5", batch, dtype="float32")
    assert capture.sites == tuple(ALL_SITES)
    for suffix, site in ALL_SITES.items():
        expected = batch.sites[3, suffix]
        assert np.array_equal(capture.read(suffix, 3), expected)
        assert np.array_equal(capture.read(suffix, 3, samples=slice(1, 3)), expected[1:3])
        if suffix in batch.heads:
            axis = 1 if "S" in site.axes else 2
            assert np.array_equal(capture.read(suffix, 3, head=1), expected.take(1, axis))


def test_heads_are_addressed_by_their_number_in_the_network(tmp_path: Path) -> None:
    whole = random_batch(4, suffixes=("attn.hook_pattern",))
    some = {key: values[:, [1, 3]] for key, values in whole.sites.items() if key[0] in (2, 4)}
    batch = Batch(
        architecture=ARCHITECTURE,
        samples=whole.samples,
        sample_ids=np.array([4, 5, 9, 30]),
        logprob_BT=whole.logprob_BT,
        argmax_BT=whole.argmax_BT,
        sites=some,
        heads={"attn.hook_pattern": (1, 3)},
    )
    capture = planted_capture(tmp_path / "a.h5", batch, dtype="float32")
    assert np.array_equal(capture.read("attn.hook_pattern", 4, head=3), whole.sites[4, "attn.hook_pattern"][:, 3])
    assert capture.sample_ids.tolist() == [4, 5, 9, 30]
    assert [sorted(each.sites) for each in capture.batches(["attn.hook_pattern"])] == [sorted(some)]
    with pytest.raises(UserError, match=r"a head of attn.hook_pattern must be one of those recorded, \[1, 3\]; got 2"):
        capture.read("attn.hook_pattern", 4, head=2)
    with pytest.raises(UserError, match=r"a step of attn.hook_pattern must be one of those recorded, \[2, 4\]; got 0"):
        capture.read("attn.hook_pattern", 0)


def test_a_capture_without_sites_holds_what_the_network_answered(tmp_path: Path) -> None:
    batch = random_batch(4, suffixes=())
    capture = planted_capture(tmp_path / "a.h5", batch)
    assert capture.sites == ()
    assert np.array_equal(np.concatenate([each.logprob_BT for each in capture.batches((), 3)]), batch.logprob_BT)


def test_text_is_that_of_the_tokens(path: Path, batch: Batch) -> None:
    capture = Capture(path)
    for row in range(7):
        assert capture.text(row) == BYTES.decode(batch.samples.ids_NT[row, : batch.samples.length_N[row]])


def test_text_that_is_no_utf8_and_samples_that_are_not_there(tmp_path: Path) -> None:
    batch = random_batch(2, suffixes=())
    batch.samples.ids_NT[1, 1:3] = 0xC3, 40
    capture = planted_capture(tmp_path / "a.h5", batch)
    assert "\ufffd(" in capture.text(1)
    for sample in (-1, 2):
        with pytest.raises(UserError, match=f"a sample must be 0 to 1; got {sample}"):
            capture.text(sample)


def bytes_read_by(work: Callable[[], object]) -> int:
    """Bytes that this process has the kernel read for `work`, as the kernel counts them."""

    def counted() -> int:
        with open("/proc/self/io") as file:
            return int(file.readline().split()[1])

    own = -counted() + counted()
    before = counted()
    work()
    return counted() - before - own


def test_one_matrix_is_read_without_the_rest(tmp_path: Path) -> None:
    samples = text_samples(30, 64)
    whole = planted_batch(LOOPED, samples, random_sites(LOOPED, samples, ("attn.hook_pattern",)))
    capture = planted_capture(tmp_path / "a.h5", whole, batch_size=15, dtype="float32")
    matrix = 64 * 64 * 4
    size = capture.path.stat().st_size
    assert size > 6 * 30 * 4 * matrix / 3
    read = bytes_read_by(lambda: capture.read("attn.hook_pattern", 3, samples=slice(7, 8), head=2))
    assert read < 3 * matrix
    assert read < size / 100
    everything = bytes_read_by(lambda: list(capture.batches(["attn.hook_pattern"])))
    assert everything > size / 2


def test_no_handle_stays_open(path: Path) -> None:
    capture = Capture(path)
    batches = capture.batches(SITES, 2)
    next(batches)
    capture.read("hook_resid_post", 0)
    opened = [link.resolve() for link in Path("/proc/self/fd").iterdir()]
    assert path.resolve() not in opened
    with path.open():
        assert path.resolve() in [link.resolve() for link in Path("/proc/self/fd").iterdir()]


def test_a_capture_is_read_without_torch(path: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'transformer_lens', 'nnsight', 'transformers', 'model'): sys.modules[name] = None\n"
        "from cache.store import Capture\n"
        f"capture = Capture({str(path)!r})\n"
        "print(sum(batch.sites[2, 'hook_resid_post'].shape[0] for batch in capture.batches(['hook_resid_post'], 2)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"


def test_the_digest_is_that_of_the_bytes(path: Path) -> None:
    beside = Capture(path).digest
    path.with_name("a.h5.sha256").unlink()
    assert Capture(path).digest == beside
    done = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == beside


def test_a_site_that_was_not_recorded(path: Path) -> None:
    with pytest.raises(UserError, match=r"must hold the site attn.hook_q; .* record it again with that site"):
        Capture(path).batches(["attn.hook_q"])
    with pytest.raises(UserError, match=r"got 'attn.hook_kk'; nearest: attn.hook_k"):
        Capture(path).read("attn.hook_kk", 0)
    with pytest.raises(UserError, match="batch_size must be at least 1; got 0"):
        Capture(path).batches(SITES, 0)


# Files that are not a capture


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a capture must be a file; got .*none.h5"):
        Capture(tmp_path / "none.h5")
    with pytest.raises(UserError, match="a capture must be a file"):
        Capture(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not an HDF5 file at all" * 100])
def test_another_kind_of_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.h5").write_bytes(content)
    with pytest.raises(UserError, match="a capture must be a whole HDF5 file"):
        Capture(tmp_path / "a.h5")


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_a_truncated_file(path: Path, kept: float) -> None:
    os.truncate(path, int(path.stat().st_size * kept))
    with pytest.raises(UserError, match=r"a capture must be a whole HDF5 file to open; got .*a.h5.*copy or record"):
        Capture(path)


def test_an_unfinished_capture_names_the_command_to_go_on(tmp_path: Path, batch: Batch) -> None:
    contents = Contents(
        architecture=ARCHITECTURE,
        samples=batch.samples,
        sample_ids=batch.sample_ids,
        sites=select(ARCHITECTURE, SITES),
        precision="float16",
        source={},
    )
    recording = Recording(tmp_path / "a.h5", contents, "python -m cache.record --out a.h5")
    recording.add(next(split_batch(batch, 3)))
    match = r"a capture must be finished; got .*a.parts with 1 finished parts: go on with: python -m cache.record --out"
    for name in ("a.h5", "a.parts"):
        with pytest.raises(UserError, match=match):
            Capture(tmp_path / name)


def damage(path: Path, change: Callable[[h5py.File], None]) -> None:
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        change(file)


def virtual(file: h5py.File) -> None:
    del file["hook_resid_post"]
    layout = h5py.VirtualLayout(shape=(6, 7, 12, 8), dtype="f4")
    layout[0] = h5py.VirtualSource("elsewhere.h5", "data", shape=(7, 12, 8))
    file.create_virtual_dataset("hook_resid_post", layout)


def stored_elsewhere(file: h5py.File) -> None:
    del file["hook_resid_post"]
    file.create_dataset("hook_resid_post", (6, 7, 12, 8), "f4", external=[("/etc/passwd", 0, 6 * 7 * 12 * 8 * 4)])


def linked(link: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file["hook_resid_post"]
        file["hook_resid_post"] = link

    return change


def strange_filter(file: h5py.File) -> None:
    del file["hook_resid_post"]
    file.create_dataset("hook_resid_post", (6, 7, 12, 8), "f4", compression="lzf")


def without(name: str) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]

    return change


def attribute(name: str, value: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        file.attrs[name] = value

    return change


def replaced(name: str, value: np.ndarray) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        attributes = dict(file[name].attrs)
        del file[name]
        file[name] = value
        file[name].attrs.update(attributes)

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (attribute("version", 2), r"must be of version 1; got 2: read it with the release that wrote it"),
        (attribute("schema", np.bytes_("other")), r"must have the schema smelt.capture; got other"),
        (lambda file: file.attrs.pop("schema"), r"must have the schema smelt.capture; got none"),
        (lambda file: file.attrs.pop("request"), r"must have the text attribute request"),
        (attribute("architecture", np.bytes_("{}")), r"an architecture must give every required field"),
        (attribute("architecture", np.bytes_("[]")), r"must be JSON objects; got list"),
        (attribute("architecture", np.bytes_("{")), r"a capture must be a whole HDF5 file"),
        (attribute("command", "of variable length"), r"must have the text attribute command"),
        (linked(h5py.ExternalLink("elsewhere.h5", "/data")), r"must hold no links to elsewhere; got ExternalLink"),
        (linked(h5py.SoftLink("/logprob")), r"must hold no links to elsewhere; got SoftLink"),
        (virtual, r"must hold its own data; got /hook_resid_post, which is virtual or in another file"),
        (stored_elsewhere, r"must hold its own data; got /hook_resid_post"),
        (strange_filter, r"must use the filters gzip, shuffle, fletcher32; got number 32000"),
        (without("hook_resid_post"), r"must hold the sites of its request"),
        (without("logprob"), r"must hold logprob"),
        (without("tokens/role"), r"must hold tokens/role"),
        (without("tokens"), r"must hold tokens/ids"),
        (lambda file: file.create_dataset("extra", data=[1]), r"got extra"),
        (lambda file: file.create_group("tokens/more"), r"datasets of its schema alone; got /tokens/more"),
        (replaced("hook_resid_post", np.zeros((6, 7, 12, 9), "f4")), r"hook_resid_post must be numbers of shape"),
        (replaced("hook_resid_post", np.zeros((6, 7, 12, 8), "f8")), r"hook_resid_post must be numbers of shape"),
        (replaced("tokens/role", np.zeros((7, 11), "u1")), r"tokens/role must be uint8 \(7, 12\); got uint8 \(7, 11\)"),
        (replaced("argmax", np.zeros((7, 12), "f4")), r"argmax must be int32 \(7, 12\); got float32"),
        (lambda file: file["attn.hook_k"].attrs.update(steps=[0, 9]), r"steps of attn.hook_k must be ascending"),
        (lambda file: file["attn.hook_k"].attrs.pop("steps"), r"a capture must be a whole HDF5 file"),
    ],
)  # fmt: skip
def test_files_that_break_the_schema(path: Path, change: Callable[[h5py.File], None], match: str) -> None:
    damage(path, change)
    with pytest.raises(UserError, match=match) as raised:
        Capture(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_damaged_block_is_told_when_it_is_read(path: Path) -> None:
    with h5py.File(path) as file:
        block = file["hook_resid_post"].id.get_chunk_info(10)
    data = bytearray(path.read_bytes())
    data[block.byte_offset + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a capture must be a whole HDF5 file to read; got .*copy or record it again"):
        list(Capture(path).batches(["hook_resid_post"]))


def test_batches_of_nothing_are_no_capture(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="batches to write must be at least one; got 0"):
        write_capture(tmp_path / "a.h5", [])
