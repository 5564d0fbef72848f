"""Memory of a run: the start table, and the preflight step that measures every rank's peak."""
