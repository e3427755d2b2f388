"""What can be said about a looped Mixture-of-Experts transformer without running one."""

__version__ = "0.1.0"
