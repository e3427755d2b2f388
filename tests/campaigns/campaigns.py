"""The list of campaigns."""

import numpy as np

from tests.campaigns import captures, checkpoints, hooks, kills, options, tables
from tests.campaigns.campaign import Campaign

CAMPAIGNS: dict[str, Campaign] = {
    "captures": captures.campaign,
    "checkpoints": checkpoints.campaign,
    "tables": tables.campaign,
    "hooks": hooks.campaign,
    "kills": kills.campaign,
    "options": options.campaign,
}


def random_of(seed: int, case: int) -> np.random.Generator:
    """What a case draws from; it does not depend on the cases before it."""
    return np.random.default_rng((seed, case))
