"""`context_parallel`: unchanged code with `scaled_dot_product_attention` attends over all ranks."""
