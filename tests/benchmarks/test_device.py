"""The stages for a first hour on a GPU, on the CPU: the same checks by the same code, and what may stand in a record."""

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from benchmarks.device import __main__, attention, clock, compiled, kernels, ranks, stage, step
from benchmarks.device.case import Case, both
from benchmarks.device.errors import NOISE, of_limit
from benchmarks.device.flops import attention_flops, speed
from benchmarks.device.page import chart, page
from benchmarks.device.record import Record
from benchmarks.device.rows import Check, NotHereError, Options, Row, run_check, run_stage
from click.testing import CliRunner

from longspan.comm.meshes import Meshes
from longspan.kernels import flex
from longspan.kernels.sdpa import SdpaKernel
from longspan.topology import Topology
from tests.kernels.test_flex import Anywhere, StandIn
from tests.oracle import Inputs, dense_attention
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("warm")

CPU = torch.device("cpu")
QUICK = Options("cpu", quick=True)
DeviceType = torch.autograd.DeviceType


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors, on cores that other tests use too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def raising(error):
    def run():
        raise error

    return run


def statuses(rows):
    return [(row.name, row.status, row.reason) for row in rows]


# --- rows


@pytest.mark.parametrize("error", [1.01, float("nan"), float("inf")])
def test_no_figure_of_what_is_off(error):
    row = run_check(1, Check("a", lambda: error, raising(AssertionError("measured"))))
    assert (row.status, row.reason, row.figures) == ("fails", "the error is above its limit", {})
    with pytest.raises(AssertionError, match="a figure without a check that holds"):
        dataclasses.replace(row, figures={"ms": 1.0})


@pytest.mark.parametrize(
    ("compare", "measure", "status", "reason"),
    [
        (lambda: 1.0, lambda: {"ms": 2.0}, "holds", ""),
        (raising(ValueError("so\nand so")), None, "fails", "ValueError: so"),
        (raising(NotHereError("no triton")), None, "absent", "no triton"),
        (raising(torch.OutOfMemoryError("2 GiB")), None, "absent", "OutOfMemoryError: 2 GiB"),
        (lambda: 0.5, raising(RuntimeError("lost")), "fails", "correct, but not measured: RuntimeError: lost"),
        (lambda: 0.5, raising(NotHereError("busy")), "holds", "correct, but not measured: busy"),
    ],
)
def test_whatever_a_check_does_is_a_row(compare, measure, status, reason):
    row = run_check(1, Check("a", compare, measure))
    assert (row.status, row.reason) == (status, reason)
    assert row.figures == ({"ms": 2.0} if (status, reason) == ("holds", "") else {})


def test_a_stage_that_breaks_off_or_is_late_says_so():
    def checks():
        yield Check("a", lambda: 0.1)
        raise KeyError("b")

    assert statuses(run_stage(1, checks())) == [("a", "holds", ""), ("the rest of the stage", "fails", "KeyError: 'b'")]
    late = run_stage(1, [Check("a", raising(AssertionError("run")))], seconds=-1)
    assert statuses(late) == [("a", "late", "the stage's limit of -1 seconds was reached")]


@pytest.mark.parametrize(
    ("number", "seconds", "reason"),
    [(1, 0.5, "killed after 0 seconds; the check that was running is not listed above"), (9, 60, "exit status 1")],
)
def test_a_process_that_hangs_or_ends_is_a_row(number, seconds, reason, capfd):
    rows = list(stage.rows_of(number, QUICK, seconds))
    assert statuses(rows) == [("the rest of the stage", "fails", reason)]


# --- how far off a result may be


