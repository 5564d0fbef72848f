"""On which device a tensor travels, by the backends of a group."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from longspan.comm.transport import TorchTransport

CPU, CUDA, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("backends", "of_cpu", "of_cuda"),
    [
        ("cpu:gloo", CPU, CPU),
        ("cpu:gloo,cuda:gloo", CPU, CPU),  # gloo has no messages of CUDA tensors
        ("cpu:gloo,cuda:nccl", CPU, CUDA),
        ("cuda:nccl", SECOND, CUDA),
    ],
)
def test_tensors_travel_where_they_are_if_a_backend_serves_that(backends, of_cpu, of_cuda):
    transport = TorchTransport(dist.group.WORLD)
    with (
        patch.object(dist, "get_backend_config", lambda group: backends),
        patch("torch.cuda.current_device", lambda: 1),
    ):
        assert (transport.carries(CPU), transport.carries(CUDA)) == (of_cpu, of_cuda)
