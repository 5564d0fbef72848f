"""`context_parallel`: makes the attention calls of unchanged code attend over all ranks."""
