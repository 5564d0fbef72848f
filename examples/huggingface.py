import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config

from longspan import ContextParallel, hf

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights and rows on every rank
config = Qwen3Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
# Yours: AutoModelForCausalLM.from_pretrained(path, attn_implementation="longspan")
model = AutoModelForCausalLM.from_config(config, attn_implementation="longspan")
hf.check(model, seq_len=4096)  # once: refuses by name what would go wrong on a shard
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
cp = ContextParallel(dist.group.WORLD)  # all ranks share every row
for step in range(4):
    ids = torch.randint(256, (1, 4096))  # a whole row; labels are not shifted
    with hf.sequence(cp, model, {"input_ids": ids, "labels": ids}) as seq:
        loss = model(**seq.inputs).loss  # this rank's share of the mean over all targets
    seq.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total := loss.detach().clone())
    if cp.rank == 0:
        print(f"step {step + 1}: loss {total.item():.4f}")
dist.destroy_process_group()
