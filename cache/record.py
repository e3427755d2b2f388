"""Runs a network and records what its hooks saw: as batches in memory, or as a capture on the disk.

This is the only file of `cache` that runs a model. Batches have one fixed shape, the last one filled up with copies of
its last row, and each is a function of its own rows alone, so a recording that was interrupted gives the same numbers.

    python -m cache.record --ckpt checkpoints/demo-smelt --sites attn.hook_pattern --only-visits 2 --heads 1 3 --out x
    python -m cache.record --ckpt checkpoints/demo-smelt --data dyck --samples 64 --out captures/dyck
    torchrun --nproc-per-node 2 -m cache.record ...        each rank records shards of its own
"""

import hashlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro
from numpy.typing import NDArray
from pydantic import Field

import smelt_interp
from cache.batch import Batch, SiteKey
from cache.layout import SCORES, Compression, Contents, Precision, sample_bytes
from cache.recording import Recording, abandon
from cache.selection import Kept, check_batch_size, head_axis, num_heads, select
from cache.store import Capture, is_unfinished
from smelt_interp.architecture import Architecture
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.samples import Samples
from smelt_interp.errors import UserError, run_command
from smelt_interp.looped_span import OpeningOptions, looped_span
from smelt_interp.plan import label
from smelt_interp.sites import SITES, hook_name
from smelt_interp.terminal.command_line import parse
from smelt_interp.terminal.from_one import Indices
from smelt_interp.terminal.progress import Progress
from smelt_interp.terminal.tables import compact
from smelt_interp.validation import Seed, Threads, validated

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens.hook_points import HookPoint

    from model.families.opening import Opening
    from model.hooks.looped_model import LoopedModel

DEFAULT_SITES = (
    "attn.hook_pattern",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "mlp.hook_router_logits",
    "mlp.hook_expert_indices",
    "mlp.hook_expert_weights",
    "hook_resid_pre",
    "hook_resid_mid",
    "hook_resid_post",
    "hook_attn_out",
    "hook_mlp_out",
)
"""The union of what the shipped probes read."""
SHARD_BYTES = 64 * 2**20
"""That a shard holds before compression, unless one batch is more: it is built in memory, and checked whole before any
of it is read."""
MOST_BATCHES = 64
"""Of a shard, however small they are: what a recording that is stopped loses."""

Watch = Callable[[Contents, int], Callable[[int], None]]


def _nobody(contents: Contents, remaining: int) -> Callable[[int], None]:
    return lambda done: None


def run_batches(
    model: "LoopedModel",
    samples: Samples,
    suffixes: Sequence[str],
    *,
    batch_size: int = 8,
    layers: Sequence[int] = (),
    visits: Sequence[int] = (),
    heads: Sequence[int] = (),
    rows: Sequence[int] = (),
) -> Iterator[Batch]:
    """Batches of a running network, in memory that does not grow with the number of samples.

    The filters count from 0, and an empty one leaves all: `layers`, `visits` and `heads` as in
    `cache.selection.select`; `rows` are positions in `samples`. Arrays are tensors where the network is, half
    precision as float32. Raises UserError for a filter or a site that the network does not have, rows longer than its
    context, tokens outside its vocabulary, numbers that are not finite, and when the network's hooks are no longer
    those under which this was called.
    """
    chosen = _chosen_rows(samples, rows)
    check_batch_size(batch_size)
    kept = select(model.architecture, suffixes, layers=layers, visits=visits, heads=heads)
    run = _Pass(model, samples, kept, batch_size)
    return (run(chosen[first : first + batch_size]) for first in range(0, len(chosen), batch_size))


