"""Files that leave a page say by name and header what they are of."""

import io
import json

import pandas as pd
import plotly.graph_objects as go

from probes.running import exports

DOCUMENT = {
    "probe": "attention_sink",
    "networks": [{"name": "ours", "digest": "ab12"}, {"name": "theirs", "weights": "cd34"}],
    "options": {"t_min": 1, "heads": [1, 2]},
    "command": "python -m probes.attention_sink --capture x",
}


def test_a_header_names_every_network_with_its_digest_every_option_and_the_command() -> None:
    assert exports.lines(exports.result_facts(DOCUMENT)) == [
        "probe: attention_sink",
        "networks: ours ab12, theirs cd34",
        "t_min: 1",
        "heads: 1, 2",
        "command: python -m probes.attention_sink --capture x",
    ]


def test_a_table_is_read_back_below_its_header() -> None:
    frame = pd.DataFrame({"value": [0.5, 0.25]})
    text = exports.csv_text(frame, {"capture": "two\nlines"})
    assert text.splitlines()[0] == "# capture: two lines"
    assert pd.read_csv(io.StringIO(text), comment="#").equals(frame)


def test_json_holds_the_same_facts() -> None:
    assert json.loads(exports.json_text({"rows": [1]}, {"head": 4, "visits": (1, 2)})) == {
        "of": {"head": 4, "visits": [1, 2]},
        "rows": [1],
    }


def test_a_page_of_figures_needs_nothing_else_and_escapes_its_header() -> None:
    page = exports.html_text([go.Figure(), go.Figure()], "a < b", {"capture": "<script>"})
    assert "<title>a &lt; b</title>\n<pre>capture: &lt;script&gt;</pre>" in page
    assert "cdn.plot.ly" not in page.split("<body>")[-1][-2000:]


def test_a_name_is_one_that_any_system_takes() -> None:
    assert exports.file_name("sink", "a/b c", "", "t_min=1", suffix="csv") == "sink_a-b-c_t_min=1.csv"
