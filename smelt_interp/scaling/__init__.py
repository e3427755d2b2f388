"""From runs to laws: fits, frontiers, calibration, all with intervals."""
