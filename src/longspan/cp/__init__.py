"""Context parallelism: attention over a sharded sequence, the context of a micro-batch, the drop-in, and Untied Ulysses."""
