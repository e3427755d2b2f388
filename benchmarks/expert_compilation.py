"""Compile every configuration of the expert kernels for GPUs that are not there, and report what each needs.

`python -m benchmarks.expert_compilation` prints the table of registers, spills and shared memory of
`docs/kernels.md`. No GPU is used: Triton generates the code, and the ptxas that it ships says what the code needs.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from model.experts import kernels
from model.experts.tiles import (
    COMBINE_COLUMNS,
    COMBINE_TOKENS,
    FP_FUSION,
    FULL_PRECISION,
    HALF_PRECISION,
    TABLE_TILES,
    Tile,
    Tiles,
)

WIDTH, EXPERT_WIDTH, NUM_EXPERTS, TOP_K = 1056, 352, 288, 8
"""The paper's 200M looped shape."""

SHARED_MEMORY_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes a block may have, by compute capability (A100, H100/H200, B200)."""

_INTEGERS = {"order_R", "start_E1", "expert_P", "first_P", "stop_P"}
_POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64"}


class Configuration(NamedTuple):
    """One kernel with everything that fixes its code, but for the GPU."""

    name: str
    kernel: triton.JITFunction
    dtype: torch.dtype
    tile: Tile
    constants: dict[str, object]
    unit_stride: str


class Needs(NamedTuple):
    """What a compiled kernel takes of a GPU."""

    registers: int
    """For each thread."""
    spilled_bytes: int
    shared_bytes: int


def configurations() -> Iterator[Configuration]:
    """Every kernel of every tile table, gated and not, in each type the table serves, once."""
    for dtype in (torch.bfloat16, torch.float16):
        for rows, tiles in HALF_PRECISION.items():
            yield from _products(dtype, tiles, last=rows == max(HALF_PRECISION))
    for dtype in (torch.float32, torch.float64):
        yield from _products(dtype, FULL_PRECISION, last=True)


def _products(dtype: torch.dtype, tiles: Tiles, *, last: bool) -> Iterator[Configuration]:
    """The products of one table; the kernels that all tables share come with the last."""
    accumulate = {"ACCUMULATE": triton.language.float64 if dtype == torch.float64 else triton.language.float32}
    for gated in (True, False):
        common = {"WIDTH": WIDTH, "EXPERT_WIDTH": EXPERT_WIDTH, "GATED": gated, **accumulate}
        name = "" if gated else " ungated"
        yield _rows("up" + name, kernels.up, dtype, tiles.up, {**common, "TOP_K": TOP_K, "KEEP_PRE": True}, "stride_in")
        gradient = {**common, "SLOTS_PER_ROW": TOP_K, "KEEP_ACT": True}
        yield _rows(
            "activation_gradient" + name, kernels.activation_gradient, dtype, tiles.activation_gradient, gradient,
            "stride_in",
        )  # fmt: skip
    for name, depth, unit in (("down", EXPERT_WIDTH, "stride_in"), ("input gradient", 2 * EXPERT_WIDTH, "stride_out")):
        constants = {"DEPTH": depth, "WIDTH": WIDTH, "WEIGHTED": name == "down", **accumulate}
        yield _rows(f"rows_to_slots, {name}", kernels.rows_to_slots, dtype, tiles.rows_to_slots, constants, unit)
    if not last:
        return
    tile = tiles.weight_gradient
    for name, left, right, per_left, per_right in (
        ("w_in", 2 * EXPERT_WIDTH, WIDTH, 0, TOP_K),
        ("w_out", WIDTH, EXPERT_WIDTH, TOP_K, 0),
    ):
        yield Configuration(
            f"weight_gradient, {name}", kernels.weight_gradient, dtype, tile,
            {"NUM_LEFT": left, "NUM_RIGHT": right, "SLOTS_PER_LEFT": per_left, "SLOTS_PER_RIGHT": per_right,
             **accumulate,
             "BLOCK_LEFT": tile.rows, "BLOCK_RIGHT": tile.columns, "BLOCK_ROWS": tile.depth},
            "",
        )  # fmt: skip
    combine = Tile(COMBINE_TOKENS, COMBINE_COLUMNS, 1, 4, 3)
    yield Configuration(
        "combine", kernels.combine, dtype, combine,
        {"WIDTH": WIDTH, "TOP_K": TOP_K, **accumulate, "BLOCK_TOKENS": COMBINE_TOKENS,
         "BLOCK_COLUMNS": COMBINE_COLUMNS},
        "",
    )  # fmt: skip
    if dtype == torch.bfloat16:  # integers alone: the same for every type
        yield Configuration(
            "tile_table", kernels.tile_table, dtype, Tile(TABLE_TILES, 1, 1, 4, 3),
            {"NUM_EXPERTS": NUM_EXPERTS, "BLOCK_EXPERTS": triton.next_power_of_2(NUM_EXPERTS),
             "BLOCK_ROWS": max(HALF_PRECISION), "BLOCK_TILES": TABLE_TILES},
            "",
        )  # fmt: skip


def _rows(
    name: str, kernel: triton.JITFunction, dtype: torch.dtype, tile: Tile, constants: dict[str, object], unit: str
) -> Configuration:
    blocks = {"BLOCK_ROWS": tile.rows, "BLOCK_COLUMNS": tile.columns, "BLOCK_DEPTH": tile.depth}
    return Configuration(name, kernel, dtype, tile, {**constants, **blocks}, unit)


def compile_for(configuration: Configuration, capability: int) -> Needs:
    """Compile as a launch would: pointers and strides divisible by 16, the innermost stride 1."""
    kernel, dtype, tile = configuration.kernel, configuration.dtype, configuration.tile
    element = _POINTERS[dtype]
    signature: dict[str, str] = {}
    constants: dict[tuple[int], object] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for position, name in enumerate(kernel.arg_names):
        if name in configuration.constants or name == configuration.unit_stride:
            signature[name] = "constexpr"
            constants[position,] = configuration.constants.get(name, 1)
            continue
        attributes[position,] = [["tt.divisibility", 16]]
        if name.startswith(("stride", "num_")):
            signature[name] = "i32"
        elif name in _INTEGERS:
            signature[name] = "*i64"
        else:
            full = name in ("expert_weights_NK", "d_weight_NKC") and dtype != torch.float64
            signature[name] = "*fp32" if full else element
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": FP_FUSION},
    )
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(compiled.asm["ptx"])
        source.flush()
        target = re.search(r"\.target (\w+)", compiled.asm["ptx"])
        assert target is not None
        report = subprocess.run(
            [get_ptxas(capability).path, "-v", f"--gpu-name={target[1]}", source.name, "-o", "/dev/null"],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers, spilled = re.search(r"Used (\d+) registers", report), re.search(r"(\d+) bytes spill stores", report)
    assert registers is not None
    assert spilled is not None
    return Needs(int(registers[1]), int(spilled[1]), compiled.metadata.shared)


def main() -> None:
    """Print the table in Markdown: registers / bytes of shared memory, and spilled bytes where there are any."""
    capabilities = sorted(SHARED_MEMORY_LIMIT)
    print("| kernel | type | rows x columns x depth | warps, stages |", *(f"sm_{c} |" for c in capabilities))
    print("|---|---|---|---|" + "---|" * len(capabilities))
    for item in configurations():
        tile, cells = item.tile, []
        for capability in capabilities:
            needs = compile_for(item, capability)
            spill = f", spills {needs.spilled_bytes} B" if needs.spilled_bytes else ""
            cells.append(f"{needs.registers} / {needs.shared_bytes / 1024:.0f} KB{spill}")
        shape = f"{tile.rows} x {tile.columns} x {tile.depth}"
        kind = str(item.dtype).removeprefix("torch.")
        print(f"| {item.name} | {kind} | {shape} | {tile.num_warps}, {tile.num_stages} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
