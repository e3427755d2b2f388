"""Results that are kept beside a capture: written by the commands, shown by the pages instead of measuring again."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from probes.running import report
from probes.statistics.quantities import rows_of
from smelt_interp.errors import UserError
from smelt_interp.input_files import read_input

MOST_BYTES = 256 * 2**20
"""Of a result."""


def result_path(capture: Path, probe: str, options: object, seen: Sequence[object]) -> Path:
    """PROBE-DIGEST.json in the folder of a capture. The digest is of what was asked of which networks, wherever they
    lie: `options` as the command takes them, and the digest of every network that was measured, in order."""
    asked = json.dumps([probe, options, list(seen)], sort_keys=True)
    return capture / "results" / f"{probe}-{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"


def keep_result(capture: Path, document: Mapping[str, object], text: str) -> str:
    """Write a result beside the capture; a line that says where it is, or that nothing could be written there."""
    networks = document["networks"]
    assert isinstance(networks, list)
    seen = [network.get("digest", network.get("weights")) for network in networks]
    path = result_path(capture, str(document["probe"]), document["options"], seen)
    try:
        report.write_text(path, text)
    except UserError:
        return f"result: not kept, since {path.parent} cannot be written; --out DIR keeps it elsewhere"
    return f"result: {path}"


def stored_result(capture: Path, probe: str, options: object, seen: Sequence[str]) -> dict[str, object] | None:
    """What is kept of that question about captures of these digests; None when nothing is, or something else."""
    path = result_path(capture, probe, options, seen)
    if not path.is_file():
        return None
    try:
        document = json.loads(read_input(path, "a result", MOST_BYTES))
        asked = (document["probe"], document["options"], [network["digest"] for network in document["networks"]])
        whole = True
        for each in document["results"]:
            for rows in (each["rows"], *each.get("others", {}).values()):
                rows_of(rows, "value", "low", "high", "note")
            counted = isinstance(each["documents"], int) and isinstance(each["tokens"], int)
            whole = whole and counted and isinstance(each["data"], str) and isinstance(each["notes"], list)
    except (UserError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # the list of results says what is wrong with it
    return document if whole and asked == (probe, options, list(seen)) else None
