"""The terminal: command lines, tables, progress, files that appear whole."""
