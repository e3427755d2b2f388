"""One question a file, answered from a capture or from a running model."""
