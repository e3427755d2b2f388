"""What was seen: captures of activations, kept apart by visit, on disk (HDF5) and in memory."""
