"""The words and short numbers that titles and tables use."""

import pytest

from longspan.plan import Mask
from longspan.report import describe
from longspan.report.words import byte_unit, headline, mask_words, short_bytes, short_count, short_tokens, summary
from tests.report.plans import make


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (Mask.causal(24), "causal mask"),
        (Mask.full(24), "full mask"),
        (Mask.causal(2048, window=1024), "causal window of 1,024"),
        (Mask.causal(24, window=24), "causal mask"),
        (Mask.documents([24], causal=False, window=4), "two-sided window of 4"),
        (Mask.documents([7, 1, 0, 12, 4]), "4 causal documents"),
        (Mask.documents([7, 12, 4], causal=False), "3 full documents"),
        (Mask.documents([7, 12, 4], window=5), "3 causal documents, window 5"),
        (Mask.documents([1] * 5), "5 causal documents"),
        (Mask.prefix(24, 6), "prefix of 6"),
        (Mask.prefix(24, 0), "causal mask"),
        (Mask.shared_prefix(4, [3, 3]), "mask of 5 bands"),
        (Mask.bands(24, [(0, 4, 0, 4, 0, None)]), "mask of 1 band"),
        (Mask.bands(24, []), "empty mask"),
    ],
)
def test_mask_words(mask: Mask, words: str) -> None:
    assert mask_words(mask) == words


def test_short_numbers() -> None:
    assert [short_count(n) for n in (0, 999, 1000, 33_558_528, 999_700)] == ["0", "999", "1.0k", "33.6M", "1.0M"]
    assert [short_bytes(n) for n in (0, 1023, 1024, 12 << 20, 216 << 20)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "12.0 MiB",
        "216 MiB",
    ]
    assert [short_tokens(n) for n in (0, 1000, 8192, 1 << 20, 1536)] == ["0", "1,000", "8k", "1M", "1,536"]
    assert [byte_unit(n) for n in (0, 1023, 1024, 5 << 30)] == [(1, "B"), (1, "B"), (1024, "KiB"), (1 << 30, "GiB")]


def test_titles_say_what_and_how_much() -> None:
    report = describe(make("zigzag", Mask.causal(64), 8), 16, 2)
    assert headline(report) == "zigzag layout, causal mask, ring route"
    assert summary(report) == "8 ranks, 64 tokens, imbalance 1.000, KV rows sent: 0.75 of a plain ring"
    alone = describe(make("contiguous", Mask.full(1), 1), 16, 2)
    assert summary(alone) == "1 rank, 1 token, imbalance 1.000, no KV row sent"
