"""Every measure along the steps: each network at its own depth, comparisons at the later visit."""

from pathlib import Path

from cache.recording import write_capture
from probes.running import overview
from smelt_interp.architecture import Architecture
from tests.support.app_captures import episodes
from tests.support.planted import BASELINE, LOOPED
from tests.support.planted_captures import planted_capture, random_batch

ARCHITECTURES: dict[str, Architecture] = {"looped": LOOPED.architecture(), "once": BASELINE.architecture()}


def row(layer: int, visit: int | str, value: float, level: str = "layer", **more: object) -> dict[str, object]:
    return {"level": level, "quantity": "experts shared", "layers": str(layer), "visit": visit, "value": value,
            "low": value - 0.1, "high": value + 0.2, **more}  # fmt: skip


def test_each_network_stands_at_its_own_steps_and_comparisons_at_the_later_visit() -> None:
    nulls = {"null_once_at_depth": 0.7, "null_uniform": 0.25}
    rows = [row(3, "1 vs 2", 0.5, **nulls), row(2, "1 vs 2", 0.4, **nulls), row(1, 1, 0.1, **nulls),
            row(2, "1 vs 2", 0.9, level="head", **nulls)]  # fmt: skip
    others = {"once": [row(4, 1, 0.6), row(2, 1, 0.3)], "gone": [row(1, 1, 0.2)]}
    document = {"probe": "expert_overlap", "networks": [{"name": "looped"}, {"name": "once"}, {"name": "gone"}],
                "results": [{"rows": rows, "others": others}]}  # fmt: skip
    (measure,) = overview.measures(document, ARCHITECTURES)
    assert (measure.probe, measure.title, measure.null) == ("expert_overlap", "experts shared", "null_uniform")
    looped, once = measure.lines
    assert looped.steps == [0, 3, 4]  # steps 0 | 1 2 | 3 4 | 5
    assert [each["value"] for each in looped.rows] == [0.1, 0.4, 0.5]
    assert looped.labels == ["layer 1, visit 1", "layer 2, visit 2", "layer 3, visit 2"]
    assert (once.network, once.steps) == ("once", [1, 3])
    drawn = overview.figure([measure, measure], ARCHITECTURES["looped"])
    assert [trace.name for trace in drawn.data] == ["null", "looped", "once"] * 2
    assert [trace.showlegend for trace in drawn.data] == [True] * 3 + [False] * 3
    assert drawn.data[1].customdata[1] == ["expert_overlap", "2"]
    assert drawn.layout.xaxis2.title.text == "layer of looped, in the order of execution"
    # Both visits behind both rows.
    assert [(shape.x0, shape.x1, shape.yref) for shape in drawn.layout.shapes] == [
        (0.5, 2.5, "y domain"), (0.5, 2.5, "y2 domain"), (2.5, 4.5, "y domain"), (2.5, 4.5, "y2 domain"),
    ]  # fmt: skip


def test_a_result_without_numbers_at_steps_gives_no_row() -> None:
    document = {"probe": "expert_overlap", "networks": [{"name": "looped"}],
                "results": [{"rows": [row(2, "1 vs 2", 0.4, level="headline"), row(2, "a vs b", 0.4)]}]}  # fmt: skip
    assert overview.measures(document, ARCHITECTURES) == []


def test_probes_of_recorded_sites_are_drawn_those_with_a_number_at_every_step_first(tmp_path: Path) -> None:
    names = overview.probes(write_capture(tmp_path / "all", [episodes()]))
    assert set(names[: len(overview.FIRST)]) == overview.FIRST
    assert {"expert_load", "expert_overlap", "projection_similarity"} <= set(names)
    assert not {"dyck_icl", "domain_loss"} & set(names)  # of no step
    assert overview.probes(planted_capture(tmp_path / "few", random_batch(suffixes=("hook_resid_post",)))) == [
        "representation_similarity"
    ]
