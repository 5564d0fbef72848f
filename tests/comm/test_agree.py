"""Ranks that were given different things all learn who differs, and from whom."""

import pytest
import torch.distributed as dist

from longspan.comm.agree import check_agreement
from longspan.errors import DisagreementError, SpecError
from tests.oracle import raised
from tests.ranks import run_ranks

HINT = "\n\nhint: give all ranks of a CP group the same options and samples: key the loader by the data-parallel rank alone"


def _agree(group, rank, versions):
    return raised(check_agreement, group, {name: held[rank] for name, held in versions.items()})


@pytest.mark.parametrize(
    ("versions", "named"),
    [
        ({"plans": [b"a", b"a", b"b", b"a"]}, "plans: rank 2 differ from rank 0"),
        ({"plans": [b"b", b"a", b"a", b"c"]}, "plans: rank 0, rank 3 differ from rank 1"),
        ({"plans": [b"a"] * 4, "token ids": [b"", b"", b"", b"x" * 5000]}, "token ids: rank 3 differ from rank 0"),
        (
            {"plans": [b"a", b"b", b"b", b"b"], "token ids": [b"1", b"2", b"3", b"4"]},
            "plans: rank 0 differ from rank 1",
        ),
    ],
)
def test_every_rank_names_the_ones_that_differ(versions, named):
    right = ("DisagreementError", f"the ranks of one context-parallel group were given different {named}{HINT}")
    assert run_ranks(4, _agree, versions) == [right] * 4


def test_ranks_that_agree_go_on():
    assert run_ranks(4, _agree, {"plans": [b"a"] * 4, "token ids": [b""] * 4}) == [("", "")] * 4


def _problem(group, rank, troubled, text):
    problem = SpecError(text, hint="do otherwise") if rank in troubled else None
    return raised(check_agreement, group, {"plans": bytes([rank])}, problem)


@pytest.mark.parametrize("troubled", [[0], [2], [1, 2]])
def test_a_problem_of_one_rank_is_raised_on_all(troubled):
    own = ("SpecError", "9 heads\n\nhint: do otherwise")
    other = ("DisagreementError", f"rank {troubled[0]} failed: 9 heads\n\nhint: do otherwise")
    assert run_ranks(3, _problem, troubled, "9 heads") == [own if rank in troubled else other for rank in range(3)]


def test_a_long_problem_is_cut_short_elsewhere():
    text = "9 heads, " + "é" * 1000
    mine, theirs = run_ranks(2, _problem, [0], text)
    assert mine == ("SpecError", text + "\n\nhint: do otherwise")
    assert theirs[0] == "DisagreementError"
    assert theirs[1].startswith("rank 0 failed: 9 heads, ééé")
    assert len(theirs[1]) < 520


def _subgroup(group, rank):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return raised(check_agreement, pairs[rank % 2], {"plans": bytes([rank // 2 if rank % 2 else 0])})


def test_names_give_the_global_rank_where_it_is_another():
    text = f"the ranks of one context-parallel group were given different plans: rank 1 (global rank 3) differ from rank 0 (global rank 1){HINT}"  # noqa: E501
    wrong = ("DisagreementError", text)
    assert run_ranks(4, _subgroup) == [("", ""), wrong, ("", ""), wrong]


def test_a_rank_alone_agrees_with_itself_and_raises_its_own_problem():
    check_agreement(None, {"plans": b"a"})
    with pytest.raises(SpecError, match="9 heads"):
        check_agreement(None, {"plans": b"a"}, SpecError("9 heads"))
    assert run_ranks(1, _agree, {"plans": [b"a"]}) == [("", "")]


def test_the_error_is_a_runtime_error_of_ours():
    assert issubclass(DisagreementError, RuntimeError)
