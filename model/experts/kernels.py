"""The Triton kernels of the expert layer; `model.experts.triton_backend` launches them.

Rows R are slots grouped by expert; a tile is up to BLOCK_ROWS rows of one expert, listed in a table that
`tile_table` writes on the device, so that no count ever travels to the host. Every sum has a fixed order and no
kernel uses atomics: two calls agree to the bit. Row and expert numbers are widened to 64 bits before they are
multiplied by a stride. Products accumulate in ACCUMULATE (float32; float64 for gradient checks).

A kernel's shapes (WIDTH, EXPERT_WIDTH, TOP_K, NUM_EXPERTS) are compile-time constants of a model.
"""

import triton
import triton.language as tl


@triton.jit
def _load(pointers: tl.tensor, row_mask: tl.tensor, column_mask: tl.tensor) -> tl.tensor:
    """A block with zeros outside the masks; an unmasked lane would be undefined on a GPU."""
    return tl.load(pointers, mask=row_mask[:, None] & column_mask[None, :], other=0.0)


@triton.jit
def _tile(
    expert_P: tl.tensor, first_P: tl.tensor, stop_P: tl.tensor, BLOCK_ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """This program's tile: whose it is (-1: nobody's), its rows, and which of them it really has."""
    tile = tl.program_id(0)
    rows = tl.load(first_P + tile) + tl.arange(0, BLOCK_ROWS)
    return tl.load(expert_P + tile).to(tl.int64), rows, rows < tl.load(stop_P + tile)


@triton.jit
def _block_columns(WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The columns of this program, and which of them the matrix really has."""
    columns = (tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)).to(tl.int64)
    return columns, columns < WIDTH


@triton.jit
def _product(
    left_pointers: tl.tensor,
    matrix_pointers: tl.tensor,
    row_mask: tl.tensor,
    column_mask: tl.tensor,
    stride_depth: tl.tensor,
    DEPTH: tl.constexpr,
    ACCUMULATE: tl.constexpr,
) -> tl.tensor:
    """Rows of consecutive numbers times columns whose numbers lie `stride_depth` apart, from their first blocks on."""
    BLOCK_DEPTH: tl.constexpr = left_pointers.shape[1]
    depth = tl.arange(0, BLOCK_DEPTH)
    out = tl.zeros((left_pointers.shape[0], matrix_pointers.shape[1]), ACCUMULATE)
    for start in range(0, DEPTH, BLOCK_DEPTH):
        depth_mask = start + depth < DEPTH
        left = _load(left_pointers, row_mask, depth_mask)
        matrix = _load(matrix_pointers, depth_mask, column_mask).to(left.dtype)
        out = tl.dot(left, matrix, out, input_precision="ieee", out_dtype=ACCUMULATE)
        left_pointers += BLOCK_DEPTH
        matrix_pointers += BLOCK_DEPTH * stride_depth
    return out


@triton.jit
def tile_table(
    start_E1: tl.tensor,
    expert_P: tl.tensor,
    first_P: tl.tensor,
    stop_P: tl.tensor,
    num_tiles: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
) -> None:
    """Expert, first row and end of the rows of each tile; expert -1 for the tiles at the end that hold nothing.

    `start_E1` is the first row of each expert and, last, the number of rows.
    """
    tiles = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    experts = tl.arange(0, BLOCK_EXPERTS)
    real = experts < NUM_EXPERTS
    start = tl.load(start_E1 + experts, mask=real, other=0)
    stop = tl.load(start_E1 + experts + 1, mask=real, other=0)
    tiles_of_expert = tl.where(real, (stop - start + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    last_tile = tl.cumsum(tiles_of_expert, 0)  # one past the expert's last tile
    expert = tl.sum((last_tile[None, :] <= tiles[:, None]).to(tl.int32), 1)
    chosen = experts[None, :] == expert[:, None]
    first_tile = tl.sum(tl.where(chosen, (last_tile - tiles_of_expert)[None, :], 0), 1)
    first_row = tl.sum(tl.where(chosen, start[None, :], 0), 1) + (tiles - first_tile) * BLOCK_ROWS
    used = expert < NUM_EXPERTS
    mask = tiles < num_tiles
    tl.store(expert_P + tiles, tl.where(used, expert, -1), mask=mask)
    tl.store(first_P + tiles, tl.where(used, first_row, 0), mask=mask)
    tl.store(stop_P + tiles, tl.sum(tl.where(chosen, stop[None, :], 0), 1), mask=mask)


@triton.jit
def _store_pre(
    pointers: tl.tensor, gate: tl.tensor, value: tl.tensor, mask: tl.tensor, EXPERT_WIDTH: tl.constexpr,
    GATED: tl.constexpr,
) -> None:  # fmt: skip
    """Pre-activations or their gradient: the gate's and, behind them, those that it is multiplied with."""
    tl.store(pointers, gate.to(pointers.dtype.element_ty), mask=mask)
    if GATED:
        tl.store(pointers + EXPERT_WIDTH, value.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def up(
    x_ND: tl.tensor,
    w_in: tl.tensor,
    order_R: tl.tensor,
    expert_P: tl.tensor,
    first_P: tl.tensor,
    stop_P: tl.tensor,
    act_RF: tl.tensor,
    pre_RG: tl.tensor,
    stride_x: tl.tensor,
    stride_expert: tl.tensor,
    stride_out: tl.tensor,
    stride_in: tl.tensor,
    WIDTH: tl.constexpr,
    EXPERT_WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    KEEP_PRE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
) -> None:
    """Gather a tile's tokens, multiply by the expert's gate and up rows, apply SwiGLU (or SiLU)."""
    expert, rows, row_mask = _tile(expert_P, first_P, stop_P, BLOCK_ROWS)
    if expert < 0:
        return
    tokens = tl.load(order_R + rows, mask=row_mask, other=0).to(tl.int64) // TOP_K
    columns, column_mask = _block_columns(EXPERT_WIDTH, BLOCK_COLUMNS)

    # both products at once, so that a token is read once
    depth = tl.arange(0, BLOCK_DEPTH)
    x_pointers = x_ND + tokens[:, None] * stride_x + depth[None, :]
    gate_pointers = w_in + expert * stride_expert + depth[:, None] * stride_in + columns[None, :] * stride_out
    to_up = tl.cast(EXPERT_WIDTH, tl.int64) * stride_out
    gate = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), ACCUMULATE)
    value = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), ACCUMULATE)
    for start in range(0, WIDTH, BLOCK_DEPTH):
        depth_mask = start + depth < WIDTH
        x = _load(x_pointers, row_mask, depth_mask)
        w_gate = _load(gate_pointers, depth_mask, column_mask).to(x.dtype)
        gate = tl.dot(x, w_gate, gate, input_precision="ieee", out_dtype=ACCUMULATE)
        if GATED:
            w_up = _load(gate_pointers + to_up, depth_mask, column_mask).to(x.dtype)
            value = tl.dot(x, w_up, value, input_precision="ieee", out_dtype=ACCUMULATE)
        x_pointers += BLOCK_DEPTH
        gate_pointers += BLOCK_DEPTH * stride_in

    # the activation, and what a backward pass needs
    mask = row_mask[:, None] & column_mask[None, :]
    act = gate / (1 + tl.exp(-gate))
    if GATED:
        act = act * value
    tl.store(act_RF + rows[:, None] * EXPERT_WIDTH + columns[None, :], act.to(act_RF.dtype.element_ty), mask=mask)
    if KEEP_PRE:
        PRE_WIDTH: tl.constexpr = 2 * EXPERT_WIDTH if GATED else EXPERT_WIDTH
        pre_pointers = pre_RG + rows[:, None] * PRE_WIDTH + columns[None, :]
        _store_pre(pre_pointers, gate, value, mask, EXPERT_WIDTH, GATED)


