"""Tensor parallelism, context parallelism and FSDP2 in a loop of one's own: two steps on four ranks, tp 2 x cp 2.

torchrun --nproc-per-node 4 examples/axes.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from longspan import ContextParallel, Mask, Topology
from longspan.comm.launch import join_world, leave_world
from longspan.data import Batch
from longspan.model import Decoder, ModelConfig, apply_tensor_parallel, mean_loss_scale
from longspan.topology import check_model
from longspan.train.axes import shape_of

config = ModelConfig(
    vocab_size=256, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=176, init_std=0.1
)
topology = Topology(dp=1, tp=2, cp=2)
check_model(topology, shape_of(config))
meshes = join_world(topology, timedelta(minutes=5), threads=1, device="cpu")

with torch.device("meta"):
    model = Decoder(config, seed=0)
apply_tensor_parallel(model, meshes.weights["tp"], sequence=True)
for unit in (*model.blocks, model):
    fully_shard(unit, mesh=meshes.weights["shard"])  # averages gradients over its two ranks
model.to_empty(device="cpu")
model.init_weights()  # each rank draws its own part
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

# Slots of a CP shard are cut by tp too, so they are a multiple of it; heads are those that tp leaves to a rank.
cp = ContextParallel(meshes.data["cp"], heads=(2, 1), pad_to_multiple_of=2)
batch = Batch.from_documents([list(b"context parallelism, exact, "), list(b"and one command proves it")])
factor = mean_loss_scale(batch.num_targets, meshes.weights["shard"].size())
for step in range(2):
    with cp.sequence(Mask.documents(batch.lengths), ids=batch.digest()) as sequence:
        local = sequence.shard(batch.tensors(), dim=1)
    ids, positions, labels = (local[name] for name in ("input_ids", "position_ids", "labels"))
    loss = model(ids, positions, lambda q, k, v, mask: sequence.attention(q, k, v, mask=mask), labels)
    (loss * factor).backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach() / batch.num_targets
    dist.all_reduce(total, group=meshes.data["cp"].get_group())  # TP ranks know the same sum
    if dist.get_rank() == 0:
        print(f"step {step + 1}: {total:.6f} nats per token")
leave_world()
