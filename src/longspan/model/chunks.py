"""Chunk sizes of eager code: small enough for a CPU's cache; on an accelerator large enough to hide kernel launches.
Results do not depend on the chunk sizes. No torch here: memory estimates use the same numbers.
"""


def chunk_elements(device_type: str) -> int:
    """Return the elements of random bits drawn at a time. Temporaries: dropout 18 bytes, normal numbers 48 per element.

    CPU: 2 MiB and 6 MiB. Elsewhere 288 MiB and 768 MiB: dropout of T=16k slots of hidden size 4,096 takes 4 chunks of some
    120 launches each, and the kernels take longer than their launches.
    """
    return 2**17 if device_type == "cpu" else 2**24


def logits_bytes(device_type: str) -> int:
    """Return the bytes of fp32 logits computed at a time: 64 MiB on a CPU, elsewhere 1 GiB.

    That is 128 or 2,048 tokens of a vocabulary of 128k. Each chunk reads and writes the fp32 gradient of the head once, and
    reads the head's weight three times. With 2,048 rows the matrix product is compute-bound on any device.
    """
    return (64 if device_type == "cpu" else 1024) * 2**20


def loss_chunk(device_type: str, vocab_rows: int) -> int:
    """Return the number of tokens whose logits over `vocab_rows` rows of the head are computed at a time."""
    return max(1, logits_bytes(device_type) // (4 * max(1, vocab_rows)))