def test_limit_is_twice_the_plain_error_and_noise():
    right = [torch.tensor([4.0, -2.0, 0.0, 0.0], dtype=torch.float64)]
    plain, twice = [torch.tensor([4.04, -2.0, 0.0, 0.0])], [torch.tensor([4.04, -2.0, 0.04, 0.0])]
    ours, all_over = [torch.tensor([4.0, -2.0, 0.06, 0.0])], [torch.tensor([4.04, -1.96, 0.04, 0.04])]
    # The greatest counts, 0.06 over 2 * 0.04: the root mean square is 0.06 over 2 * 0.04 * sqrt(2).
    assert of_limit(ours, twice, right) == pytest.approx(0.75, rel=1e-3)
    # The root mean square counts, 4 elements over 2 times 1: the greatest is 0.04 over 2 * 0.04.
    assert of_limit(all_over, plain, right) == pytest.approx(1, rel=1e-3)
    # Plain PyTorch happens to be exact: half a unit of its type is allowed, and for the root mean square noise alone.
    exact, half = [right[0].float()], torch.finfo(torch.float32).eps / 2
    off = [torch.tensor([4.0, -2.0, 4 * half, 0.0], dtype=torch.float64)]
    size = (20 / 4) ** 0.5
    assert of_limit(off, exact, right) == pytest.approx(
        max(half / (2 * half + NOISE), 2 * half / size / NOISE), rel=1e-3
    )
    assert of_limit([torch.full((4,), float("nan"))], plain, right) == float("inf")
    assert of_limit(ours, [torch.full((4,), float("nan"))], right) == float("inf")


def test_no_error_hides_behind_a_better_tensor():
    right = [torch.ones(3, dtype=torch.float64)] * 2
    plain = [torch.tensor([1.001, 1.0, 1.0])] * 2
    assert of_limit([torch.ones(3), torch.tensor([1.004, 1.0, 1.0])], plain, right) == pytest.approx(2, rel=1e-2)


# --- stage 1


def test_one_kernel_by_name_with_changes_of_scores(monkeypatch):
    """`flex` through its stand-in: the places of rows and keys in each call, and one call for the documents."""
    calls = StandIn()
    monkeypatch.setattr(flex, "_compiled", lambda: calls)
    monkeypatch.setitem(kernels.KERNELS, "flex", Anywhere())
    monkeypatch.setattr(kernels, "DTYPES", (torch.float32,))
    rows = list(run_stage(1, kernels.checks(dataclasses.replace(QUICK, kernels=("flex",)))))
    kinds = [*kernels.TILES, "documents", "soft-cap", "soft-cap and ALiBi"]
    assert statuses(rows) == [(f"flex float32 {kind}", "holds", "") for kind in kinds]
    assert len(calls.calls) == 2 * 11


class OneKeyTooMany(SdpaKernel):
    """A causal tile of which each row also sees the next key."""

    def forward(self, q, k, v, shapes, scale, change=None):
        later = torch.cat((k[:, :, 1:], k[:, :, -1:]), 2), torch.cat((v[:, :, 1:], v[:, :, -1:]), 2)
        return super().forward(q, *later, shapes, scale, change)


