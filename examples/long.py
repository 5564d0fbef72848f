import os

import torch
import torch.distributed as dist

from longspan import ContextParallel, Mask

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
cp = ContextParallel(dist.group.WORLD, route="ulysses", heads=(32, 8))  # query heads, KV heads
with cp.sequence(Mask.documents([100_000, 31_072])) as seq:  # two documents in one row of 131,072 tokens
    shape = seq.layout.num_slots(cp.rank), 128  # this rank's 16,384 tokens, head dim 128
    q, k, v = (torch.randn(1, heads, *shape, device="cuda", dtype=torch.bfloat16) for heads in (32, 8, 8))
    out = seq.attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_())  # over all 131,072 keys, exact
    out.sum().backward()
print(f"rank {cp.rank}: {tuple(out.shape)}, gradient of k {tuple(k.grad.shape)}")
dist.destroy_process_group()
