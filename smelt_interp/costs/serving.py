"""What serving a network costs: rooflines of prefill and decode on a named GPU.

Bytes that one decode step of batch B reads, summed over the steps of the plan: a layer's attention, router and gains
once, its experts as often as tokens touch them, which for uniform routing is

    E (1 - (1 - k / E)^B) distinct experts a step,

and the keys and values of N cached positions for each sequence. FLOPs are `budget`'s at N attended positions. The time
is the longer of bytes / bandwidth and FLOPs / peak; which one it is, is the bound. A prefill of B prompts of N tokens
is one pass over B N tokens: it reads weights once and writes the cache. Embedding and unembedding are left out, as in
the paper's budgets.

Cache models for what a layer's later visit finds in L2 of what its last visit read:

    none    nothing
    l2      everything that is read again, if what one visit of the whole looped span reads fits in L2, else nothing
    ideal   everything that is read again

Attention, router and gains are always read again. Of a token's k experts a share o is chosen again (the paper reports
2 to 3 of 8); each other expert was read if one of the other B - 1 tokens chose it:

    share of expert bytes that is read again = 1 - (1 - o) (1 - k / E)^(B - 1)
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import Field

from smelt_interp.config import ModelConfig
from smelt_interp.costs.budget import budget
from smelt_interp.costs.network_choice import NetworkChoice
from smelt_interp.costs.presets import causal_mean
from smelt_interp.errors import UserError, run_command
from smelt_interp.paper import printed
from smelt_interp.plan import plan
from smelt_interp.sites import nearest
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.tables import Cell, Table, compact, print_json, print_table
from smelt_interp.validation import Share, validated

CacheModel = Literal["none", "l2", "ideal"]

BYTES_PER_WEIGHT = 2
"""bfloat16."""

ROOF_MARGIN = 3.0
"""A roof is drawn this much beyond the outermost passes."""

Rate = Annotated[float, Field(ge=1, le=1e24)]


@validated
class Gpu:
    """Peak rates of one GPU."""

    full_name: str
    memory_bytes: Rate
    memory_bandwidth: Rate
    """Bytes a second."""
    peak_flops: Rate
    """Dense bfloat16 FLOPs a second."""
    l2_bytes: Rate
    source: str


@cache
def gpus() -> dict[str, Gpu]:
    """The shipped GPUs by the name that commands take."""
    table = json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8"))["gpus"]
    found = {}
    for name, values in table.items():
        if "l2_printed_as" in values:
            values["l2_bytes"] = printed.number("systems_200M", "l2_bytes", values.pop("l2_printed_as"))
        found[name] = Gpu(**values)
    return found


def gpu(name: str) -> Gpu:
    """The GPU of this name, or `UserError` with the nearest names."""
    if name not in gpus():
        raise UserError(f"a GPU must be one of {', '.join(gpus())}; got {name!r}{nearest(name, gpus())}")
    return gpus()[name]


@validated
class Load:
    """What is served."""

    batch: Annotated[int, Field(ge=1, le=10**6)] = 1
    """Sequences decoded at once, or prompts prefilled at once."""
    context: Annotated[int, Field(ge=1, le=10**9)] = 4096
    """Tokens in the prompt, and cached positions while decoding."""
    cache: CacheModel = "l2"
    """What a later visit finds in L2: none, l2 (all that it reads again, if one visit's bytes fit), ideal."""
    kept_share: Share = (
        sum(printed.numbers("mechanism", "experts_kept_of_8")) / 2 / printed.number("architecture", "top_k")
    )
    """Share of a token's experts that the next visit chooses again; by default 2.5 of 8, amid the paper's 2 to 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One pass on one GPU."""

    weight_bytes: float
    kv_bytes: float
    flops: float
    intensity: float
    """FLOPs a byte."""
    seconds: float
    bound: Literal["memory", "compute"]

    @property
    def flops_per_second(self) -> float:
        """What the bound leaves: the peak, or less when memory is the slower."""
        return self.flops / self.seconds

    @property
    def milliseconds(self) -> float:
        """As tables and pages give the time."""
        return 1e3 * self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopedBlock:
    """The weights of the looped span."""

    stored_bytes: float
    touched_bytes: float
    """What one visit of the span reads at this batch."""
    stored_fits_l2: bool
    touched_fits_l2: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What one network costs to serve."""

    distinct_experts: float
    """Expected in one step of a decode."""
    reused_share: float
    """Share of a later visit's weight bytes that L2 holds while decoding; 0 without later visits."""
    decode: Roofline
    """One token for each sequence of the batch."""
    prefill: Roofline
    """Every prompt of the batch."""
    looped_block: LoopedBlock
    memory_bytes: float
    """Weights, without embeddings, and the cache of the batch."""
    fits_memory: bool


def distinct_experts(num_experts: int, top_k: int, tokens: int) -> float:
    """Expected experts that at least one of so many tokens chooses, for uniform routing."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def serving(config: ModelConfig, device: Gpu, load: Load) -> Serving:
    """Decode and prefill rooflines of a network on a GPU."""
    decode_counts = budget(config, load.context)
    prefill_counts = budget(config, causal_mean(load.context))
    parameters = decode_counts.parameters
    looped = config.loop_stop - config.loop_start
    experts, dense = _layer_bytes(config)
    distinct = distinct_experts(config.num_experts, config.top_k, load.batch)
    touched = looped * (dense + distinct * experts)
    kv_bytes = decode_counts.kv_bytes * load.batch

    # What decoding reads, and what it would read without reuse: their difference is what L2 saves of later visits.
    decode_weights = _weight_bytes(config, load, load.batch, device)
    without_reuse = _weight_bytes(config, replace(load, cache="none"), load.batch, device)
    later = (len(plan(config)) - config.num_layers) * (dense + distinct * experts)
    prefill_tokens = load.batch * load.context
    stored = looped * (dense + config.num_experts * experts)
    memory = parameters.total * BYTES_PER_WEIGHT + kv_bytes * load.context
    return Serving(
        distinct_experts=distinct,
        reused_share=(without_reuse - decode_weights) / later if later else 0.0,
        decode=_roofline(
            decode_weights, kv_bytes * (load.context + 1), load.batch * decode_counts.flops.forward, device
        ),
        prefill=_roofline(
            _weight_bytes(config, load, prefill_tokens, device),
            kv_bytes * load.context,
            prefill_tokens * prefill_counts.flops.forward,
            device,
        ),
        looped_block=LoopedBlock(
            stored_bytes=stored,
            touched_bytes=touched,
            stored_fits_l2=stored <= device.l2_bytes,
            touched_fits_l2=touched <= device.l2_bytes,
        ),
        memory_bytes=memory,
        fits_memory=memory <= device.memory_bytes,
    )


def _layer_bytes(config: ModelConfig) -> tuple[float, float]:
    """Bytes of one expert, and of a layer's attention, router and gains."""
    parameters = budget(config).parameters
    expert = parameters.experts / config.num_layers / config.num_experts
    # The final norm's gain belongs to no layer.
    dense = (parameters.total - parameters.experts - config.width) / config.num_layers
    return expert * BYTES_PER_WEIGHT, dense * BYTES_PER_WEIGHT


def _weight_bytes(config: ModelConfig, load: Load, tokens: int, device: Gpu) -> float:
    """Weight bytes that one pass over so many tokens reads from memory."""
    experts, dense = _layer_bytes(config)
    distinct = distinct_experts(config.num_experts, config.top_k, tokens)
    span = (config.loop_stop - config.loop_start) * (dense + distinct * experts)
    reuse = load.cache == "ideal" or (load.cache == "l2" and span <= device.l2_bytes)
    read_again = 1 - (1 - load.kept_share) * (1 - config.top_k / config.num_experts) ** (tokens - 1)
    total: float = config.width * BYTES_PER_WEIGHT  # the final norm's gain
    for step in plan(config):
        later = step.visit > 0 and reuse
        total += distinct * experts * (1 - read_again) if later else dense + distinct * experts
    return total


def _roofline(weight_bytes: float, kv_bytes: float, flops: float, device: Gpu) -> Roofline:
    moved = weight_bytes + kv_bytes
    memory_seconds, compute_seconds = moved / device.memory_bandwidth, flops / device.peak_flops
    return Roofline(
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        flops=flops,
        intensity=flops / moved,
        seconds=max(memory_seconds, compute_seconds),
        bound="memory" if memory_seconds >= compute_seconds else "compute",
    )


@validated
class ServingOptions(NetworkChoice):
    """Put two networks side by side on one GPU."""

    load: tyro.conf.OmitArgPrefixes[Load] = Load()

    gpu: str = "h100"
    """h100, h200, b200, a100, l4 or rtx4090."""
    memory_bandwidth: Rate | Literal["table"] = "table"
    """Bytes a second; table: the GPU's."""
    peak_flops: Rate | Literal["table"] = "table"
    """Dense FLOPs a second; table: the GPU's."""
    l2_bytes: Rate | Literal["table"] = "table"
    """Bytes of L2; table: the GPU's."""
    memory_bytes: Rate | Literal["table"] = "table"
    """Bytes of memory; table: the GPU's."""
    json: bool = False
    """Print JSON."""

    def device(self) -> Gpu:
        """The named GPU with the user's own numbers in place of the table's."""
        own = {
            name: value
            for name in ("memory_bandwidth", "peak_flops", "l2_bytes", "memory_bytes")
            if (value := getattr(self, name)) != "table"
        }
        named = gpu(self.gpu)
        return replace(named, **own, full_name=f"{named.full_name}, own numbers") if own else named


def figures(found: Serving) -> dict[str, Cell]:
    """What the command shows of a network, in order."""
    return {
        "distinct experts a step": found.distinct_experts,
        "reused share of later visits": found.reused_share,
        "decode weight bytes": found.decode.weight_bytes,
        "decode KV bytes": found.decode.kv_bytes,
        "decode FLOPs": found.decode.flops,
        "decode FLOPs a byte": found.decode.intensity,
        "decode bound": found.decode.bound,
        "time a token, ms": found.decode.milliseconds,
        "prefill weight bytes": found.prefill.weight_bytes,
        "prefill FLOPs": found.prefill.flops,
        "prefill FLOPs a byte": found.prefill.intensity,
        "prefill bound": found.prefill.bound,
        "time to first token, ms": found.prefill.milliseconds,
        "looped block stored bytes": found.looped_block.stored_bytes,
        "looped block bytes a visit": found.looped_block.touched_bytes,
        "stored block fits L2": str(found.looped_block.stored_fits_l2),
        "bytes a visit fit L2": str(found.looped_block.touched_fits_l2),
        "memory bytes": found.memory_bytes,
        "fits memory": str(found.fits_memory),
    }


def main() -> None:
    """Print decode and prefill rooflines of one network or two on a GPU."""
    options = parse(ServingOptions, prog="python -m smelt_interp.costs.serving", description=__doc__)
    found = answers(options)
    if options.json:
        print_json(report(options, found))
    else:
        print_table(table(options, found))


def answers(options: ServingOptions) -> dict[str, Serving]:
    """Each network's costs by its name. Raises `UserError` for networks or a GPU that are not there."""
    return {network.name: serving(network.config, options.device(), options.load) for network in options.networks()}


def report(options: ServingOptions, found: dict[str, Serving]) -> dict[str, object]:
    """The GPU and the costs, as plain values."""
    return {"gpu": asdict(options.device())} | {name: asdict(one) for name, one in found.items()}


def table(options: ServingOptions, found: dict[str, Serving]) -> Table:
    """One line a figure, the ratio of two networks in the last column; the note is the GPU."""
    device, load = options.device(), options.load
    note = (
        f"{device.full_name}: {compact(device.memory_bandwidth)}B/s, {compact(device.peak_flops)}FLOP/s dense bf16, "
        f"{compact(device.peak_flops / device.memory_bandwidth, 4)} FLOPs a byte at the ridge, L2 "
        f"{compact(device.l2_bytes)}B ({device.source})"
    )
    title = f"Serving, batch {load.batch}, context {load.context}, cache {load.cache}"
    return Table.side_by_side(title, {name: figures(one) for name, one in found.items()}, [note])


def roof(device: Gpu, found: Collection[Serving]) -> dict[float, float]:
    """Corners of a GPU's roof, its most FLOPs a second by FLOPs a byte: below every pass, at the ridge, above."""
    ridge = device.peak_flops / device.memory_bandwidth
    intensities = [ridge, *(one.decode.intensity for one in found), *(one.prefill.intensity for one in found)]
    corners = (min(intensities) / ROOF_MARGIN, ridge, max(intensities) * ROOF_MARGIN)
    return {corner: min(device.peak_flops, device.memory_bandwidth * corner) for corner in corners}


if __name__ == "__main__":
    run_command(main)