@pytest.mark.parametrize(("kernel", "status"), [(SdpaKernel(), "holds"), (OneKeyTooMany(), "fails")])
def test_a_wrong_kernel_fails(monkeypatch, kernel, status):
    monkeypatch.setitem(kernels.KERNELS, "sdpa", kernel)
    monkeypatch.setattr(kernels, "DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(kernels, "TILES", {"causal": kernels.TILES["causal"]})
    rows = list(run_stage(1, kernels.checks(dataclasses.replace(QUICK, kernels=("sdpa",)))))
    assert [(row.name, row.status) for row in rows] == [
        ("sdpa bfloat16 causal", status),
        ("sdpa bfloat16 documents", status),
        ("sdpa bfloat16 soft-cap", "absent"),
        ("sdpa bfloat16 soft-cap and ALiBi", "absent"),
    ]


@pytest.mark.nightly
def test_every_kernel_holds_on_cpu():
    rows = list(run_stage(1, kernels.checks(Options("cpu")), seconds=600))
    assert [row for row in rows if row.status == "fails"] == []
    # sdpa: nine kinds in each type; reference: changed scores too.
    assert sum(row.status == "holds" for row in rows) == 3 * 9 + 3 * 11
    absent = {row.name: row.reason for row in rows if row.status == "absent"}
    assert absent["flash2 bfloat16"] == "flash-attn takes bf16 and fp16 on cuda, not torch.bfloat16 on cpu"
    assert absent["flex float32"].startswith("FlexAttention has a backward for")


# --- stage 2: attention


CASE = Case((90, 1, 109), (4, 2), 8, "float32", CPU)


def test_drawn_rows_are_one_in_each_stretch_and_the_last():
    assert CASE.rows.tolist() == sorted(set(CASE.rows.tolist()))
    assert {row // 3 for row in CASE.rows.tolist()} == set(range(67))  # stretches of 200 // 64 tokens
    assert CASE.rows[-1] == 199


def test_right_answer_at_drawn_rows_is_the_dense_one():
    q, k, v = (x.double() for x in CASE.inputs[:3])
    dense = dense_attention(Inputs(q, k, v, CASE.dout.double()), CASE.mask)
    want = [dense.out[:, :, CASE.rows], dense.dq[:, :, CASE.rows], dense.dk, dense.dv]
    for got, expected in zip(CASE._right, want, strict=True):
        assert (got - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("wrong", [None, "scale", "one row", "dv"])
def test_attention_that_is_off_is_seen(wrong):
    attend = attention.one_rank(CASE)

    def off(q, k, v):
        if wrong == "scale":
            q = q * 1.001
        out = attend(q, k, v * 1.001 + (v * -0.001).detach() if wrong == "dv" else v)
        return out * torch.ones_like(out).index_fill(2, CASE.rows[20:21], 1.001) if wrong == "one row" else out

    assert (CASE.error(off) <= 1) == (wrong is None)


def test_attention_by_length_beside_sdpa(monkeypatch):
    monkeypatch.setattr(attention, "cases", lambda options: [CASE, Case((64,), (4, 2), 8, "float32", CPU)])
    rows = list(run_stage(2, attention.checks(QUICK)))
    # Of the kernels that are not slow, CUDA has all but `sdpa` to itself.
    assert [(row.name.split()[0], row.status) for row in rows] == [
        ("flash3", "absent"), ("cudnn", "absent"), ("sdpa", "holds"), ("flash2", "absent"), ("efficient", "absent"),
    ] * 2  # fmt: skip
    figures = rows[7].figures
    assert figures["tflops"] == pytest.approx(14 * (64 * 65 / 2) * 4 * 8 / figures["both_ms"] / 1e9)
    assert figures["over_sdpa"] == figures["both_ms"] / figures["sdpa_both_ms"]
    assert figures["sdpa_backend"] == "FLASH_ATTENTION"
    # At least out, dq, dk, dv, of 4, 4, 2 and 2 heads.
    assert min(figures["peak_mib"], figures["sdpa_peak_mib"]) >= 12 * 64 * 8 * 4 / 2**20


def test_flops_are_counted_by_hand():
    assert attention_flops(pairs=3, num_heads=2, head_dim=4) == (4 + 10) * 3 * 2 * 4
    assert speed(2 * 10**12, 500.0, CPU, torch.bfloat16) == {"tflops": 4.0}


def test_a_known_device_has_a_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    found = speed(989 * 10**12, 2000.0, torch.device("cuda", 0), torch.bfloat16)
    assert found == {"tflops": 494.5, "of_peak": 0.5}


def test_times_on_a_gpu_are_by_events(monkeypatch):
    """A stand-in for the device's clock: a call of "a" takes 2 ms, then 4, 6, ...; one of "b" a tenth of a millisecond."""
    clocks = {"now": 0.0, "a": 0.0}

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at, self.done = clocks["now"], False

        def synchronize(self):
            self.done = True

        def elapsed_time(self, end):
            assert end.done
            return end.at - self.at

    def a():
        clocks["a"] += 2
        clocks["now"] += clocks["a"]

    def b():
        clocks["now"] += 0.1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    found = clock.times({"a": a, "b": b}, torch.device("cuda"))
    # Three calls to warm up, then nine: 8, 10, ..., 24 ms.
    assert found == pytest.approx({"a": 16.0, "b": 0.1})
    assert clocks["a"] == 2 * 12


def test_times_on_busy_cores_are_not_given(monkeypatch):
    monkeypatch.setattr(clock, "foreign_share", lambda *_, **__: 0.2)
    with pytest.raises(NotHereError, match="other programs used more than 3% of the cores in every round"):
        clock.times({"a": lambda: None}, CPU)


# --- stages 2 and 4: a step


def _of_one_rank(group, rank, function, options):
    return function(options, Meshes.of(Topology(dp=1, cp=1), "cpu"))


def test_step_and_its_trace(tmp_path):
    error, figures = run_ranks(1, _of_one_rank, step._compare, QUICK)[0]
    assert 0 < error <= 1
    assert figures["tokens_per_second"] == pytest.approx(512e3 / figures["step_ms"])
    off, traced = run_ranks(1, _of_one_rank, step._trace, dataclasses.replace(QUICK, folder=str(tmp_path)))[0]
    assert off == 0
    assert (tmp_path / traced["file"]).stat().st_size > 1000
    assert traced["busiest"][0]["ms"] >= traced["busiest"][-1]["ms"] > 0


def _off_by_a_thousandth(group, rank, options):
    backward = step.TrainStep.backward

    def off(self, batches):
        backward(self, batches)
        self.stages[0].blocks[0].self_attn.v_proj.weight.grad.mul_(1.001)

    step.TrainStep.backward = off
    try:
        return _of_one_rank(group, rank, step._compare, options)
    finally:
        step.TrainStep.backward = backward


def test_a_step_with_a_wrong_gradient_has_no_figures():
    error, figures = run_ranks(1, _off_by_a_thousandth, QUICK)[0]
    assert error > 10
    assert figures == {}


def test_work_on_a_gpu_is_counted_from_the_trace():
    def event(name, microseconds, on_device=False):
        kind = DeviceType.CUDA if on_device else DeviceType.CPU
        return SimpleNamespace(
            name=name, device_type=kind, device_time_total=microseconds, self_cpu_time_total=microseconds
        )

    events = [event("cudaLaunchKernel", 5), event("cuLaunchKernelEx", 5), event("cudaStreamSynchronize", 900)]
    events += [
        event("flash_fwd", 2000, True),
        event("flash_fwd", 1000, True),
        event("Memcpy DtoH (Device -> Pinned)", 4, True),
    ]
    found = step.work_of(events)
    counts = {"launches": 2, "host_waits": 1, "copies_to_host": 1, "copies_to_device": 0, "device_ms": 3.004}
    assert {name: found[name] for name in counts} == pytest.approx(counts)
    assert found["busiest"][0] == {"name": "flash_fwd", "calls": 2, "ms": 3.0}
    assert step.work_of(events[:3]) == {
        "busiest": [{"name": "cudaStreamSynchronize", "calls": 1, "ms": 0.9}]
        + [{"name": name, "calls": 1, "ms": 0.005} for name in ("cudaLaunchKernel", "cuLaunchKernelEx")]
    }


# --- stage 3


@pytest.mark.parametrize("route", ["ring", "rotate"])
def test_two_ranks_on_a_route(route):
    """Zigzag cuts documents of 192, 256 and 64 tokens at 128, 256 and 384: the second has rows on both ranks."""
    found = run_ranks(2, ranks._route, CPU, route, QUICK)
    assert all(0 < error <= 1 for error, _ in found)
    figures = found[0][1]
    assert figures["sent_mib"] > 0
    assert figures["speed_up"] == figures["sdpa_one_rank_ms"] / figures["both_ms"]


def test_ranks_on_one_gpu_are_threads(monkeypatch):
    monkeypatch.setattr(ranks, "world", lambda device: (2, "memory"))
    monkeypatch.setattr(ranks, "place", lambda rank, device, nccl: CPU)
    found = ranks.ranks_on_one_device(ranks._route, 2, "cuda", "ring", QUICK)
    assert [0 < error <= 1 for error, _ in found] == [True, True]
    assert found[0][1]["sent_mib"] > 0


@pytest.mark.parametrize(
    ("gpus", "device", "found"),
    [(0, "cpu", (2, "gloo")), (1, "cuda", (2, "memory")), (4, "cuda", (4, "nccl")), (16, "cuda", (8, "nccl"))],
)
def test_how_ranks_meet(monkeypatch, gpus, device, found):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert ranks.world(device) == found
    where = [str(ranks.place(rank, device, found[1] == "nccl")) for rank in range(2)]
    assert where == {"gloo": ["cpu"] * 2, "memory": ["cuda:0"] * 2, "nccl": ["cuda:0", "cuda:1"]}[found[1]]


def test_middle_ranks_hold_a_document_of_their_own():
    """The smallest case in which a ring that leaves idle stages out waits in a circle: documents 2, 4, 2 over 4 ranks."""
    assert [n // 64 for n in ranks._case(QUICK, CPU, 4).lengths] == [2, 4, 2]


# --- stage 4


def test_compiled_attention_and_no_graph_without_a_gpu(monkeypatch):
    monkeypatch.setattr(compiled.step, "trace_checks", lambda options: [])
    rows = list(run_stage(4, compiled.checks(QUICK)))
    assert [row.status for row in rows] == ["holds", "absent"]
    assert rows[1].reason == "CUDA graphs need a GPU"
    assert set(rows[0].figures) == {"first_call_s", "eager_ms", "compiled_ms"}


class Graphs:
    """In the place of CUDA graphs: a replay runs what was captured once more, at the inputs of then, into the same results."""

    def __init__(self, monkeypatch, run_again):
        self.run_again, self.captured = run_again, None
        for name in ("Stream", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, lambda: self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self)
        monkeypatch.setattr(torch.cuda, "graph", lambda graph: self)

    def wait_stream(self, other):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass

    def replay(self):
        self.run_again()


@pytest.mark.parametrize("replayed", [True, False])
def test_graph_is_judged_at_inputs_that_came_after_capture(monkeypatch, replayed):
    graph = compiled._Graph(CASE)
    made = []

    def recorded(attend, inputs):
        run = both(attend, inputs)

        def keep():
            made.append((run, run()))
            return made[-1][1]

        return keep

    def run_again():
        run, results = made[-1]
        for place, x in zip(results, run(), strict=True):
            place.copy_(x)

    monkeypatch.setattr(compiled, "both", recorded)
    Graphs(monkeypatch, run_again if replayed else lambda: None)
    assert (graph.error() <= 1) == replayed
    assert len(made) == 4  # three to warm up, and the captured one


# --- the record, the page and the command


ENVIRONMENT = {"device": "cuda", "devices": ["GPU <A>"], "quick": False, "torch": "2.13"}
ROWS = (
    Row(2, "sdpa causal", "holds", "", 0.5,
        {"seq_len": 4096, "kernel": "sdpa", "documents": 1, "tflops": 300.0, "sdpa_tflops": 350.0,
         "sdpa_backend": "FLASH_ATTENTION"}),
    Row(2, "flash2 <causal>", "absent", "no flash-attn & no way"),
    Row(2, "cudnn causal", "fails", "the error is above its limit", 7.0),
)  # fmt: skip


def test_record_keeps_other_stages_of_the_same_environment(tmp_path):
    path = tmp_path / "device.json"
    Record.of(path, ENVIRONMENT).with_stage(2, ROWS, 10.0).write(path)
    again = Record.of(path, ENVIRONMENT).with_stage(1, [Row(1, "a", "holds", "", 0.1)], 1.0)
    assert list(again.stages) == [1, 2]
    assert again.stages[2].rows == ROWS
    # What is not checked anew stays, and what was found is not lost to a row that was not reached.
    first, *others = ROWS
    newer, late = replace(first, error=0.5), [replace(row, status="late", reason="late", figures={}) for row in others]
    assert list(again.with_stage(2, [newer, *late], 1.0).stages[2].rows) == [newer, *others]
    assert Record.of(path, ENVIRONMENT | {"torch": "2.14"}).stages == {}


class Seen(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "path", "circle", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_says_everything_and_loads_nothing():
    text = page(Record(ENVIRONMENT, {}).with_stage(2, ROWS, 10.0))
    seen = Seen(text)
    assert seen.open == []
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in seen.tags}
    assert not any({"src", "href"} & set(attributes) for _, attributes in seen.tags)
    assert "url(" not in text
    assert "@import" not in text
    for row in ROWS:
        assert row.name in seen.text
        assert not row.reason or row.reason in seen.text
    assert (
        "".join(seen.text).count("3 checks: 1 hold, 1 fail, 1 not here, 0 not reached. Not run yet: stage 1, 3, 4.")
        == 1
    )
    assert "stage 2, cudnn causal: the error is above its limit" in seen.text


def test_chart_is_drawn_to_scale():
    """Two points an octave apart each: the axis is 720 - 56 - 150 wide and 300 - 16 - 40 high, up to 400."""
    seen = Seen(chart({"a": [(1024, 100.0), (2048, 200.0), (4096, 400.0)]}))
    (line,) = [attributes["points"] for tag, attributes in seen.tags if tag == "polyline"]
    assert line == "56.0,199.0 313.0,138.0 570.0,16.0"
    assert seen.text[-4:] == ["1,024", "2,048", "4,096", "a"]


def test_command_without_a_gpu_names_the_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(__main__.main, [])
    assert result.exit_code == 1
    assert result.output == "Error: there is no GPU here\n\nhint: --device cpu runs the same checks on the CPU\n"


@pytest.mark.parametrize(("rows", "code"), [(ROWS[:2], 0), (ROWS, 1), (ROWS[1:2], 1), ((), 1)])
def test_exit_status_is_that_of_the_checks(monkeypatch, tmp_path, rows, code):
    monkeypatch.setattr(__main__, "rows_of", lambda number, options: iter(rows))
    result = CliRunner().invoke(__main__.main, ["--device", "cpu", "--stage", "2", "--output", str(tmp_path)])
    assert result.exit_code == code
    lines = result.stdout.splitlines()
    assert [line[:6].strip() for line in lines[:-1]] == [row.status for row in rows]
    assert [row["name"] for row in json.loads((tmp_path / "device.json").read_text())["stages"]["2"]["rows"]] == [
        row.name for row in rows
    ]
    assert (tmp_path / "device.html").exists()


@pytest.mark.nightly
def test_all_stages_by_the_command(tmp_path):
    """On the CPU, each in its process, with the worlds that stages 2, 3 and 4 start."""
    command = [sys.executable, "-m", "benchmarks.device", "--device", "cpu", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 fail, " in done.stdout.splitlines()[-1]
    record = json.loads((tmp_path / "device.json").read_text())
    holding = {n: [row["name"] for row in s["rows"] if row["status"] == "holds"] for n, s in record["stages"].items()}
    assert {n: len(names) for n, names in holding.items()} == {"1": 3 * 9 + 11, "2": 4, "3": 2, "4": 2}
    assert (tmp_path / "step-trace.json.gz").exists()
