import torch
import torch.distributed as dist

from longspan import ContextParallel, Mask

dist.init_process_group("gloo")
cp = ContextParallel(dist.group.WORLD, layout="zigzag", route="ring")
torch.manual_seed(0)  # the same global tensors on every rank: 8 query heads, 2 KV heads
q, k, v = (torch.randn(1, heads, 4096, 64) for heads in (8, 2, 2))
with cp.sequence(Mask.documents([3000, 1096])) as seq:
    local = seq.shard({"q": q, "k": k, "v": v}, dim=2)  # 4096 tokens -> this rank's 2048
    out = seq.attention(local["q"], local["k"], local["v"])  # exact, differentiable
    full = seq.unshard(out, dim=2)  # 2048 -> 4096, on every rank
print(f"rank {cp.rank}: {tuple(out.shape)} of {tuple(full.shape)}, mean {full.mean():.6f}")
dist.destroy_process_group()
