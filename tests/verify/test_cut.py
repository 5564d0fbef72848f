"""What is left of a run that is cut for a verification, and what cannot be cut."""

from pathlib import Path
from typing import Any

import pytest

from longspan.errors import SpecError
from longspan.train.train_config import TrainConfig
from longspan.verify.cut import cut, describe_cut
from longspan.verify.verify_config import VerifyConfig
from tests.train.tiny import make_config


def deep(**changes: Any) -> TrainConfig:
    """Six layers, the fourth full and the last with another window; rows of 48 tokens."""
    windows = [9, 9, 9, None, 9, 5]
    return make_config(**({"model__num_layers": 6, "model__windows": windows, "dtype": "fp32"} | changes))


@pytest.mark.parametrize(
    ("layers", "windows"),
    [(3, (9, None, 5)), (4, (9, 9, None, 5)), (6, (9, 9, 9, None, 9, 5))],
)
def test_every_kind_of_mask_is_kept_in_its_order(layers: int, windows: tuple[int | None, ...]) -> None:
    config, cases = deep(), VerifyConfig(layers=layers)
    left = cut(config, cases)
    assert left.model is not None
    assert (left.model.windows, left.model.num_layers) == (windows, len(windows))
    assert left.model.model_copy(update={"num_layers": 6, "windows": config.model.windows}) == config.model
    assert left.model_copy(update={"model": config.model}) == config
    assert cut(left, cases) == left
    assert describe_cut(config, cases) == ({} if layers >= 6 else {"layers": (layers, 6)})


def test_rows_are_cut_and_nothing_else(tmp_path: Path) -> None:
    fit = {"buckets": [8, 40]}
    config = deep(data__packing="fit", data__fit=fit, data__manifest=str(tmp_path / "manifest"))
    left = cut(config, VerifyConfig(tokens=32))
    assert (left.data.seq_len, left.data.manifest, left.data.fit.buckets) == (32, None, (8,))
    assert left.model_copy(update={"data": config.data}) == config
    assert describe_cut(config, VerifyConfig(tokens=32)) == {"seq_len": (32, 48)}
    assert cut(config, VerifyConfig(tokens=48)) == cut(config, VerifyConfig()) == config


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"layers": 2},
            r"2 layers are too few for the 3 kinds of masks of 6: windows \(9, None, 5\)[\s\S]*at least 3 layers",
        ),
        ({"layers": 7}, r"layers=7 cuts nothing: the run has 6 layers[\s\S]*at most 6"),
        ({"tokens": 49}, r"tokens=49 cuts nothing: the run has 48 tokens[\s\S]*at most 48"),
        ({"tokens": 9}, r"a window of 9 would mask nothing in rows of 9 tokens[\s\S]*more than 9 tokens"),
    ],
)
def test_what_would_hide_a_mask_is_refused(changes: dict[str, int], error: str) -> None:
    with pytest.raises(SpecError, match=error):
        cut(deep(), VerifyConfig(**changes))


def test_a_window_that_hides_nothing_anyway_is_no_reason_to_refuse() -> None:
    config = deep(model__windows=[100, None] * 3)
    assert cut(config, VerifyConfig(tokens=8)).data.seq_len == 8
