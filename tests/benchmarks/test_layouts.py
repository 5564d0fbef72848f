"""`benchmarks.layouts`: a line for each kind of lengths and degree, and that packs are full."""

from benchmarks.layouts import DEGREES, PACK, log_normal, main, one_of, packs
from click.testing import CliRunner


def test_the_table_has_a_line_for_each_kind_and_degree():
    result = CliRunner().invoke(main, ["--packs", "2", "--no-tokens"], catch_exceptions=False)
    cells = [line.split()[:2] for line in result.output.splitlines()[1:]]
    assert cells == [[kind, str(P)] for kind in ("bytes", "log-normal", "half-row", "equal") for P in DEGREES]


def test_packs_are_full_and_documents_are_cut_at_their_ends():
    rows = packs(one_of([PACK // 4 * 3]), 3)
    assert rows == [[49152, 16384], [32768, 32768], [16384, 49152]]
    drawn = packs(log_normal, 5)
    assert [sum(row) for row in drawn] == [PACK] * 5
    assert packs(log_normal, 5) == drawn
