"""Speed by hand, and the same FLOPs at every degree, however often attention runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.data import Batch
from longspan.model.model_config import ModelConfig
from longspan.train.flops import PEAKS, Meter, multiplying_parameters, peak_flops, step_flops
from longspan.train.micro import visible_pairs
from longspan.train.run import meter_of
from longspan.train.usage import pairs_of_step
from tests.train.test_checkpoint import train
from tests.train.test_usage import used
from tests.train.tiny import make_config, write_corpus

SMALL = ModelConfig(
    vocab_size=100,
    hidden_size=8,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=16,
    windows=(None, 2, None),
)


def test_a_step_by_hand() -> None:
    # A layer: q and o 8 x 8, k and v 8 x 4: 192. Gate, up, down 8 x 16: 384. Three layers 1,728, the head 100 x 8: 2,528.
    assert multiplying_parameters(SMALL) == 3 * (192 + 384) + 800 == 2528
    # Documents of 4 and 3 tokens. Full: 4 * 5 / 2 + 3 * 4 / 2 = 16 pairs. Window 2: 1 + 2 + 2 + 2 and 1 + 2 + 2 = 12.
    pairs = visible_pairs(Batch.from_documents([[1, 2, 3, 4], [5, 6, 7]]), SMALL)
    assert pairs == 16 + 12 + 16
    # 6 * 2,528 * 7 tokens; of each pair 2 heads x (QK and PV, 2 * 4 each) forward, twice that backward: 12 * 2 * 4 = 96.
    flops = 106_176 + 96 * 44
    assert step_flops(SMALL, 7, pairs) == flops == 110_400
    # In 2 s on 4 devices of 1e5 FLOP/s: 13,800 FLOP/s each. Full: a row of 8, so 7 * 8 pairs in each of 3 layers.
    speed = Meter(SMALL, seq_len=8, devices=4, peak=1e5).speed(7, pairs, 2.0)
    assert (speed.tokens_per_second, speed.tokens_per_second_per_device) == (3.5, 0.875)
    assert speed.tflops == pytest.approx(13_800e-12, rel=1e-12)
    assert speed.tflops_full == pytest.approx((106_176 + 96 * 168) / 8 * 1e-12, rel=1e-12)
    assert speed.mfu == pytest.approx(0.138, rel=1e-12)
    assert Meter(SMALL, 8, 4, None).speed(7, pairs, 2.0).mfu is None


def test_a_shared_prompt_is_attended_once() -> None:
    # The prompt's last token begins each response: documents of 1, 2 and 3 tokens, the latter two seeing the first as well.
    model = SMALL.model_copy(update={"num_layers": 1, "windows": ()})
    assert visible_pairs(Batch.from_shared_prompt([1, 2], [[3], [4, 5]]), model) == 1 + (2 + 3) + (3 + 6)


def test_tied_embeddings_count_once_and_of_experts_those_that_are_active() -> None:
    tied = SMALL.model_copy(update={"tie_embeddings": True})
    assert multiplying_parameters(tied) == 2528
    experts = {"num_experts": 16, "top_k": 2, "intermediate_size": 5, "shared_intermediate_size": 3}
    moe = ModelConfig.model_validate(SMALL.model_dump() | {"intermediate_size": None, "experts": experts})
    # Router 8 x 16, two of the experts and the shared one 3 x 8 x (2 * 5 + 3).
    assert multiplying_parameters(moe) == 3 * (192 + 128 + 312) + 800


def test_llama_3_8b() -> None:
    """8.03 billion parameters, of which the embedding, 128,256 x 4,096, and 65 norms of 4,096 do not multiply."""
    model = ModelConfig(
        vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, intermediate_size=14336
    )
    assert model.num_parameters == 8_030_261_248
    assert multiplying_parameters(model) == 8_030_261_248 - 128256 * 4096 - 65 * 4096


def test_rows_of_ranks_that_share_them_count_once() -> None:
    ranks = [replace(used(rank), dp=rank // 2, row_pairs=10 * (1 + rank // 2)) for rank in range(4)]
    assert pairs_of_step(ranks) == 10 + 20


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 19.5),
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA H100 NVL", 835, 60),
        ("NVIDIA H800", 989, 67),
        ("NVIDIA H200", 989, 67),
        ("NVIDIA H200 NVL", 835, 60),
        ("NVIDIA GH200 480GB", 989, 67),
        ("NVIDIA H20", 148, 44),
        ("NVIDIA B200", 2250, 75),
        ("NVIDIA GB200", 2500, 80),
        ("NVIDIA L40S", 362, 91.6),
        ("NVIDIA L40", 181, 90.5),
        ("AMD Instinct MI300X", 1307, 163.4),
    ],
)
def test_peaks_by_the_name_of_the_device(name: str, bf16: float, fp32: float) -> None:
    found = [peak_flops(name, dtype) for dtype in ("bf16", "fp16", "fp32", "fp64")]
    assert found == [bf16 * 1e12, bf16 * 1e12, fp32 * 1e12, None]


@pytest.mark.parametrize(
    "name", ["", "cpu", "NVIDIA GeForce RTX 4090", "NVIDIA A10G", "NVIDIA A100X", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_other_devices_have_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16") is None


def test_the_meter_of_a_run_has_the_peak_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    config = make_config(dtype="bf16")
    assert meter_of(config, "cuda", 8) == Meter(config.model, 48, 8, 989e12)
    assert meter_of(config, "cpu", 8).peak is None


def test_a_name_has_one_peak() -> None:
    """Of two keys that a name holds, one holds the other: the longer one wins, whatever their order."""
    for key in PEAKS:
        assert {other for other in PEAKS if set(other) <= set(key)} == {key, key[:1]}


def test_flops_are_the_same_at_every_degree_and_with_recomputation(tmp_path: Path) -> None:
    """FLOPs, which are FLOP/s x seconds x devices, are those of the rows alone."""
    write_corpus(tmp_path)
    cases: list[dict[str, Any]] = [
        {}, {"recompute": "full"}, {"parallel__cp": 2}, {"parallel__cp": 4, "recompute": "full"},
        {"parallel__dp": 2, "gradient_accumulation_steps": 1}, {"parallel__tp": 2, "parallel__pp": 2},
    ]  # fmt: skip
    flops = []
    for number, case in enumerate(cases):
        changes = {
            "gradient_accumulation_steps": 2,
            "model__windows": [None, 9],
            "model__num_kv_heads": 2,
            "parallel__layout": "striped",
        }
        config = make_config(tmp_path, steps=3, run_dir=str(tmp_path / f"run-{number}"), **(changes | case))
        summary = train(config)
        lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
        devices = len(lines[0]["ranks"])
        flops.append([line["tflops"] * 1e12 * line["seconds"] * devices for line in lines])
        # The summary is that of all steps but the first, by the same definition.
        seconds = sum(line["seconds"] for line in lines[1:])
        assert summary["tflops"] * 1e12 * devices * seconds == pytest.approx(sum(flops[-1][1:]), rel=1e-9)
        assert summary["tokens_per_second_per_device"] == pytest.approx(2 * 96 / seconds / devices, rel=1e-9)
        assert summary["mfu"] is None
    # Projections of two layers 2 * (4 * 16 * 16 + 3 * 16 * 32) and the head 256 * 16, for 96 tokens of which each sees itself.
    assert all(count > 6 * 96 * (2 * 2560 + 4096) + 12 * 16 * 2 * 96 for count in flops[0])
    for case, seen in zip(cases, flops, strict=True):
        assert seen == pytest.approx(flops[0], rel=1e-9), case
