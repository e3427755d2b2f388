"""What tests of probes ask: one probe's answer, its rows, the sums of parts merged."""

from collections.abc import Iterable, Iterator

from cache.batch import Batch
from probes.running.probe import Probe, Result, accumulate, run


def measure(probe: Probe, batches: Iterable[Batch], options: object = None) -> Result:
    """One probe's answer, with its default options unless others are given."""
    return run(batches, {"probe": (probe, probe.Options() if options is None else options)})["probe"]


def rows_of(probe: Probe, batches: Iterable[Batch], options: object = None) -> list[dict[str, object]]:
    """The rows of that answer."""
    return measure(probe, batches, options).rows()


def merged(probe: Probe, parts: Iterable[Iterator[Batch]]) -> Result:
    """The answer from parts of the samples, each summed by itself and then added up in order."""
    first, *others = (accumulate(part, {"probe": (probe, probe.Options())})["probe"] for part in parts)
    for other in others:
        first.merge(other)
    return probe.result(first)
