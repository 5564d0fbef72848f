"""The stream on which CUDA merges, through a stand-in: kernels on one, sums and hops of gradients on the other, never before
what they need."""

from contextlib import contextmanager
from unittest.mock import patch

import torch

from longspan.attention import executor
from longspan.attention.attention import attention
from longspan.attention.kernel import KERNELS
from longspan.attention.rows import Lane, ReturningGradients
from longspan.attention.sums import Gradient, Output
from longspan.plan import Layout, Mask, plan_attention
from tests.oracle import dense_attention, make_inputs, relative_error
from tests.ranks import run_ranks


class Streams:
    """A main and a side stream that note what is launched on them, and what the other one had launched when they waited."""

    def __init__(self):
        self.current, self.log = "main", {"main": 0, "side": 0}
        self.seen = {"main": 0, "side": 0}
        self.faults, self.done, self.kept = [], [], set()

    def launch(self, what):
        """Something that reads what all earlier launches of the other stream have made."""
        here, other = self.current, {"main": "side", "side": "main"}[self.current]
        if what in ("merge", "hand over", "finish") and self.seen[here] < self.log[other]:
            self.faults.append((what, here))
        self.log[here] += 1
        self.done.append((what, here))

    def stream(self, name):
        streams = self

        class Stand:
            def wait_stream(self, other):
                assert other.name != name
                streams.seen[name] = streams.log[other.name]

        stand = Stand()
        stand.name = name
        return stand

    @contextmanager
    def patched(self):
        main, side = self.stream("main"), self.stream("side")

        @contextmanager
        def on(stream):
            before, self.current = self.current, stream.name
            yield
            self.current = before

        def noting(what, method):
            def call(*arguments, **keywords):
                self.launch(what)
                return method(*arguments, **keywords)

            return call

        kernel = KERNELS["reference"]
        with (
            patch.object(Lane, "on", lambda device: Lane(side)),
            patch("torch.cuda.current_stream", lambda: main if self.current == "main" else side),
            patch("torch.cuda.stream", on),
            patch.object(torch.Tensor, "record_stream", lambda x, stream: self.kept.add((x.data_ptr(), stream.name))),
            patch.object(type(kernel), "forward", noting("kernel", type(kernel).forward)),
            patch.object(type(kernel), "backward", noting("kernel", type(kernel).backward)),
            patch.object(Output, "add", noting("merge", Output.add)),
            patch.object(Gradient, "add", noting("merge", Gradient.add)),
            patch.object(Output, "finish", noting("finish", Output.finish)),
            patch.object(Gradient, "finish", noting("finish", Gradient.finish)),
            patch.object(ReturningGradients, "hand_over", noting("hand over", ReturningGradients.hand_over)),
        ):
            yield self


def _on_two_streams(group, rank):
    S, mask, layout = 26, Mask.documents([9, 17]), Layout.zigzag(26, 2)
    inputs = make_inputs(S)
    want = dense_attention(inputs, mask)
    plan = plan_attention(layout, mask, "exchange")
    positions = torch.from_numpy(layout.positions(rank))
    q, k, v, dout = (x[:, :, positions].clone() for x in inputs)
    with Streams().patched() as streams:
        out = attention(
            q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), plan=plan, group=group, kernel="reference"
        )
        out.backward(dout)
    for got, right in zip((out.detach(), q.grad, k.grad, v.grad), want, strict=False):
        assert relative_error(got, right[:, :, positions]) < 1e-10
    assert len(streams.kept) > 0
    return streams.done, streams.faults


def test_kernels_and_sums_on_streams_of_their_own():
    assert executor.Lane is Lane
    for done, faults in run_ranks(2, _on_two_streams):
        assert faults == [], "something read what had not been waited for"
        assert {place for what, place in done if what == "kernel"} == {"main"}
        assert {place for what, place in done if what in ("merge", "hand over")} == {"side"}
        assert {place for what, place in done if what == "finish"} == {"main"}
