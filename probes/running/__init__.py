"""From a source to an answer: catalog, source, command, report."""
