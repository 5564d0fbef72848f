"""Memory of a run: the table printed at the start, and the preflight step that measures the peak of every rank."""
