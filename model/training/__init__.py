"""Training of matched pairs."""
