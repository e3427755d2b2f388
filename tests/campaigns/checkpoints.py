"""Damaged checkpoints are refused in one line, or the network is the one that their files describe."""

import json
import math
import shutil
from pathlib import Path

import numpy as np

from model.network import LoopedMoE
from tests.campaigns.campaign import Case, damaged_bytes, damaged_json, pick, tried
from tests.support.networks import tiny_network

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"


def campaign(folder: Path) -> Case:
    """A checkpoint of a tiny network."""
    whole, spoilt = folder / "whole", folder / "spoilt"
    tiny_network().save_pretrained(whole, readme="# Tiny\n")

    def case(random: np.random.Generator) -> str:
        shutil.rmtree(spoilt, ignore_errors=True)
        shutil.copytree(whole, spoilt)
        kind = pick(random, ("bytes", "JSON", "header", "file"))
        damage(random, spoilt, kind)
        network = tried(lambda: LoopedMoE.from_pretrained(spoilt))
        if network is None:
            return f"{kind}: refused"
        assert network.config.to_json() == {**network.config.to_json(), **json.loads((spoilt / CONFIG).read_bytes())}
        compare(network, (spoilt / WEIGHTS).read_bytes())
        return f"{kind}: read as it stands"

    return case


def damage(random: np.random.Generator, folder: Path, kind: str) -> None:
    path = folder / pick(random, (CONFIG, WEIGHTS, TOKENIZER))
    data = path.read_bytes()
    if kind == "bytes":
        path.write_bytes(damaged_bytes(random, data))
    elif kind == "JSON":
        path = folder / pick(random, (CONFIG, TOKENIZER))
        path.write_text(json.dumps(damaged_json(random, json.loads(path.read_bytes()))))
    elif kind == "header":
        damage_header(random, folder / WEIGHTS)
    else:
        path.unlink()
        match random.integers(3):
            case 0:
                path.mkdir()
            case 1:
                path.symlink_to(pick(random, ("nowhere", "/dev/zero", path.name, ".")))


def damage_header(random: np.random.Generator, path: Path) -> None:
    """A safetensors file is the length of its header in 8 bytes, the header in JSON, then the numbers."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, numbers = json.loads(data[8 : 8 + length]), data[8 + length :]
    if random.random() < 0.2:
        path.write_bytes(int(random.integers(0, 2**63)).to_bytes(8, "little") + data[8:])
        return
    name = pick(random, sorted(set(header) - {"__metadata__"}))
    if random.random() < 0.5:
        header[name] = damaged_json(random, header[name])
    else:
        header[name]["data_offsets"] = [int(at) for at in random.integers(-8, len(numbers) + 9, 2)]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + numbers)


def compare(network: LoopedMoE, data: bytes) -> None:
    """The network's weights are those of the file, read here by its offsets."""
    length = int.from_bytes(data[:8], "little")
    header, numbers = json.loads(data[8 : 8 + length]), data[8 + length :]
    for name, weight in network.stored_weights().items():
        start, stop = header[name]["data_offsets"]
        assert header[name]["shape"] == list(weight.shape)
        assert (header[name]["dtype"], stop - start) == ("F32", 4 * math.prod(weight.shape))
        stored = np.frombuffer(numbers[start:stop], "<f4").reshape(weight.shape)
        assert np.isfinite(stored).all()
        assert np.array_equal(weight.detach().numpy(), stored)
