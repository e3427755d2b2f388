"""Sites of the router, and the steps on which they were recorded."""

from cache.batch import Batch
from probes.statistics.arrays import recorded_steps
from smelt_interp.errors import UserError

INDICES, WEIGHTS, LOGITS = "mlp.hook_expert_indices", "mlp.hook_expert_weights", "mlp.hook_router_logits"


def routed_steps(batch: Batch, suffixes: tuple[str, ...]) -> tuple[int, ...]:
    """The steps on which these sites were recorded. Raises UserError for a dense network, and when there is none."""
    if batch.architecture.num_experts == 0:
        raise UserError(
            f"routing must be measured on a network with experts; got {batch.architecture.family}, which has no router"
        )
    return recorded_steps(batch, suffixes)
