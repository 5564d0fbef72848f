"""Attention over a sharded sequence: kernels, merge, one executor as registered operators, and the context of a batch."""
