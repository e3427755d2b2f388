"""SmolLM2-135M, which `make pretrained` makes a folder of: what looping its layers does to the sink."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cache.record import run_batches
from model.families.opening import Opening, open_network
from probes import attention_sink
from probes.running.probe import run
from smelt_interp.costs.spans import LayerRange
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.looped_span import LoopedSpan

FOLDER = Path(__file__).parents[3] / "pretrained" / "smollm2"

pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="pretrained/smollm2 is not there: make pretrained"),
]


@torch.no_grad()
def test_the_sink_leaves_the_second_visit_of_layers_21_to_26_and_the_network_is_transformers_own() -> None:
    """Four texts; other texts gave .585 and .293 with the same span (uniform attention is .017)."""
    span = LoopedSpan(layers=LayerRange(20, 26), visits=2, factor=0.5)
    network = open_network(FOLDER, Opening(loop=span))
    data = DataOptions(data=("code",), samples=4, length=192)
    samples = load_samples(data, network.architecture.context, network.tokenizer)
    assert (samples.ids_NT[:, 0] == network.tokenizer.bos_id).all()
    batches = run_batches(network, samples, attention_sink.needs(network.architecture), batch_size=4)
    asked = {"sink": (attention_sink, attention_sink.Options(t_min=8))}
    table = run(batches, asked, by_sample=True)["sink"].table
    rows = table[(table["level"] == "headline") & (table["quantity"] == "start mass") & (table["head"] == "mean")]
    first, second, change = (rows[rows["visit"].astype(str) == visit].iloc[0] for visit in ("1", "2", "2 - 1"))
    assert first["value"] == pytest.approx(0.6, abs=0.08)
    assert second["value"] == pytest.approx(0.3, abs=0.08)
    assert change["high"] < -0.2
    tokens_BT = torch.from_numpy(samples.ids_NT[:1, :32]).long()
    theirs = AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="eager")
    assert torch.equal(open_network(FOLDER)(tokens_BT), theirs(tokens_BT).logits)
