"""Context parallelism: `attention`, `ContextParallel`, the drop-in `context_parallel`, and Untied Ulysses (`upipe`)."""
