"""Hugging Face models under context parallelism: `attn_implementation="longspan"` and one `with` block around the forward.

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="longspan")
    hf.check(model, seq_len=131072)                    once: refuses, by name, what would be silently wrong
    with hf.sequence(cp, model, batch) as seq:         global rows in
        loss = model(**seq.inputs).loss                this rank's share of the mean over all targets
        seq.backward(loss)

Importing this package imports transformers and registers "longspan" in its attention and mask interfaces.
"""

from longspan.hf.interface import NAME, register
from longspan.hf.model_check import Checked, check
from longspan.hf.model_sequence import Sequence, count_targets, sequence

__all__ = ["NAME", "Checked", "Sequence", "check", "count_targets", "sequence"]

register()
