"""Samples with roles, and where they come from: text, Dyck episodes, tokenizers, the training mixture."""
