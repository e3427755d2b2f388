"""Networks that run: the looped Mixture-of-Experts transformer, its hooks, checkpoints and training."""
