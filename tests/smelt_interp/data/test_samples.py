"""Samples: rows, digests, and several sets as one."""

from copy import deepcopy
from dataclasses import fields, replace

import numpy as np
import pytest

from smelt_interp.data.samples import EPISODE, NO_EPISODE, Role, Samples, concatenate
from smelt_interp.data.token_text import TokenText
from smelt_interp.errors import UserError
from tests.support.planted import text_samples


def test_rows_are_taken_in_the_order_asked():
    samples = text_samples(5, padding=2)
    chosen = samples.rows(np.array([3, 0]))
    assert len(chosen) == 2
    assert chosen.row_text(0) == samples.row_text(3)
    assert chosen.row_text(1) == samples.row_text(0)
    for field in fields(Samples):
        if field.name == "text":
            continue
        array = getattr(samples, field.name)
        assert np.array_equal(getattr(chosen, field.name), array[[3, 0]])
        assert np.array_equal(getattr(samples.rows(slice(1, 3)), field.name), array[1:3])


def test_a_digest_is_equal_exactly_when_the_samples_are():
    samples = text_samples(4, padding=2)
    assert samples.digest() == text_samples(4, padding=2).digest()
    changes = {field.name: deepcopy(getattr(samples, field.name)) for field in fields(Samples)}
    changes["ids_NT"][1, 2] += 1
    changes["length_N"][0] -= 1
    changes["role_NT"][0, 1] = Role.QUERY
    changes["segment_start_NT"][2, 5] = 5
    changes["domain_N"][3] = b"math"
    changes["episode_N"][0]["shots"] = 4
    changes["document_N"][1] = 0
    changes["text"].data[3] = ord("(")
    digests = {replace(samples, **{name: array}).digest() for name, array in changes.items()}
    assert len(digests) == len(changes)
    assert samples.digest() not in digests


def test_several_sets_become_one_padded_on_the_right():
    short, long = text_samples(2, 5, seed=1), text_samples(3, 8, seed=2)
    both = concatenate([short, long], 258)
    assert both.ids_NT.shape == (5, 8)
    assert (both.ids_NT[:2, 5:] == 258).all()
    assert (both.role_NT[:2, 5:] == Role.PAD).all()
    assert both.rows(slice(2, 5)).digest() == long.digest()
    assert np.array_equal(both.ids_NT[:2, :5], short.ids_NT)
    assert np.array_equal(both.length_N, [5, 5, 8, 8, 8])
    assert both.row_text(1) == [*short.row_text(1), b"", b"", b""]
    with pytest.raises(UserError, match="samples to concatenate must be at least one; got 0"):
        concatenate([], 258)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("role_NT", np.zeros((4, 11), np.uint8), r"role_NT must have the shape of ids_NT; got \(4, 11\)"),
        ("segment_start_NT", np.zeros((3, 12), np.int32), r"segment_start_NT must have the shape of ids_NT"),
        ("domain_N", np.array([b"a", b"a\0b", b"c", b"d"]), r"a domain must be printable ASCII; got b'a.x00b'"),
        ("domain_N", np.array([b"\xe9"] * 4), r"a domain must be printable ASCII; got b'.xe9'"),
        ("length_N", np.zeros(3, np.int32), r"length_N must have one entry a row \(4\); got \(3,\)"),
        ("document_N", np.zeros((4, 1), np.int64), r"document_N must have one entry a row \(4\); got \(4, 1\)"),
        ("text", TokenText.of([b"a"] * 47), r"text must have one entry a token \(48\); got 47"),
        ("episode_N", np.array([NO_EPISODE] * 5, EPISODE), r"episode_N must have one entry a row \(4\); got \(5,\)"),
    ],
)
def test_arrays_that_disagree_are_named(field, value, message):
    with pytest.raises(UserError, match=message):
        replace(text_samples(4, 12), **{field: value})