@triton.jit
def rows_to_slots(
    left_RC: tl.tensor,
    matrices: tl.tensor,
    expert_weights_NK: tl.tensor,
    order_R: tl.tensor,
    expert_P: tl.tensor,
    first_P: tl.tensor,
    stop_P: tl.tensor,
    slot_NKD: tl.tensor,
    stride_expert: tl.tensor,
    stride_out: tl.tensor,
    stride_in: tl.tensor,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
) -> None:
    """Multiply a tile's rows by the expert's matrix and store each at its slot, times its weight if WEIGHTED.

    The down product of the forward, and the gradient of the gathered inputs.
    """
    expert, rows, row_mask = _tile(expert_P, first_P, stop_P, BLOCK_ROWS)
    if expert < 0:
        return
    slots = tl.load(order_R + rows, mask=row_mask, other=0).to(tl.int64)
    columns, column_mask = _block_columns(WIDTH, BLOCK_COLUMNS)
    depth = tl.arange(0, BLOCK_DEPTH)

    # the product
    left_pointers = left_RC + rows[:, None] * DEPTH + depth[None, :]
    matrix_pointers = matrices + expert * stride_expert + depth[:, None] * stride_in + columns[None, :] * stride_out
    out = _product(left_pointers, matrix_pointers, row_mask, column_mask, stride_in, DEPTH, ACCUMULATE)

    # each row to its slot
    if WEIGHTED:
        weight = tl.load(expert_weights_NK + slots, mask=row_mask, other=0.0).to(ACCUMULATE)
        out = out * weight[:, None]
    mask = row_mask[:, None] & column_mask[None, :]
    tl.store(slot_NKD + slots[:, None] * WIDTH + columns[None, :], out.to(slot_NKD.dtype.element_ty), mask=mask)


