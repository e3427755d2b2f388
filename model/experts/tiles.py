"""Block sizes of the Triton kernels, chosen from shapes that the host knows, and what is pinned for all of them."""

from typing import NamedTuple

import torch

FP_FUSION = True
"""Whether a multiplication and an addition may be fused. Pinned, because it changes the last bit of results and
Triton's own default changes between versions."""

COMBINE_TOKENS, COMBINE_COLUMNS = 8, 128
TABLE_TILES = 16


class Tile(NamedTuple):
    """The block of one program, and how many warps and pipeline stages it gets."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """One tile for each matrix product. All but the last share `rows`: they walk the same table of tiles."""

    up: Tile
    rows_to_slots: Tile
    activation_gradient: Tile
    weight_gradient: Tile


_WEIGHT_GRADIENT = Tile(rows=64, columns=128, depth=64, num_warps=8, num_stages=3)
HALF_PRECISION: dict[int, Tiles] = {
    16: Tiles(Tile(16, 64, 64, 4, 3), Tile(16, 64, 64, 4, 3), Tile(16, 64, 64, 4, 3), _WEIGHT_GRADIENT),
    32: Tiles(Tile(32, 64, 64, 4, 3), Tile(32, 64, 64, 4, 3), Tile(32, 64, 64, 4, 3), _WEIGHT_GRADIENT),
    64: Tiles(Tile(64, 64, 64, 4, 3), Tile(64, 128, 32, 4, 3), Tile(64, 64, 64, 8, 3), _WEIGHT_GRADIENT),
    128: Tiles(Tile(128, 64, 64, 8, 3), Tile(128, 128, 32, 8, 3), Tile(128, 64, 64, 8, 3), _WEIGHT_GRADIENT),
}
"""bfloat16 and float16, by rows of a tile. In `weight_gradient`, rows and columns are the gradient's and depth counts
tokens."""

FULL_PRECISION = Tiles(*(Tile(32, 32, 32, 4, 2),) * 4)
"""float32 and float64: products on the ordinary units, so blocks are small whatever the number of tokens."""


def choose(dtype: torch.dtype, num_rows: int, num_experts: int) -> Tiles:
    """By the rows that an expert gets on average."""
    if dtype not in (torch.bfloat16, torch.float16):
        return FULL_PRECISION
    mean_rows = num_rows / num_experts
    return HALF_PRECISION[16 if mean_rows <= 8 else 32 if mean_rows <= 24 else 64 if mean_rows <= 128 else 128]
