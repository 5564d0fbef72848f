"""How much eager code works on at a time: what a CPU's cache holds; on an accelerator so much that launches do not count.
Results never depend on it. No torch: budgets reckon with the same numbers.
"""


def chunk_elements(device_type: str) -> int:
    """Elements of random bits at a time. Temporaries of dropout are 18 bytes an element, of normal numbers 48.

    CPU: 2 MiB and 6 MiB. Elsewhere 288 MiB and 768 MiB: T=16k slots of width 4,096 drop in 4 chunks of some 120 launches
    each, whose kernels run for longer than their launches take.
    """
    return 2**17 if device_type == "cpu" else 2**24


def logits_bytes(device_type: str) -> int:
    """Bytes of fp32 logits at a time: 64 MiB on a CPU, elsewhere 1 GiB.

    That is 128 or 2,048 tokens of a vocabulary of 128k. Per chunk the wide gradient of the head is read and written once,
    and the weight read thrice: 2,048 rows make a product that computes for longer than it moves bytes on any device.
    """
    return (64 if device_type == "cpu" else 1024) * 2**20


def loss_chunk(device_type: str, vocab_rows: int) -> int:
    """Tokens whose logits over `vocab_rows` of a vocabulary are made at a time."""
    return max(1, logits_bytes(device_type) // (4 * max(1, vocab_rows)))
