"""The same function on numpy arrays and on torch tensors gives the same sums, where the tensors are."""

import numpy as np
import pytest
import torch

from smelt_interp import similarity as sim

MASK = np.arange(6) < np.array([[6], [4], [1]])


def arrays(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, ...]]:
    """Arguments of each function: vectors, attention rows, experts with weights."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, 3, 6, 2, 5, generator=generator).to(dtype)
    rows = torch.rand(2, 3, 6, 2, 7, generator=generator).softmax(-1).to(dtype)
    experts = torch.rand(2, 3, 6, 2, 8, generator=generator).argsort(-1)[..., :3]
    weights = torch.rand(2, 3, 6, 2, 3, generator=generator).to(dtype)
    return {
        "cosine_sums": tuple(vectors),
        "pattern_sums": tuple(rows),
        "overlap_sums": (experts[0], weights[0], experts[1], weights[1]),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["cosine_sums", "pattern_sums", "overlap_sums"])
def test_tensors_give_the_sums_of_arrays(name: str, dtype: torch.dtype) -> None:
    tensors = arrays(dtype)[name]
    more = (8,) if name == "overlap_sums" else ()
    of_tensors = getattr(sim, name)(*tensors, MASK, *more)
    of_arrays = getattr(sim, name)(*(x.numpy() for x in tensors), MASK, *more)
    assert of_tensors.keys() == of_arrays.keys()
    for key, x in of_tensors.items():
        assert isinstance(x, torch.Tensor)
        assert x.dtype == torch.float64
        assert of_arrays[key].dtype == np.float64
        np.testing.assert_allclose(x.numpy(), of_arrays[key], rtol=1e-12, atol=1e-12)


def test_bfloat16_is_summed_in_float64() -> None:
    ones = torch.ones(1, 6, 1, 3, dtype=torch.bfloat16)
    sums = sim.cosine_sums(ones * 1.0078125, ones, MASK[:1])
    assert float(sums["dot"]) == 6 * 3 * 1.0078125
