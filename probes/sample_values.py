"""What is known of each sample and of each of its tokens: columns of a table, and numbers that colour a text."""

from collections.abc import Sequence
from colorsys import hls_to_rgb
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, Series

from cache.store import Capture
from probes.running import catalog
from probes.running.probe import is_reading, refusal, run
from probes.statistics.arrays import ratio, to_numpy
from probes.statistics.experts import INDICES, WEIGHTS
from probes.statistics.token_loss import token_losses
from smelt_interp.data.dyck_scores import answer_loss, teacher_forced
from smelt_interp.errors import UserError
from smelt_interp.plan import label

PATTERN, PRE, POST = "attn.hook_pattern", "hook_resid_pre", "hook_resid_post"
Colouring = Literal["loss", "start mass", "expert", "cosine", "update ratio"]
"""loss: of the token itself, in nats. start mass: of the query, mean of heads. expert: the one of the largest weight.
cosine and update ratio: what the layer adds to the token on its last visit against its first."""
SITES_OF: dict[Colouring, tuple[str, ...]] = {
    "loss": (), "start mass": (PATTERN,), "expert": (INDICES, WEIGHTS), "cosine": (PRE, POST),
    "update ratio": (PRE, POST),
}  # fmt: skip
Shown = Literal["all", "right", "wrong"]
SHOWN: tuple[Shown, ...] = get_args(Shown)


# Samples


