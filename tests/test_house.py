"""The house: each shared constant once, as code; routes decided in one place; what a forward walks through."""

import ast
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch

import longspan
from longspan import ContextParallel, Mask
from longspan.advise import choose
from longspan.kernels import choice
from longspan.names import COMM_DTYPES, DTYPES, IGNORED, KERNELS, LAYOUTS, ROUTES

SRC = Path(longspan.__file__).parent


def trees() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(SRC.rglob("*.py")):
        yield str(path.relative_to(SRC)), ast.parse(path.read_text())


def strings_of(node: ast.AST) -> set[str]:
    return {n.value for n in ast.iter_child_nodes(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


@pytest.mark.parametrize(
    "known", [LAYOUTS, ROUTES, KERNELS, DTYPES, COMM_DTYPES], ids=["layouts", "routes", "kernels", "types", "sent"]
)
def test_a_list_of_names_stands_once(known) -> None:
    """A list, tuple or Literal of more than half of the names is a second list. A table that gives each name a value is none."""
    lists = [
        (file, node.lineno)
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.List | ast.Tuple | ast.Set)
        and len(strings_of(node) & set(known)) > max(1, len(known) // 2)
    ]
    assert [file for file, _ in lists] == ["names.py"] * isinstance(known, tuple)


def test_the_label_that_is_no_target_stands_once() -> None:
    places = [
        (file, node.lineno)
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
        and node.operand.value == -IGNORED
    ]  # fmt: skip
    assert [file for file, _ in places] == ["names.py"]


def test_sizes_of_types_stand_once() -> None:
    """A dictionary from names of types to whole numbers is a second table of their bytes."""
    tables = [
        file
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict) and {k.value for k in node.keys if isinstance(k, ast.Constant)} & set(DTYPES)
        and all(isinstance(value, ast.Constant) and isinstance(value.value, int) for value in node.values)
    ]  # fmt: skip
    assert tables == []


def test_no_code_compares_a_route_by_name() -> None:
    compared = [
        (file, node.lineno)
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and {s for part in ast.walk(node) for s in strings_of(part)} & set(ROUTES)
    ]
    assert compared == []


def test_one_function_chooses_routes_and_one_file_calls_it() -> None:
    callers = [
        file
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == choose.choose_route.__name__
    ]
    assert callers == ["advise/planner.py"]


@pytest.mark.parametrize("route", ["ring", "ulysses"])
def test_what_a_forward_walks_through(route) -> None:
    """Down every stack of calls that hold q, no folder is entered again once it was left: context, engine, kernels."""
    cp, mask = ContextParallel(None, route=route, heads=(4, 2)), Mask.documents([20, 12])
    q, k = torch.randn(1, 4, 32, 8), torch.randn(1, 2, 32, 8)
    memory, stacks = q.untyped_storage().data_ptr(), set()

    def folder(frame) -> str:
        path = Path(frame.f_code.co_filename)
        return "/".join(path.relative_to(SRC).parent.parts) if path.is_relative_to(SRC) else ""

    def holds_q(frame) -> bool:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
        values = (frame.f_locals.get(name) for name in names)
        return any(isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() == memory for x in values)

    def watch(frame, event, argument) -> None:
        if event != "call" or not folder(frame) or not holds_q(frame):
            return
        above, at = [], frame
        while at is not None:
            if folder(at):
                above.append(folder(at))
            at = at.f_back
        stacks.add(tuple(name for name, _ in groupby(reversed(above))))

    with cp.sequence(mask) as sequence:
        chosen = []
        choose_kernel, choice.choose_auto = (
            choice.choose_auto,
            lambda *a, **k: chosen.append(1) or choose_kernel(*a, **k),
        )
        sys.setprofile(watch)
        try:
            sequence.attention(q, k, k.clone())
        finally:
            sys.setprofile(None)
            choice.choose_auto = choose_kernel
    assert len(chosen) == 1
    assert ("cp", "cp/engine", "kernels") in stacks
    assert all(len(set(stack)) == len(stack) for stack in stacks), stacks
    assert {stack[-1] for stack in stacks} <= {"cp", "cp/engine", "kernels"}
