"""Every configuration of the Triton kernels compiles for a GPU that is not there, and fits it: the H100 here, the
others by the command."""

import pytest

from benchmarks.expert_compilation import SHARED_MEMORY_LIMIT, compile_for, configurations


@pytest.mark.timeout(900)
def test_every_configuration_compiles_without_spills_within_shared_memory():
    capability = 90
    table = [(item, compile_for(item, capability)) for item in configurations()]
    assert len(table) == 73
    spilling = [(item.name, item.dtype, item.tile) for item, needs in table if needs.spilled_bytes]
    too_large = [
        (item.name, item.tile) for item, needs in table if needs.shared_bytes > SHARED_MEMORY_LIMIT[capability]
    ]
    assert not spilling
    assert not too_large