def sample_frame(capture: Capture, measured: str = "") -> DataFrame:
    """A row a sample, in the order of the capture, numbered from 1: what it is, its loss, whether its answer is right,
    and with `measured`, the name of a probe, that probe's numbers for it.

    Right: every token of a Dyck answer, its newline too, is the most likely one. Raises UserError as the probe does.
    """
    parts = []
    for batch in capture.batches(()):
        samples, episode_B = batch.samples, batch.samples.episode_N
        loss_BT, predicts_BT = token_losses(batch)
        asks_B = episode_B["shots"] >= 0
        right_B, answer_B = np.full(len(samples), None, object), np.full(len(samples), np.nan)
        if asks_B.any():
            asking = np.flatnonzero(asks_B)
            argmax_BT = to_numpy(batch.argmax_BT)[asking].astype(np.int64)
            right_B[asking] = teacher_forced(samples.rows(asking), argmax_BT, newline=True).astype(object)
            answer_B[asking] = answer_loss(samples.rows(asking), -loss_BT[asking])
        parts.append({
            "id": batch.sample_ids, "domain": np.char.decode(samples.domain_N), "tokens": samples.length_N,
            "shots": _known(episode_B["shots"], asks_B), "depth": _known(episode_B["depth"], asks_B),
            "right": right_B, "loss (nats)": ratio(loss_BT.sum(1), predicts_BT.sum(1)),
            "answer loss (nats)": answer_B,
        })  # fmt: skip
    frame = DataFrame({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    frame.insert(0, "sample", np.arange(1, len(frame) + 1))
    if measured:
        by_id = _by_sample(capture, measured).set_index("sample").drop(columns=["document", "domain"])
        frame = frame.join(by_id, on="id")
    return frame.drop(columns="id").dropna(axis=1, how="all")


def able(capture: Capture) -> list[str]:
    """The probes that can say something of each sample of a capture."""
    found = []
    for name in catalog.NAMES:
        needed = catalog.load(name).needs(capture.architecture)
        if not refusal(needed, capture.architecture) and set(needed) <= set(capture.kept):
            found.append(name)
    return found


def _by_sample(capture: Capture, name: str) -> DataFrame:
    probe = catalog.load(name)
    assert is_reading(probe)
    needed = probe.needs(capture.architecture)
    found = run(capture.batches(needed), {name: (probe, probe.Options())}, by_sample=True)[name].by_sample
    assert found is not None  # asked for
    return found


def _known(values: NDArray[np.generic], known: NDArray[np.bool_]) -> NDArray[np.float64]:
    return np.where(known, values, np.nan).astype(np.float64)


def chosen_samples(
    frame: DataFrame, *, show: Shown = "all", by: str = "sample", descending: bool = False,
    least: float | None = None, most: float | None = None,
) -> DataFrame:  # fmt: skip
    """The rows that are shown, sorted by a column that `least` and `most` bound; those without a number stand last."""
    keep = Series(True, index=frame.index)
    if show != "all":
        keep &= frame["right"].eq(show == "right") if "right" in frame else False
    if least is not None:
        keep &= frame[by] >= least
    if most is not None:
        keep &= frame[by] <= most
    return frame[keep].sort_values(by, ascending=not descending, kind="stable", na_position="last")


# Tokens


class Coloured(NamedTuple):
    """A number a token, and what is said of it."""

    values_T: NDArray[np.float32]
    """NaN where there is none; signed numbers are blue below 0."""
    most: float
    """Of the deepest colour."""
    readings: list[str]
    summary: str
    categories: tuple[str, ...] = ()
    """The colour of each number where numbers are names."""


def colourings(capture: Capture, layer: int) -> tuple[Colouring, ...]:
    """Those whose sites were recorded; the last two need two visits of the layer. `layer` counts from 0."""
    kept, steps = capture.kept, _steps(capture, layer)
    return tuple(
        name for name, sites in SITES_OF.items()
        if all(site in kept and set(steps) & set(kept[site].steps) for site in sites)
        and (name not in ("cosine", "update ratio") or len(_both(capture, steps)) > 1)
    )  # fmt: skip


def coloured(capture: Capture, sample: int, name: Colouring, layer: int, visit: int) -> Coloured:
    """Each token's number. Counts from 0; `visit` says nothing where visits are compared.

    Raises UserError for sites or steps that were not recorded.
    """
    batch = capture.sample(sample)
    length, row = int(batch.samples.length_N[0]), slice(sample, sample + 1)
    start_T = batch.samples.segment_start_NT[0, :length]
    if name == "loss":
        loss_T = np.concatenate([[np.nan], -to_numpy(batch.logprob_BT)[0, : length - 1]])
        loss_T[start_T == np.arange(length)] = np.nan  # nothing before it says what it is
        return _as_coloured(loss_T, float(np.nanmax(loss_T, initial=1e-6)), "loss {:.3f} nats", "loss of each token")
    steps = _steps(capture, layer)
    if name in ("cosine", "update ratio"):
        both = _both(capture, steps)
        if len(both) < 2:
            raise UserError(f"two visits of the layer must be recorded for {name}; got layer {layer + 1}")
        first, last = both[0], both[-1]
        update_TD = [
            to_numpy(capture.read(POST, step, row)[0, :length]) - to_numpy(capture.read(PRE, step, row)[0, :length])
            for step in (first, last)
        ]
        where = f"{label(capture.architecture.steps[last])} against {label(capture.architecture.steps[first])}"
        return _compared(name, update_TD[0], update_TD[1], where)
    step = steps[visit] if visit < len(steps) else -1
    where = label(capture.architecture.steps[step])
    if name == "start mass":
        pattern_QTS = to_numpy(capture.read(PATTERN, step, row)[0, :, :length, :length])
        mass_T = pattern_QTS[:, np.arange(length), start_T].mean(0)
        mass_T[start_T == np.arange(length)] = np.nan  # the first query has no choice
        return _as_coloured(mass_T, 1.0, "start mass {:.4f}", f"start mass of each query, {where}, mean of heads")
    chosen_TK = capture.read(INDICES, step, row)[0, :length].astype(np.int64)
    weight_TK = to_numpy(capture.read(WEIGHTS, step, row)[0, :length])
    first_T = np.take_along_axis(chosen_TK, weight_TK.argmax(-1)[:, None], -1)[:, 0]
    readings = []
    for weights, experts in zip(weight_TK.tolist(), chosen_TK.tolist(), strict=True):
        largest_first = sorted(zip(weights, experts, strict=True), reverse=True)
        readings.append(", ".join(f"expert {expert + 1} ({weight:.2f})" for weight, expert in largest_first))
    colours = tuple(map(_expert_colour, range(capture.architecture.num_experts)))
    return Coloured(first_T.astype(np.float32), 1.0, readings, f"expert of the largest weight, {where}", colours)


def _expert_colour(expert: int) -> str:
    """Hues that differ as far as they can from one number to the next."""
    red, green, blue = hls_to_rgb(expert * 0.618034 % 1, 0.5, 0.65)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _compared(name: str, first_TD: NDArray[np.float64], last_TD: NDArray[np.float64], where: str) -> Coloured:
    norms_T = [np.linalg.norm(update_TD, axis=-1) for update_TD in (first_TD, last_TD)]
    if name == "cosine":
        cosine_T = ratio((first_TD * last_TD).sum(-1), norms_T[0] * norms_T[1])
        return _as_coloured(cosine_T, 1.0, "cosine {:.3f}", f"cosine of the layer's two updates, {where}")
    ratio_T = ratio(norms_T[1], norms_T[0])
    doubled_T = np.log2(ratio_T, out=np.full(ratio_T.shape, np.nan), where=ratio_T > 0)
    drawn = _as_coloured(doubled_T, max(float(np.nanmax(np.abs(doubled_T), initial=0)), 1e-6), "", "")
    readings = [f"update ratio {each:.3f}" for each in ratio_T]
    return drawn._replace(readings=readings, summary=f"norm of the layer's update, {where}; white is the same")


def _as_coloured(values_T: NDArray[np.float64], most: float, reading: str, summary: str) -> Coloured:
    readings = [reading.format(x) if np.isfinite(x) else "no number" for x in values_T]
    return Coloured(values_T.astype(np.float32), most, readings, f"{summary}; deepest at {most:.3g}")


def _steps(capture: Capture, layer: int) -> list[int]:
    return [index for index, step in enumerate(capture.architecture.steps) if step.layer == layer]


def _both(capture: Capture, steps: Sequence[int]) -> list[int]:
    """Those of the steps on which the residual stream was recorded around the layer."""
    kept = [set(capture.kept[site].steps) if site in capture.kept else set() for site in (PRE, POST)]
    return [step for step in steps if step in kept[0] & kept[1]]
