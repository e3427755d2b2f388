"""Shuffles belong to their sample and move its tokens alone."""

import numpy as np

from probes.statistics.shuffles import shuffled_positions


def test_shuffles_move_every_token_of_a_sample_and_no_padding() -> None:
    real_BT = np.array([[True] * 6 + [False] * 2, [True] * 8])
    order_XBT = shuffled_positions(real_BT, np.array([4, 9]), 0, 500)
    assert (order_XBT[:, 0, 6:] == [6, 7]).all()
    np.testing.assert_array_equal(np.sort(order_XBT, -1), np.broadcast_to(np.arange(8), order_XBT.shape))
    np.testing.assert_array_equal(order_XBT[:, 1:], shuffled_positions(real_BT[1:], np.array([9]), 0, 500))
    # Uniform: every place receives every token equally often.
    counts = np.array([np.bincount(order_XBT[:, 0, t], minlength=6) for t in range(6)])
    assert (np.abs(counts - 500 / 6) < 5 * np.sqrt(500 / 6)).all()
