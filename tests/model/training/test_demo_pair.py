"""The shipped pair: same tokens, matched budgets, what it learned, and that every way of running it agrees."""

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from model.generate import Sampling, generate
from model.network import LoopedMoE
from model.training.evaluate import SHOTS, dyck_exact_match
from smelt_interp.config import ModelConfig
from smelt_interp.costs.budget import PAPER_TOLERANCE, budget, mismatch
from smelt_interp.costs.presets import DEMO_BASELINE, DEMO_SMELT
from smelt_interp.data.datasets import DataOptions, load_samples
from smelt_interp.data.dyck import DyckOptions, dyck_samples
from smelt_interp.data.dyck_scores import answer_start, exact_match, queries, teacher_forced
from smelt_interp.data.mixture import MixtureOptions
from smelt_interp.data.tokenizer import BYTES
from tests.support.agreement import agreements

CHECKPOINTS = Path(__file__).parents[3] / "checkpoints"
PAIR = {"demo-smelt": DEMO_SMELT, "demo-baseline": DEMO_BASELINE}
NEWLINE = ord("\n")


@cache
def shipped(name: str) -> LoopedMoE:
    return LoopedMoE.from_pretrained(CHECKPOINTS / name)


@cache
def measured(name: str, shots: int) -> float:
    return dyck_exact_match(shipped(name), shots, MixtureOptions(), 256)


def figure(name: str, pattern: str) -> str:
    found = re.search(pattern, (CHECKPOINTS / name / "README.md").read_text(encoding="utf-8"))
    assert found, (name, pattern)
    return found[1]


@pytest.mark.parametrize("name", PAIR)
def test_a_checkpoint_is_its_preset_and_small(name: str) -> None:
    assert shipped(name).config == PAIR[name]
    assert sum(file.stat().st_size for file in (CHECKPOINTS / name).iterdir()) < 8_000_000


def test_both_read_the_same_tokens_in_the_same_order() -> None:
    digests = {figure(name, r"token order: `([0-9a-f]{64})`") for name in PAIR}
    tokens = {int(figure(name, r"tokens: ([\d,]+) in").replace(",", "")) for name in PAIR}
    assert len(digests) == len(tokens) == 1
    assert tokens.pop() >= 10_000_000


@pytest.mark.parametrize("name", PAIR)
def test_the_readme_says_what_the_run_wrote(name: str) -> None:
    last = json.loads((CHECKPOINTS / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    run = json.loads((CHECKPOINTS / name / "run.json").read_text(encoding="utf-8"))
    assert last["step"] == run["options"]["steps"]
    assert f"{last['tokens']:,}" == figure(name, r"tokens: ([\d,]+) in")
    assert ModelConfig.from_json(run["config"]) == PAIR[name]
    for corpus in run["corpora"]:
        assert corpus["digest"] == figure(name, rf"\| {corpus['domain']} \| .*`([0-9a-f]{{64}})`")


@pytest.mark.parametrize("name", PAIR)
def test_the_readme_curve_is_the_networks(name: str) -> None:
    for shots in SHOTS:
        written = float(figure(name, rf"\| {shots} \| (0\.\d+|1\.000) \|"))
        assert measured(name, shots) == pytest.approx(written, abs=0.01)


def test_the_looped_network_reads_the_pairing_from_its_demonstrations() -> None:
    none, eight = (measured("demo-smelt", shots) for shots in (0, 8))
    assert eight >= 0.9
    assert eight - none >= 0.5


def test_the_pair_is_matched_on_three_budgets() -> None:
    assert mismatch(budget(DEMO_SMELT), budget(DEMO_BASELINE)).within(PAPER_TOLERANCE)


@pytest.mark.parametrize("name", PAIR)
@pytest.mark.parametrize("data", ["dyck", "code"])
def test_every_way_of_computing_agrees(name: str, data: str) -> None:
    """At most 2e-6 of the largest |logit| with the first run's routing replayed."""
    samples = load_samples(DataOptions(data=(data,), samples=4), shipped(name).config.context, BYTES)
    for agreement in agreements(shipped(name), samples):
        print(name, data, agreement)
        assert agreement.replayed <= 2e-6, agreement
        assert agreement.rerouted <= agreement.routed // 1000, agreement


@torch.no_grad()
def test_exact_match_from_one_pass_is_exact_match_of_generation() -> None:
    network = shipped("demo-smelt")
    samples = dyck_samples(DyckOptions(shots=(2,)), 48, seed=5, length=160, tokenizer=BYTES)
    argmax_NT = network(torch.from_numpy(samples.ids_NT).long()).argmax(-1).numpy()
    prompts = [ids_T[:start].tolist() for ids_T, start in zip(samples.ids_NT, answer_start(samples), strict=True)]
    made = generate(network, prompts, Sampling(max_new_tokens=12, stop_token=NEWLINE))
    texts = [BYTES.decode(np.array(tokens)) for tokens in made]
    generated = [exact_match(text, query, "compact") for text, query in zip(texts, queries(samples), strict=True)]
    from_one_pass = teacher_forced(samples, argmax_NT, newline=True).tolist()
    assert generated == from_one_pass
    assert 0 < sum(generated) < len(generated)