@triton.jit
def combine(
    slot_NKD: tl.tensor,
    out_ND: tl.tensor,
    num_tokens: tl.tensor,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """The sum of each token's slots, in the order of its choices."""
    tokens = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    columns = (tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)).to(tl.int64)
    token_mask, column_mask = tokens < num_tokens, columns < WIDTH
    pointers = slot_NKD + tokens[:, None] * (TOP_K * WIDTH) + columns[None, :]
    total = _load(pointers, token_mask, column_mask).to(ACCUMULATE)
    for choice in range(1, TOP_K):
        total += _load(pointers + choice * WIDTH, token_mask, column_mask).to(ACCUMULATE)
    mask = token_mask[:, None] & column_mask[None, :]
    tl.store(out_ND + tokens[:, None] * WIDTH + columns[None, :], total.to(out_ND.dtype.element_ty), mask=mask)


@triton.jit
def _activation(
    pre_pointers: tl.tensor, mask: tl.tensor, EXPERT_WIDTH: tl.constexpr, GATED: tl.constexpr, ACCUMULATE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """SiLU of the gate's pre-activations, its slope, and what it is multiplied by (of no meaning without a gate)."""
    gate = tl.load(pre_pointers, mask=mask, other=0.0).to(ACCUMULATE)
    sigmoid = 1 / (1 + tl.exp(-gate))
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    value = tl.load(pre_pointers + EXPERT_WIDTH, mask=mask, other=0.0).to(ACCUMULATE) if GATED else gate
    return gate * sigmoid, slope, value


@triton.jit
def activation_gradient(
    d_out_MD: tl.tensor,
    w_out: tl.tensor,
    pre_RG: tl.tensor,
    expert_weights_NK: tl.tensor,
    order_R: tl.tensor,
    expert_P: tl.tensor,
    first_P: tl.tensor,
    stop_P: tl.tensor,
    d_pre_RG: tl.tensor,
    weighted_act_RF: tl.tensor,
    d_weight_NKC: tl.tensor,
    stride_d_out: tl.tensor,
    stride_expert: tl.tensor,
    stride_out: tl.tensor,
    stride_in: tl.tensor,
    WIDTH: tl.constexpr,
    EXPERT_WIDTH: tl.constexpr,
    SLOTS_PER_ROW: tl.constexpr,
    GATED: tl.constexpr,
    KEEP_ACT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
) -> None:
    """Back through the down product and the activation.

    With dA = d_out @ w_out and A the activation: the slot's weight has the gradient <dA, A>, here one partial sum
    for each block of columns; the pre-activations have weight * dA times the activation's slope. Slot s's gradient
    is row s // SLOTS_PER_ROW of `d_out_MD`: K when the K slots were summed, 1 when they were not. KEEP_ACT stores
    weight * A, which the gradient of w_out needs.
    """
    expert, rows, row_mask = _tile(expert_P, first_P, stop_P, BLOCK_ROWS)
    if expert < 0:
        return
    slots = tl.load(order_R + rows, mask=row_mask, other=0).to(tl.int64)
    columns, column_mask = _block_columns(EXPERT_WIDTH, BLOCK_COLUMNS)
    depth = tl.arange(0, BLOCK_DEPTH)

    # dA and A, whose product is the gradient of the slot's weight
    d_out_pointers = d_out_MD + (slots // SLOTS_PER_ROW)[:, None] * stride_d_out + depth[None, :]
    w_pointers = w_out + expert * stride_expert + depth[:, None] * stride_out + columns[None, :] * stride_in
    d_act = _product(d_out_pointers, w_pointers, row_mask, column_mask, stride_out, WIDTH, ACCUMULATE)
    PRE_WIDTH: tl.constexpr = 2 * EXPERT_WIDTH if GATED else EXPERT_WIDTH
    mask = row_mask[:, None] & column_mask[None, :]
    pre_offsets = rows[:, None] * PRE_WIDTH + columns[None, :]
    silu, slope, value = _activation(pre_RG + pre_offsets, mask, EXPERT_WIDTH, GATED, ACCUMULATE)
    act = silu * value if GATED else silu
    NUM_BLOCKS: tl.constexpr = (EXPERT_WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    tl.store(d_weight_NKC + slots * NUM_BLOCKS + tl.program_id(1), tl.sum(d_act * act, 1), mask=row_mask)

    # through the activation
    weight = tl.load(expert_weights_NK + slots, mask=row_mask, other=0.0).to(ACCUMULATE)[:, None]
    d_act = d_act * weight
    d_gate = d_act * value * slope if GATED else d_act * slope
    _store_pre(d_pre_RG + pre_offsets, d_gate, d_act * silu, mask, EXPERT_WIDTH, GATED)
    if KEEP_ACT:
        act_pointers = weighted_act_RF + rows[:, None] * EXPERT_WIDTH + columns[None, :]
        tl.store(act_pointers, (act * weight).to(weighted_act_RF.dtype.element_ty), mask=mask)


@triton.jit
def weight_gradient(
    left: tl.tensor,
    right: tl.tensor,
    order_R: tl.tensor,
    start_E1: tl.tensor,
    gradient_EMN: tl.tensor,
    stride_left: tl.tensor,
    stride_right: tl.tensor,
    NUM_LEFT: tl.constexpr,
    NUM_RIGHT: tl.constexpr,
    SLOTS_PER_LEFT: tl.constexpr,
    SLOTS_PER_RIGHT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_LEFT: tl.constexpr,
    BLOCK_RIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    """gradient[e] = left.T @ right over the expert's rows, one after the other; zero for an expert without rows.

    SLOTS_PER_* = 0: the matrix is in row order; otherwise slot s reads its row s // SLOTS_PER_*.
    """
    expert = tl.program_id(0).to(tl.int64)
    first, stop = tl.load(start_E1 + expert), tl.load(start_E1 + expert + 1)
    lefts = tl.program_id(1) * BLOCK_LEFT + tl.arange(0, BLOCK_LEFT)
    rights = tl.program_id(2) * BLOCK_RIGHT + tl.arange(0, BLOCK_RIGHT)
    left_mask, right_mask = lefts < NUM_LEFT, rights < NUM_RIGHT

    # the expert's rows, a block of them at a time
    total = tl.zeros((BLOCK_LEFT, BLOCK_RIGHT), ACCUMULATE)
    for start in range(first, stop, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        row_mask = rows < stop
        slots = tl.load(order_R + rows, mask=row_mask, other=0).to(tl.int64)
        left_rows = rows if SLOTS_PER_LEFT == 0 else slots // SLOTS_PER_LEFT
        right_rows = rows if SLOTS_PER_RIGHT == 0 else slots // SLOTS_PER_RIGHT
        left_part = _load(left + left_rows[None, :] * stride_left + lefts[:, None], left_mask, row_mask)
        right_part = _load(right + right_rows[:, None] * stride_right + rights[None, :], row_mask, right_mask)
        total = tl.dot(left_part, right_part, total, input_precision="ieee", out_dtype=ACCUMULATE)

    mask = left_mask[:, None] & right_mask[None, :]
    pointers = gradient_EMN + (expert * NUM_LEFT + lefts[:, None]) * NUM_RIGHT + rights[None, :]
    tl.store(pointers, total.to(gradient_EMN.dtype.element_ty), mask=mask)
