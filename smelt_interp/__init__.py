"""What can be said about a looped Mixture-of-Experts transformer without running one."""