def record(
    model: "LoopedModel",
    samples: Samples,
    out: Path,
    *,
    suffixes: Sequence[str] = DEFAULT_SITES,
    layers: Sequence[int] = (),
    visits: Sequence[int] = (),
    heads: Sequence[int] = (),
    rows: Sequence[int] = (),
    batch_size: int = 8,
    dtype: Precision = "float16",
    compression: Compression = "gzip",
    shard_bytes: int = SHARD_BYTES,
    source: Mapping[str, object] | None = None,
    command: str = "",
    watch: Watch = _nobody,
    shared: bool = False,
) -> Capture:
    """Record a capture in the folder `out`, going on with finished shards of the same request; filters as in
    `run_batches`.

    source: more facts for the request, as JSON values, e.g. the name of the checkpoint and the data options.
    watch: told what will be recorded and how many batches remain; what it returns is told how many of them are done.
    shared: all ranks record (`model.ranks`), each a part of the missing shards, and the first finishes the capture.
    Raises UserError as `Recording` and `run_batches` do; a full disk raises OSError. Finished shards stay.
    """
    chosen = _chosen_rows(samples, rows)
    check_batch_size(batch_size)
    kept = select(model.architecture, suffixes, layers=layers, visits=visits, heads=heads)
    num_tokens = samples.ids_NT.shape[1]
    # What is asked for; shards are whole batches.
    batch_bytes = batch_size * sample_bytes(model.architecture, kept, num_tokens, dtype)
    contents = Contents(
        architecture=model.architecture,
        samples=samples.rows(chosen),
        sample_ids=chosen,
        sites=kept,
        precision=dtype,
        compression=compression,
        shard_samples=batch_size * min(max(shard_bytes // batch_bytes, 1), MOST_BATCHES),
        source={**(source or {}), **_facts(model, batch_size, num_tokens)},
    )
    # The shards that are missing.
    try:
        _fill(Recording(out, contents, command), contents, _Pass(model, samples, kept, batch_size), watch, shared)
        return Capture(out)
    finally:
        abandon(out)


def _fill(recording: Recording, contents: Contents, run: "_Pass", watch: Watch, shared: bool) -> None:
    """Record the missing shards, of several ranks each a part, and finish the capture."""
    from model import ranks

    rank, num_ranks, wait = (ranks.rank(), ranks.num_ranks(), ranks.wait) if shared else (0, 1, lambda: None)
    every = [] if recording.finished else recording.missing()
    wait()  # until all have seen the same shards missing
    missing, size, done = every[rank::num_ranks], run.batch_size, 0
    tell = watch(contents, sum(-(-len(positions) // size) for positions in missing))

    def batches(positions: range) -> Iterator[Batch]:
        nonlocal done
        for first in range(positions.start, positions.stop, size):
            yield run(contents.sample_ids[first : min(first + size, positions.stop)])
            done += 1
            tell(done)

    for positions in missing:
        recording.add(positions, batches(positions))
    wait()
    if rank == 0:
        recording.finish(every)
    wait()


def _chosen_rows(samples: Samples, rows: Sequence[int]) -> NDArray[np.int64]:
    if outside := [row for row in rows if not 0 <= row < len(samples)]:
        raise UserError(f"rows must be 0 to {len(samples) - 1}; got {outside[0]}")
    return np.array(sorted(set(rows)) or range(len(samples)), np.int64)


class _Pass:
    """A network on samples of one length, in batches of one shape, under the hooks that it has now."""

    def __init__(self, model: "LoopedModel", samples: Samples, kept: Mapping[str, Kept], batch_size: int) -> None:
        self._model, self._samples, self._kept, self.batch_size = model, samples, kept, batch_size
        self._architecture = model.architecture
        self._hooks = _hooks(model)

    def __call__(self, sample_ids: NDArray[np.int64]) -> Batch:
        """The batch of at most `batch_size` rows; a shorter one runs filled up with copies of its last row."""
        import torch

        from model.inputs import sample_inputs

        if _hooks(self._model) != self._hooks:
            raise UserError(
                "batches must be read under the hooks that they were made under; got a network whose hooks have "
                "changed since: read them inside the block that sets the hooks"
            )
        samples, num_rows = self._samples.rows(sample_ids), len(sample_ids)
        filled = samples.rows(np.minimum(np.arange(self.batch_size), num_rows - 1))
        tokens_BT, asked = sample_inputs(filled, self._architecture, self._model.device)
        computed = {SITES[suffix].computed for suffix in self._kept}
        asked["head_results"], asked["expert_results"] = "head_results" in computed, "expert_results" in computed
        cache: dict[str, Tensor] = {}
        copied = bool(self._hooks) or self._model.overwrites  # else nobody writes over what is kept

        def keep(x: "Tensor", hook: "HookPoint") -> None:
            cache[str(hook.name)] = x.clone() if copied else x

        # The pass over all rows; the copies are dropped, and each token's log-probability is that of the next one.
        with torch.no_grad():
            logits_BTW = self._model.run_with_hooks(
                tokens_BT,
                fwd_hooks=[
                    (hook_name(step, suffix), keep) for suffix, (steps, _) in self._kept.items() for step in steps
                ],
                **asked,
            )
            next_BT = tokens_BT.roll(-1, 1)[:num_rows]
            logits_BTW = logits_BTW[:num_rows].float()
            logprob_BT = logits_BTW.log_softmax(-1).gather(-1, next_BT[..., None])[..., 0]
            largest_BT, argmax_BT = logits_BTW.max(-1)
            is_last_BT = np.arange(1, next_BT.shape[1] + 1) >= samples.length_N[:, None]
            sites, bfloat16 = self._sites(cache, num_rows)
            if not (largest_BT.isfinite() & logprob_BT.isfinite()).all():
                raise UserError(_not_finite(cache, self._architecture))
        return Batch(
            architecture=self._architecture,
            samples=samples,
            sample_ids=sample_ids,
            logprob_BT=logprob_BT.masked_fill(torch.from_numpy(is_last_BT).to(tokens_BT.device), 0),
            argmax_BT=argmax_BT.int(),
            sites={**sites},
            heads={suffix: heads for suffix, (_, heads) in self._kept.items() if heads},
            bfloat16=bfloat16,
        )

    def _sites(self, cache: "Mapping[str, Tensor]", num_rows: int) -> "tuple[dict[SiteKey, Tensor], frozenset[str]]":
        """What is kept of a pass, and the suffixes that were in bfloat16."""
        import torch

        sites: dict[SiteKey, Tensor] = {}
        bfloat16 = set()
        for suffix, (steps, heads) in self._kept.items():
            for step in steps:
                values = cache[hook_name(step, suffix)][:num_rows]
                if values.dtype == torch.bfloat16:
                    bfloat16.add(suffix)
                if values.is_floating_point() and values.element_size() < 4:
                    values = values.float()
                if len(heads) < num_heads(suffix, self._architecture):
                    values = values.index_select(head_axis(suffix), torch.tensor(heads, device=values.device))
                sites[step, suffix] = values
        return sites, frozenset(bfloat16)


def _hooks(model: "LoopedModel") -> list[tuple[str, int]]:
    """Every hook that is set now, by the module it is on and its number, which torch gives once."""
    return [
        (name, number)
        for name, module in model.parts()
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
        for number in hooks
    ]


def _not_finite(cache: "Mapping[str, Tensor]", architecture: Architecture) -> str:
    """Where numbers that are not finite arose: the first of the kept sites that the pass computed, or the logits."""
    for name, values in cache.items():
        _, step, suffix = name.split(".", 2)
        wrong = ~values.isfinite() & ~((values == -float("inf")) & (suffix == SCORES))
        if wrong.any():
            where, found = f"{suffix} at {label(architecture.steps[int(step)])}", float(values[wrong][0])
            break
    else:
        where, found = "the logits", float("nan")
    return f"a network's numbers must be finite; got {found} in {where}: look for what its weights or hooks hold there"


def _facts(model: "LoopedModel", batch_size: int, num_tokens: int) -> dict[str, object]:
    """What fixes the numbers beside data and selection."""
    import torch

    from model.experts.expert_layer import backend_for
    from model.experts.tiles import FP_FUSION

    device = model.device
    facts: dict[str, object] = {
        "weights": weights_digest(model),
        "tokenizer": hashlib.sha256(model.tokenizer.to_json().encode()).hexdigest(),
        "batch_shape": [batch_size, num_tokens],
        "device": device.type,
        "experts": {"backend": backend_for(device), "fp_fusion": FP_FUSION},
        "threads": torch.get_num_threads(),
        "versions": {"smelt-interp": smelt_interp.__version__, "torch": torch.__version__, "numpy": np.__version__},
    }
    if hooked := list(model.list_hooks()):  # the numbers are those of the network as its hooks edit it
        facts["hooked"] = hooked
    return facts


def weights_digest(model: "LoopedModel") -> str:
    """SHA-256 over the names, types, shapes and bytes of all weights."""
    import torch

    sha = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        sha.update(f"{name}:{weight.dtype}:{tuple(weight.shape)};".encode())
        sha.update(weight.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


@validated
class RecordOptions(OpeningOptions):
    """What the command records, and where. Layers, visits and heads count from 1, samples from 0; naming none keeps
    all."""

    ckpt: Path
    """Folder of a checkpoint, ours or one of another family that transformers loads."""
    out: Path
    """Folder of the capture."""
    data: Annotated[DataOptions, tyro.conf.arg(name="")]
    sites: tuple[str, ...] | None = None
    """Hook suffixes to keep, maybe none; left out, those that the shipped probes read and the network has."""
    layers: Indices = ()
    only_visits: Indices = ()
    """Visits to keep; --visits says how often a --loop runs."""
    heads: Indices = ()
    """Query heads; of keys and values, the heads that serve them are kept."""
    rows: tuple[Annotated[int, Field(ge=0, le=10**9)], ...] = ()
    """Numbers of the samples to keep."""
    batch_size: Annotated[int, Field(ge=1, le=10**6)] = 8
    """Samples that run together."""
    dtype: Precision = "float16"
    """How floats are stored."""
    compression: Compression = "gzip"
    """Of attention and expert indices: gzip is the smallest, none the quickest."""
    threads: Threads = 1
    """Threads of the network; the last bits depend on it. Small networks gain nothing from more."""
    untrained: bool = False
    """Run a network of the same config with random weights: the null that probes print."""
    untrained_seed: Seed = 0
    """Seed of the random weights."""

    def opening(self) -> "Opening":
        """How the checkpoint is opened."""
        from model.families.opening import Opening

        loop = looped_span(self)
        return Opening(loop=loop, trust_remote_code=self.trust_remote_code, allow_download=self.allow_download)


def record_checkpoint(options: RecordOptions, command: str) -> Capture:
    """Record what the options say, with its size printed first and its progress on the error stream; of several ranks,
    each records a part.

    Raises as `record` does; before a full disk or Ctrl-C ends it, the command to go on is printed.
    """
    import torch  # it and transformer-lens take seconds to import

    from model import ranks
    from model.families.opening import open_network, untrained_network

    torch.set_num_threads(options.threads)
    opening = options.opening()
    if options.untrained:
        model = untrained_network(options.ckpt, options.untrained_seed, opening)
    else:
        model = open_network(options.ckpt, opening)
    sites = options.sites
    if sites is None:
        sites = tuple(suffix for suffix in DEFAULT_SITES if suffix in model.architecture.sites)
    layers, visits, heads = options.layers, options.only_visits, options.heads
    # What is wrong with them is told as they were typed.
    select(model.architecture, sites, layers=layers, visits=visits, heads=heads, told_from=1)
    samples = load_samples(options.data, model.architecture.context, model.tokenizer)
    source: dict[str, object] = {
        "checkpoint": options.ckpt.resolve().name,
        "data": asdict(options.data),
    }
    if (loop := opening.loop) is not None:
        source["loop"] = {"layers": str(loop.layers), "visits": loop.visits, "factor": loop.factor}
    if options.untrained:
        source["untrained_seed"] = options.untrained_seed
    try:
        return record(
            model,
            samples,
            options.out,
            suffixes=sites,
            layers=layers,
            visits=visits,
            heads=heads,
            rows=options.rows,
            batch_size=options.batch_size,
            dtype=options.dtype,
            compression=options.compression,
            source=source,
            command=command,
            watch=partial(_announce, options.out) if ranks.is_first_rank() else _nobody,
            shared=True,
        )
    except (OSError, KeyboardInterrupt):
        if is_unfinished(options.out):
            print(f"finished shards stay in {options.out}; to go on: {command}", file=sys.stderr)
        raise


def _announce(out: Path, contents: Contents, remaining: int) -> Callable[[int], None]:
    if remaining:
        print(
            f"{out}: {len(contents.samples)} samples, {len(contents.sites)} sites, about "
            f"{compact(contents.num_bytes())}B before compression; batches to record: {remaining}"
        )
    else:
        print(f"{out}: recorded before, used as it is")
    return Progress("recorded", remaining, "batch").show


def main() -> None:
    """The command line."""
    options = parse(
        RecordOptions, prog="python -m cache.record", description=__doc__ or "", config=(tyro.conf.FlagCreatePairsOff,)
    )
    from model import ranks  # torch is slow to import, and `--help` needs none

    with ranks.joined():
        capture = record_checkpoint(options, shlex.join(["python", "-m", "cache.record", *sys.argv[1:]]))
        if not ranks.is_first_rank():
            return
    num_bytes = sum(shard.num_bytes for shard in capture.manifest.shards)
    print(f"{capture.path}: {compact(num_bytes)}B, digest {capture.digest}")


if __name__ == "__main__":
    run_command(main)
