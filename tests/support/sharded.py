"""Two gloo ranks under `fully_shard` against one whole network. Run by test_steps."""

import os
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from tests.support.networks import random_tokens, tiny_network

RANKS = 2


def check(rank: int, meeting_point: Path) -> None:
    """Each rank reads its own rows; gradients are means over ranks, as over the rows of one batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=RANKS)
    tokens_BT = random_tokens(4, 12)
    own_BT = tokens_BT.chunk(RANKS)[rank]
    whole, sharded = tiny_network(), tiny_network()
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in sharded.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    register_fsdp_forward_method(sharded, "loss")
    assert all(isinstance(layer, FSDPModule) for layer in sharded.layers)
    assert isinstance(sharded.layers[1].attn.q_proj.weight, DTensor)

    expected_BTW, expected = whole.run_with_cache(own_BT, head_results=True, expert_results=True)
    logits_BTW, cache = sharded.run_with_cache(own_BT, head_results=True, expert_results=True)
    assert torch.equal(logits_BTW, expected_BTW)
    assert len(expected) == 6 * 22 + 3
    for name in expected:
        assert torch.equal(cache[name], expected[name]), name

    whole.loss(tokens_BT).next_token.backward()
    sharded.loss(own_BT).next_token.backward()
    gradients = dict(sharded.named_parameters())
    for name, weight in whole.named_parameters():
        gradient = gradients[name].grad.full_tensor()
        torch.testing.assert_close(gradient, weight.grad, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        assert gradient.abs().max() > 0
    dist.destroy_process_group()


def main() -> None:
    """Fork the ranks, so that imports are paid once."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(RANKS):
            if (child := os.fork()) == 0:
                try:
                    check(rank, Path(folder) / "meeting-point")
                    os._exit(0)
                except BaseException as error:  # whatever it is, the parent reads it
                    print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                finally:
                    os._exit(1)
            ranks.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    if any(codes):
        raise SystemExit(1)
    print(f"{RANKS} ranks equal one")


if __name__ == "__main__":
    main()
