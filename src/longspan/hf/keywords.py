"""Keywords that transformers' models pass to an attention function, and that leave the attention as its mask says."""

KNOWN_KEYWORDS = frozenset(
    {
        # of the attention itself
        "is_causal", "sliding_window", "position_ids", "cache_position", "output_attentions",
        # of the caller of the model, passed down to every layer
        "num_items_in_batch", "shift_labels", "labels", "use_cache", "return_dict", "output_router_logits",
        "output_hidden_states", "past_key_values", "past_key_value", "layer_idx", "attention_mask",
    }
)  # fmt: skip
"""Every other keyword may select keys or change scores, and is refused."""
