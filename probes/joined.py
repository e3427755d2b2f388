"""Do two probes go together, sample by sample: are the episodes in which visit 2 leaves the sink the ones it answers?

    python -m probes.joined --x attention_sink:start_mass --y dyck_icl:exact_match

Both probes measure the same samples. Each of their headline numbers that begins with the named words, changes from
visit to visit included, is averaged within a document, then compared over documents.

    rank correlation     Spearman's
    difference of means  mean of x over documents where y is 1, less the mean where it is 0, where y is yes or no

Null: the documents of y shuffled. `shuffled_95` is the size that 95% of shuffles stay below, and the note says how
often a shuffle is as large as what was measured.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from probes.running import catalog, command
from probes.running.command import Measured, Run
from probes.running.probe import Probe, Result, is_choosing
from probes.running.source import sample_sets
from probes.statistics.bootstrap import weights
from probes.statistics.grid import Place
from probes.statistics.quantities import Quantity, table
from probes.statistics.rank_correlation import difference_of_means, rank_correlation
from smelt_interp.data.datasets import DataOptions
from smelt_interp.errors import UserError
from smelt_interp.sites import nearest
from smelt_interp.validation import Seed, validated

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

TITLE = "Two probes together"
DATA = DataOptions(data=("dyck",), samples=256)
ABOUT = ("sample", "document", "domain")
"""Columns of numbers by sample that are none."""
Numbers = NDArray[np.float64]
Statistic = Callable[[Numbers, Numbers, Numbers], Numbers]


@validated
class Options:
    """Which numbers are compared."""

    x: str = "attention_sink:start_mass"
    """PROBE:QUANTITY, a number by sample of a probe: its first words, joined by `_`; more words name fewer numbers."""
    y: str = "dyck_icl:exact_match"
    """The same of another, or the same, probe."""
    shuffles: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """Shuffles of the documents behind the null."""
    resample_seed: Seed = 0
    """Seed of the bootstrap and of shuffles."""

    def __post_init__(self) -> None:
        for name, value in (("x", self.x), ("y", self.y)):
            probe, colon, quantity = value.partition(":")
            if not (probe and colon and quantity):
                raise UserError(f"{name} must be PROBE:QUANTITY, such as attention_sink:start_mass; got {value!r}")
            if is_choosing(catalog.load(probe)):
                raise UserError(f"{name} must be of a probe that measures the samples it is given; got {probe}")


def slug(words: str) -> str:
    """`start_mass_looped_3_6_visit_1`: the name of a number as an option takes it."""
    return "_".join("".join(c if c.isalnum() else " " for c in words.lower()).split())


def chosen_columns(result: Result, asked: str) -> list[str]:
    """The numbers by sample that `PROBE:QUANTITY` means. Raises UserError with the quantities that there are."""
    assert result.by_sample is not None  # asked for by `measure`
    columns = {name: slug(name) for name in result.by_sample.columns if name not in ABOUT}
    _, _, quantity = asked.partition(":")
    if found := [name for name, each in columns.items() if f"{each}_".startswith(f"{slug(quantity)}_")]:
        return found
    known = [name for name in quantity_names(result) if any(each.startswith(f"{name}_") for each in columns.values())]
    raise _unknown(asked, known)


def quantity_names(result: Result) -> list[str]:
    """Of all quantities of a result."""
    return [slug(name) for name in result.table["quantity"].unique()]


def check_quantity(result: Result, asked: str) -> None:
    """Raise UserError where no quantity begins with what `PROBE:QUANTITY` names, nor the other way round."""
    names, wanted = quantity_names(result), f"{slug(asked.partition(':')[2])}_"
    if not any(f"{name}_".startswith(wanted) or wanted.startswith(f"{name}_") for name in names):
        raise _unknown(asked, names)


def _unknown(asked: str, known: list[str]) -> UserError:
    probe, _, quantity = asked.partition(":")
    return UserError(f"a quantity by sample of {probe} must be one of {', '.join(known) or 'none'}; "
                     f"got {quantity!r}{nearest(slug(quantity), known)}")  # fmt: skip


def layers_alone(name: str) -> str:
    """`start mass, layers 3-6, visit 1`: a number's name, the same in a network that does not loop these layers."""
    return re.sub(r", (?:looped|middle|all) (?=\d)", ", layers ", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedValues:
    """Two numbers of the documents that have both."""

    x_name: str
    y_name: str
    x_D: Numbers
    y_D: Numbers
    document_D: NDArray[np.int64]


def pairs(x: Result, y: Result, options: Options) -> list[PairedValues]:
    """Every number of the one with every number of the other, averaged within documents."""
    assert x.by_sample is not None  # asked for by `measure`
    assert y.by_sample is not None
    # Names that are on both sides are the same number.
    frame: DataFrame = x.by_sample.merge(y.by_sample, on=list(ABOUT), suffixes=("", " (y)"))
    found = []
    for x_name in chosen_columns(x, options.x):
        for y_name in chosen_columns(y, options.y):
            y_column = f"{y_name} (y)" if y_name in x.by_sample.columns else y_name
            known = frame[frame[x_name].notna() & frame[y_column].notna()]
            means = known.groupby("document")[[x_name, y_column]].mean()
            found.append(
                PairedValues(
                    x_name=layers_alone(x_name),
                    y_name=layers_alone(y_name),
                    x_D=means[x_name].to_numpy(np.float64),
                    y_D=means[y_column].to_numpy(np.float64),
                    document_D=means.index.to_numpy(np.int64),
                )
            )
    return found


def compare(name: str, statistic: Statistic, pair: PairedValues, options: Options) -> Quantity:
    """A statistic of a pair with its resamples, beside what shuffled documents give."""
    n = len(pair.document_D)
    places = [Place("headline", {"x": pair.x_name, "y": pair.y_name}, [0], [])]
    constant = [side for side, values in (("x", pair.x_D), ("y", pair.y_D)) if not n or (values == values[0]).all()]
    if constant:
        why = f"{constant[0]} is the same in all of {n} documents"
        return Quantity(name=name, value_RLH=np.full((1, 1, 1), np.nan), places=places, n=n, undefined=why,
                        nulls={"shuffled_95": None})  # fmt: skip
    value_R = statistic(pair.x_D, pair.y_D, weights(options.resample_seed, pair.document_D))
    generator, alone = np.random.default_rng(options.resample_seed), np.ones((1, n))
    shuffled_S = np.array(
        [statistic(pair.x_D, generator.permutation(pair.y_D), alone)[0] for _ in range(options.shuffles)]
    )
    # The order that was measured counts as one of them.
    as_large = (1 + int((np.abs(shuffled_S) >= abs(value_R[0]) - 1e-12).sum())) / (1 + options.shuffles)
    return Quantity(
        name=name, value_RLH=value_R[:, None, None], places=places, n=n, note=lambda place: f"p {as_large:.2g}",
        nulls={"shuffled_95": float(np.quantile(np.abs(shuffled_S), 0.95))},
    )  # fmt: skip


def join(x: Result, y: Result, options: Options) -> Result:
    """How the numbers of two probes on the same samples go together."""
    every = pairs(x, y, options)
    quantities = [compare("rank correlation", rank_correlation, pair, options) for pair in every]
    quantities += [compare("difference of means", difference_of_means, pair, options) for pair in every
                   if np.isin(pair.y_D, (0, 1)).all()]  # fmt: skip
    return Result(table=table(quantities), samples=x.samples, documents=x.documents, tokens=x.tokens, by_sample=None,
                  draw=partial(figures, every))  # fmt: skip


def figures(every: Sequence[PairedValues]) -> "dict[str, Figure]":
    """A point a document; one pair of numbers is shown at first."""
    from plotly.graph_objects import Figure, Scatter

    drawn: Figure = Figure()
    for index, pair in enumerate(every):
        drawn.add_trace(Scatter(x=pair.x_D, y=pair.y_D, mode="markers", name=f"{pair.x_name} | {pair.y_name}",
                                visible=True if index == 0 else "legendonly"))  # fmt: skip
    drawn.update_layout(title=TITLE, xaxis_title="x", yaxis_title="y", height=520)
    return {"documents": drawn}


def measure(name: str, probe: Probe, asked: Run[object]) -> tuple[Measured, ...]:
    """Both probes on every set of samples in one pass a network, and what they say together."""
    options = cast("Options", asked.measure)
    subjects = command.open_asked(probe, asked)
    names = [side.partition(":")[0] for side in (options.x, options.y)]
    probes = {each: (catalog.load(each), catalog.load(each).Options()) for each in names}
    measured = []
    for data in sample_sets(subjects[0], asked.data):
        # Names are known from rows: those of the first batch, so that a misspelt one does not cost a whole pass.
        first = replace(subjects[0], batches=lambda of, sites: islice(subjects[0].batches(of, sites), 1))
        known = command.measure_set(probes, data, [first])
        for side in (options.x, options.y):
            for result in known[side.partition(":")[0]].results:
                check_quantity(result, side)
        found = command.measure_set(probes, data, subjects, by_sample=True)
        x, y = (dict(zip((subject.name for subject in found[each].subjects), found[each].results, strict=True))
                for each in names)  # fmt: skip
        both = tuple(subject for subject in subjects if subject.name in x and subject.name in y)
        results = tuple(join(x[subject.name], y[subject.name], options) for subject in both)
        left_out = tuple(dict.fromkeys(line for each in names for line in found[each].left_out))
        measured.append(Measured(name=name, probe=probe, options=options, data=data, subjects=both, results=results,
                                 left_out=left_out))  # fmt: skip
    return tuple(measured)


def main() -> None:
    """`python -m probes.joined`."""
    command.main(sys.modules[__name__], measure)


if __name__ == "__main__":
    main()
