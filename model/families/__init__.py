"""Other people's networks, run by their authors' own code and measured by visit."""
