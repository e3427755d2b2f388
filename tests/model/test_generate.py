"""Generation: greedy against full passes, sampling against distributions by hand, batches, stops and hooks."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from model.generate import Sampling, choose, generate
from model.network import LoopedMoE
from smelt_interp.errors import UserError
from tests.support.configs import TINY, VARIANTS
from tests.support.networks import random_tokens, tiny_network

PROMPTS = [[256, 40, 41, 58], [256, 91], [256, 10, 20, 30, 40, 50, 60]]


@torch.no_grad()
def by_full_passes(network: LoopedMoE, prompt: list[int], new_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(network(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "name", ["as the paper", "three visits", "no RoPE", "QK-norm", "QK-norm over all heads", "Baseline"]
)
def test_greedy_is_the_argmax_of_full_passes_for_each_prompt_of_a_batch(name):
    network = tiny_network(VARIANTS[name])
    made = generate(network, PROMPTS, Sampling(max_new_tokens=8))
    assert made == [by_full_passes(network, prompt, 8) for prompt in PROMPTS]
    assert made == [generate(network, [prompt], Sampling(max_new_tokens=8))[0] for prompt in PROMPTS]


def test_sampled_batches_are_reproducible_and_differ_by_seed():
    network = tiny_network()
    made = [generate(network, PROMPTS, Sampling(max_new_tokens=12, temperature=1.5, seed=seed)) for seed in (0, 0, 1)]
    assert made[0] == made[1]
    assert made[0] != made[2]
    assert all(0 <= token < TINY.vocab_size for row in made[0] for token in row)


def test_a_row_ends_after_the_stop_token_and_the_others_go_on():
    network = tiny_network()
    free = generate(network, PROMPTS, Sampling(max_new_tokens=8))
    stop = free[0][2]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert generate(network, PROMPTS, Sampling(max_new_tokens=8, stop_token=stop)) == cut
    assert cut[0] == free[0][:3] != free[0]
    assert generate(network, PROMPTS[:1], Sampling(max_new_tokens=50, stop_token=stop)) == cut[:1]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"temperature": 1.0}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, [p**2 / 0.345 for p in (0.5, 0.25, 0.15, 0.1)]),
        ({"temperature": 1.0, "top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"temperature": 1.0, "top_k": 99}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 1.0, "top_p": 0.7}, [2 / 3, 1 / 3, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.5}, [1, 0, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.01}, [1, 0, 0, 0]),
        ({"temperature": 1.0, "top_p": 1e-300}, [1, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0]),
        ({"temperature": 0.0, "top_k": 2}, [1, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_from_the_distribution_worked_by_hand(sampling, expected):
    """20,000 draws, each share within five standard errors, tokens in an order that is not that of their ids."""
    ids = [3, 1, 0, 2]
    logits_W = torch.full((4,), float("-inf"))
    for token, probability in zip(ids, (0.5, 0.25, 0.15, 0.1), strict=True):
        logits_W[token] = math.log(probability) + 7
    draws = 20_000
    drawn_B = choose(
        logits_W.repeat(draws, 1), Sampling(max_new_tokens=1, **sampling), torch.Generator().manual_seed(0)
    )
    share = Counter(drawn_B.tolist())
    for token, probability in zip(ids, expected, strict=True):
        assert abs(share[token] / draws - probability) <= 5 * math.sqrt(probability * (1 - probability) / draws)


def test_hooks_are_active_at_every_token():
    """A hook that forbids a token keeps it out; one that counts sees the prompt once, then one token a pass."""
    network, lengths = tiny_network(), []
    favourite = generate(network, PROMPTS[:1], Sampling(max_new_tokens=1))[0][0]
    direction_D = network.tokens_to_residual_directions(favourite).detach()

    def remove(x_BTD: Tensor, hook: object) -> Tensor:
        return x_BTD - 50 * direction_D / direction_D.norm()

    hooks = [
        ("blocks.4.hook_resid_post", remove),
        ("blocks.2.attn.hook_pattern", lambda pattern_BQTS, hook: lengths.append(tuple(pattern_BQTS.shape[2:]))),
    ]
    with network.hooks(fwd_hooks=hooks):
        made = generate(network, PROMPTS[:1], Sampling(max_new_tokens=5), attention="eager")
    assert favourite not in made[0]
    assert lengths == [(4, 4), (1, 5), (1, 6), (1, 7), (1, 8)]
    with torch.no_grad(), network.hooks(fwd_hooks=hooks[:1]):
        assert made[0] == by_full_passes(network, PROMPTS[0], 5)


def test_a_generation_fills_the_context_to_its_last_token():
    network, prompt = tiny_network(), random_tokens(1, 60)[0].tolist()
    assert len(generate(network, [prompt], Sampling(max_new_tokens=4))[0]) == 4
    with pytest.raises(UserError, match=r"must fit the context of 64; got 60 and 5; shorten the prompt"):
        generate(network, [prompt], Sampling(max_new_tokens=5))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], r"prompts must be at least one, none of them empty; got lengths \[\]"),
        ([[1], []], r"none of them empty; got lengths \[1, 0\]"),
        ([[1, 259]], "token ids must be from 0 to 258; got 259"),
        ([[1, -1]], "token ids must be from 0 to 258; got -1"),
        ([[2**70]], "token ids must be from 0 to 258; got 1180591620717411303424"),
        ([[1.5]], r"token ids must be integers; got 1\.5"),
        ([[1.0]], r"token ids must be integers; got 1\.0"),
        ([[True]], "token ids must be integers; got True"),
        ([["a"]], "token ids must be integers; got 'a'"),
        ([[[1]]], r"token ids must be integers; got \[1\]"),
    ],
)
def test_bad_prompts_are_named(prompts, message):
    with pytest.raises(UserError, match=message):
        generate(tiny_network(), prompts, Sampling(max_new_tokens=1))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_new_tokens", 0, "max_new_tokens must be at least 1; got 0"),
        ("temperature", -0.1, "temperature must be 0, or finite and at least 1e-06; got -0.1"),
        ("top_k", -1, r"top_k must be 0 \(all\) or above; got -1"),
        ("top_p", 0.0, "top_p must be above 0 and at most 1; got 0.0"),
        ("top_p", 1.1, "top_p must be above 0 and at most 1; got 1.1"),
        ("temperature", float("nan"), "temperature must be 0, or finite and at least 1e-06; got nan"),
        ("temperature", float("inf"), "temperature must be 0, or finite and at least 1e-06; got inf"),
        ("temperature", 1e-45, "temperature must be 0, or finite and at least 1e-06; got 1e-45"),
        ("seed", 2**70, r"seed must be from -2\^63 to 2\^64 - 1; got 1180591620717411303424"),
        ("seed", -(2**63) - 1, r"seed must be from -2\^63 to 2\^64 - 1; got -9223372036854775809"),
        ("seed", 1.5, "seed must be an integer; got 1.5"),
        ("max_new_tokens", 2.0, "max_new_tokens must be an integer; got 2.0"),
        ("top_k", True, "top_k must be an integer; got True"),
        ("stop_token", None, "stop_token must be an integer; got None"),
    ],
)
def test_bad_sampling_is_named(field, value, message):
    with pytest.raises(UserError, match=message):
        Sampling(**({"max_new_tokens": 1} | {field: value}))


@pytest.mark.parametrize(
    ("prompts", "kind"),
    [
        ("text", "str"),
        (["text"], "str"),
        (torch.zeros(1, 3, dtype=torch.long), "Tensor"),
        ([torch.zeros(3)], "Tensor"),
        ([np.zeros(3, dtype=np.int64)], "ndarray"),
        (None, "NoneType"),
        ([None], "NoneType"),
        ([256, 40], "int"),
        (7, "int"),
    ],
)
def test_prompts_are_lists_of_token_ids(prompts, kind):
    with pytest.raises(UserError, match=rf"prompts must be lists of token ids, e\.g\. .*; got {kind}: use .tolist"):
        generate(tiny_network(), prompts, Sampling(max_new_tokens=1))


def test_the_lowest_temperature_takes_the_most_likely_token():
    network = tiny_network()
    drawn = generate(network, PROMPTS, Sampling(max_new_tokens=8, temperature=1e-6))
    assert drawn == generate(network, PROMPTS, Sampling(max_new_tokens=8))


@pytest.mark.parametrize(
    ("weight", "site"), [("ln_final.weight", "logits"), ("layers.2.mlp.w_out", r"blocks\.\d\.mlp\.|blocks\.\d\.hook_")]
)
def test_numbers_that_are_none_are_told_at_their_site(weight, site):
    network = tiny_network()
    with torch.no_grad():
        network.get_parameter(weight).fill_(math.nan)
    with pytest.raises(UserError, match=rf"({site}).* must be finite; got nan at index"):
        generate(network, PROMPTS, Sampling(max_new_tokens=3))


def test_patterns_are_asked_for_by_the_eager_path():
    network = tiny_network()
    with (
        network.hooks(fwd_hooks=[("blocks.2.attn.hook_pattern", lambda x, hook: None)]),
        pytest.raises(UserError, match="pass attention='eager'"),
    ):
        generate(network, PROMPTS, Sampling(max_new_tokens=3))
