"""What all tests share: one thread, and no downloads."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # read when numpy and torch are loaded, which is later
