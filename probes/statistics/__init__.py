"""Quantities on a grid of steps and heads, streamed sums, the bootstrap."""
