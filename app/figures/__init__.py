"""Figures of the pages of numbers."""
