"""Build every causal model type of the installed transformers at tiny size; run it on two ranks, and alone; compare.

python -m benchmarks.survey                    every type; a table on stdout
python -m benchmarks.survey llama gemma2       these types
python -m benchmarks.survey --write            also docs/reference/hf-models.md
"""

import copy
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longspan import ContextParallel, hf
from longspan.comm.in_memory import run
from longspan.errors import SpecError
from longspan.hf.model_check import check
from longspan.hf.shrink import shrink
from longspan.names import IGNORED

LENGTHS = (44, 4)
"""Tokens of the two documents of the row."""
THRESHOLD = 32
"""Windows, chunks and other lengths at which a model changes: more than the 24 tokens of a shard, fewer than a document."""
_BLOCK = 4
"""Keys of a block, for models that select blocks of keys: far fewer than a document."""
EXACT, ISLANDS = (1e-12, 1e-9), (1e-7, 1e-4)
"""Bounds of the loss, and of each gradient relative to its size: in fp64, and where the model computes parts in fp32."""
TABLE = Path(__file__).parents[1] / "docs" / "reference" / "hf-models.md"


@dataclass(frozen=True)
class Entry:
    """What became of one type: "equal", "refused", "different" or "not built"."""

    kind: str
    cls: str
    verdict: str
    detail: str = ""
    loss_error: float | None = None
    gradient_error: float | None = None
    islands: str = ""
    """Operation that computes in fp32 though the model is in fp64, for an equality within the wider bounds."""
    seconds: float = 0.0


