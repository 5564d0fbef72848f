"""The words and short numbers that titles and tables use."""

import pytest

from longspan.plan import Mask
from longspan.report import describe
from longspan.report.plan_report import mask_words
from longspan.report.words import (
    byte_unit,
    bytes_note,
    exchange_note,
    headline,
    in_full,
    short_bytes,
    short_count,
    short_tokens,
    summary,
)
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
    assert [short_count(n) for n in (4.5, 99.97, 512.25, 11_184_810.667)] == ["4.5", "100", "512", "11.2M"]
    assert [in_full(n) for n in (1234, 1234.56)] == ["1,234", "1,234.6"]
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
    assert summary(report) == "8 ranks, 64 tokens, imbalance 1.000, sent forward: 0.75 of a plain ring"
    alone = describe(make("contiguous", Mask.full(1), 1), 16, 2)
    assert summary(alone) == "1 rank, 1 token, imbalance 1.000, nothing sent"


def test_titles_of_routes_of_two_levels_and_of_the_wire() -> None:
    report = describe(make("zigzag", Mask.causal(64), 8, heads=(8, 2), route="usp", comm_dtype="fp8"), 16, 2)
    assert headline(report) == "zigzag layout, causal mask, usp route (inner 2), fp8 in flight"
    assert bytes_note(report) == (
        "Bytes sent per batch row, for 8 query and 2 KV heads of 16 at 2 bytes an element, keys and values as fp8."
    )
    assert exchange_note(report) == "The 2 ranks of a group compute the same pairs, each for 1/2 of the heads."
    alone = describe(make("zigzag", Mask.causal(64), 1, heads=(8, 2), route="ulysses"), 16, 2)
    assert (headline(alone), exchange_note(alone)) == ("zigzag layout, causal mask, ulysses route", "")
