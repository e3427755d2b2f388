"""The expert layer: one interface, its backends and kernels."""
