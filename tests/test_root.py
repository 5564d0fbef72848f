"""The root package: its names, and that each loads only when it is used."""

import subprocess
import sys

import pytest

import longspan

NAMES = [
    "ContextParallel", "Layout", "LongspanError", "Mask", "Plan", "Projections", "Topology", "UpipeAttention", "attention",
    "context_parallel", "plan_attention", "projected_attention", "record", "shard", "unshard",
]  # fmt: skip


def fresh(code: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_all():
    assert longspan.__all__ == NAMES
    assert dir(longspan) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_a_class_or_a_function_of_ours(name):
    found = getattr(longspan, name)
    assert callable(found)
    assert found.__name__ == name
    assert found.__module__.startswith("longspan.")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="No longspan attribute attend"):
        _ = longspan.attend
    with pytest.raises(ImportError, match="cannot import name 'attend' from 'longspan'"):
        exec("from longspan import attend")


@pytest.mark.parametrize("name", ["Layout", "Mask", "Plan", "Topology", "plan_attention", "LongspanError"])
def test_names_without_tensors_import_no_torch(name):
    code = f"import sys, longspan; longspan.{name}; assert 'torch' not in sys.modules"
    assert fresh(code) == (0, "")


def test_modules_import_as_any_do():
    code = "import longspan.cp.context as context, longspan.cp.attention; assert context.ContextParallel"
    assert fresh(code) == (0, "")


@pytest.mark.parametrize(
    "before",
    [
        "",
        "import longspan.cp.attention",
        "import longspan.cp.engine.executor, longspan.cp.context",
        "from longspan import ContextParallel",
        "import longspan; longspan.attention",
    ],
)
def test_attention_is_the_function_whatever_was_imported_before(before):
    code = f"""
{before}
from longspan import attention
import longspan, inspect
assert inspect.isfunction(attention) and attention.__name__ == "attention", attention
assert longspan.attention is attention
import longspan.kernels.sdpa
from longspan.kernels.sdpa import SdpaKernel
assert longspan.attention is attention
"""
    assert fresh(code) == (0, "")