@click.command(help=__doc__)
@click.argument("kinds", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON record instead of the table.")
@click.option("--write", is_flag=True, help=f"Write {TABLE.name}.")
@click.option("--limit", default=20.0, show_default=True, help="Seconds of computing after which a type is given up.")
def main(kinds: tuple[str, ...], as_json: bool, write: bool, limit: float) -> None:
    if unknown := sorted(set(kinds) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        raise click.UsageError(f"no causal model type of transformers {transformers.__version__}: {', '.join(unknown)}")
    chosen = list(kinds or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    entries = []
    with click.progressbar(chosen, file=sys.stderr, item_show_func=lambda kind: kind or "") as bar:
        for kind in bar:
            entries.append(survey_apart(kind, limit))
    if write:
        TABLE.write_text(page(entries))
    if as_json:
        click.echo(
            json.dumps({"transformers": transformers.__version__, "types": [asdict(e) for e in entries]}, indent=1)
        )
    else:
        click.echo("\n".join(table(entries)))
        click.echo(summary(entries))
    if any(entry.verdict == "different" for entry in entries):
        raise SystemExit(1)


def survey_apart(kind: str, limit: float) -> Entry:
    """Survey one type in a process of its own, which is killed after `limit` seconds of computing."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_send, args=(kind, there), daemon=True)
    process.start()
    there.close()
    try:
        while not here.poll(0.2):
            if _cpu_seconds(process.pid or 0) > limit:
                return Entry(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], "not built", f"slower than {limit:g} s")
        return here.recv()
    except EOFError:
        return Entry(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], "not built", "the process died")
    finally:
        process.kill()
        process.join()


def _send(kind: str, pipe: Connection) -> None:
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    pipe.send(survey(kind))


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def survey(kind: str) -> Entry:
    """Build one type, check it, and if the check passes compare two ranks with one."""
    began = time.process_time()
    name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def entry(verdict: str, detail: str = "", *errors: Any) -> Entry:
        return Entry(kind, name, verdict, detail, *errors, seconds=round(time.process_time() - began, 1))

    row = documents()
    try:
        cls, config = settings(kind)
        with torch.device("meta"):
            large = cls(copy.deepcopy(config))
        small = shrink(cls, config, torch.cat(row, 1)[:, : max(LENGTHS)], torch.float64)
    except Exception as error:
        return entry("not built", _line(error))
    try:
        check(large, sum(LENGTHS))
    except SpecError as refusal:
        text = refusal.message.partition(" on a sharded sequence: ")[2] or refusal.message
        return entry("not built" if "could not be probed" in text else "refused", text)
    try:
        loss, wanted, islands = alone(small, row)
    except Exception as error:
        return entry("not built", _line(error))
    try:
        loss_error, gradient_error = errors_at_two_ranks(small, row, loss, wanted)
    except SpecError as refusal:
        return entry("refused", f"hf.sequence: {_line(refusal)}")
    except Exception as error:
        return entry("different", _line(error))
    errors = loss_error, gradient_error
    if _within_bounds(errors, EXACT):
        return entry("equal", "", *errors)
    same = bool(islands) and _within_bounds(errors, ISLANDS)
    return entry("equal" if same else "different", "", *errors, islands)


def _within_bounds(errors: tuple[float, float], bounds: tuple[float, float]) -> bool:
    return all(error <= bound for error, bound in zip(errors, bounds, strict=True))


def settings(kind: str) -> tuple[Any, Any]:
    """Return class and configuration of a type: its default, with `THRESHOLD` for every length, and without dropout.

    A default that leaves sizes open gets them from its width and heads.
    """
    config = CONFIG_MAPPING[kind]()
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    cls = cls[0] if isinstance(cls, tuple) else cls
    if not isinstance(config, cls.config_class):
        config = config.get_text_config(decoder=True)
    for each in _within(config):
        for name, value in list(vars(each).items()):
            if re.search("drop|jitter", name) and isinstance(value, float):
                vars(each)[name] = 0.0
            elif _is_threshold(name) and type(value) is int and value > THRESHOLD:
                vars(each)[name] = THRESHOLD
            elif name.endswith("block_size") and type(value) is int:
                vars(each)[name] = _BLOCK
            elif name == "rope_parameters" and isinstance(value, dict):
                for part in [value, *(x for x in value.values() if isinstance(x, dict))]:
                    part.update({key: THRESHOLD for key in part if key == "original_max_position_embeddings"})
            elif value is None:
                _fill(each, name)
        if getattr(each, "is_decoder", None) is False:
            each.is_decoder = True
        if hasattr(each, "pad_token_id") is False:
            each.pad_token_id = None
    return cls, config


def _is_threshold(name: str) -> bool:
    return bool(
        re.search("window|attention_chunk|floor|original_max_position|^local_attention$", name)
        and not re.search("layers|pattern|num_", name)
    )


def _fill(config: Any, name: str) -> None:
    """Say a size that a default leaves open and its model needs."""
    values = vars(config)
    heads, depth = values.get("num_attention_heads"), values.get("num_hidden_layers")
    fillings = {
        "head_dim": values.get("hidden_size", 0) // heads if heads else None,
        "num_key_value_heads": heads,
        "layer_types": ["full_attention"] * depth if depth else None,
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
    }
    values[name] = fillings.get(name)


def _within(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if isinstance(value, transformers.PretrainedConfig):
            yield from _within(value)


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(8, 56, (1, length), generator=generator) for length in LENGTHS]


def alone(model: Any, row: list[Tensor]) -> tuple[float, dict[str, Tensor], str]:
    """Return loss and gradients of the documents, each alone, by the model's own attention, and what runs in fp32."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    targets = sum(length - 1 for length in LENGTHS)
    with _Islands() as islands:
        logits = [model(input_ids=part, use_cache=False).logits for part in row]
    labels = [F.pad(part[:, 1:], (0, 1), value=IGNORED) for part in row]
    loss = torch.stack([loss_of(*pair, targets) for pair in zip(logits, labels, strict=True)]).sum()
    loss.backward()
    return float(loss), gradients(model), islands.first


def errors_at_two_ranks(model: Any, row: list[Tensor], loss: float, wanted: dict[str, Tensor]) -> tuple[float, float]:
    """Return the error of the loss, and the largest error of a gradient relative to its size, on two ranks."""
    ids = torch.cat(row, 1)
    batch = {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
    }
    targets = sum(length - 1 for length in LENGTHS)
    models = [copy.deepcopy(model) for _ in range(2)]

    def train(group: Any, rank: int) -> tuple[float, dict[str, Tensor]]:
        mine = models[rank]
        mine.set_attn_implementation(hf.NAME)
        with hf.sequence(ContextParallel(group), mine, batch) as seq:
            share = loss_of(mine(**seq.inputs).logits, seq.inputs["shift_labels"], targets)
        seq.backward(share)
        return float(share), gradients(mine)

    shares = run(2, train)
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    worst = 0.0
    for name in wanted.keys() | shares[0][1].keys() | shares[1][1].keys():
        parts = [grads[name] for grads in (wanted, *(grads for _, grads in shares)) if name in grads]
        whole = wanted.get(name, torch.zeros_like(parts[0]))
        found = sum(grads.get(name, torch.zeros_like(whole)) for _, grads in shares)
        # A gradient that is rounding alone has no size of its own.
        worst = max(worst, float((found - whole).norm()) / max(float(whole.norm()), 1e-6 * largest))
    return abs(sum(share for share, _ in shares) - loss), worst


def loss_of(logits: Tensor, labels: Tensor, targets: int) -> Tensor:
    """Sum in fp64: transformers computes its loss in fp32."""
    flat = logits.double().flatten(0, 1)
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum") / targets


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class _Islands(TorchFunctionMode):
    """Notes the first operation that makes an fp32 tensor of an fp64 one that needs a gradient."""

    first = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.first and isinstance(out, Tensor) and out.dtype == torch.float32 and out.requires_grad:
            given = [x for x in args if isinstance(x, Tensor)]
            if any(x.dtype == torch.float64 for x in given):
                self.first = getattr(func, "__name__", str(func))
        return out


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def summary(entries: list[Entry]) -> str:
    counts = Counter(entry.verdict for entry in entries)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("equal", "refused", "not built", "different"))


def table(entries: list[Entry]) -> list[str]:
    """The lines of a Markdown table."""
    lines = ["| type | class | | why, or the errors of loss and gradients |", "|---|---|---|---|"]
    for entry in entries:
        text = entry.detail
        if entry.loss_error is not None:
            text = f"{entry.loss_error:.0e}, {entry.gradient_error:.0e}" + (", fp32 islands" if entry.islands else "")
        lines.append(f"| {entry.kind} | {entry.cls} | {entry.verdict} | {text.replace('|', '/')} |")
    return lines


def page(entries: list[Entry]) -> str:
    text = _PAGE.format(
        version=transformers.__version__,
        summary=summary(entries),
        lengths=" and ".join(map(str, LENGTHS)),
        threshold=THRESHOLD,
        shard=sum(LENGTHS) // 2,
        exact=EXACT,
        islands=ISLANDS,
    )
    return "\n".join([text, *table(entries), ""])


_PAGE = """# Models of transformers

Every causal type of transformers {version}, built at tiny size with the layers of its default configuration, and trained
for one step on two ranks and alone: {summary}.
Written by `python -m benchmarks.survey --write`; no list of names decides.

Two documents of {lengths} tokens make a row; windows, chunks and other thresholds of length are {threshold} tokens, a
shard has {shard}; dropout is 0.

- *equal*: the loss is within {exact[0]:g} and every gradient within {exact[1]:g} of the model alone, in fp64; within
  {islands[0]:g} and {islands[1]:g} where the model computes parts in fp32 ("fp32 islands").
- *refused*: by `hf.check`, for the reason given.
- *not built*: the default configuration makes no model, or no small copy of it runs.
"""


if __name__ == "__main__":
    main()
