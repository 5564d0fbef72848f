"""The training loop: assemble the parts on this rank, step, evaluate, save, report."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from longspan.advise.memory import Budget, budget_of
from longspan.comm.devices import check_devices, device_type
from longspan.comm.launch import join_world, launch, leave_world
from longspan.comm.meshes import Meshes
from longspan.comm.torchrun import local_ranks, under_torchrun
from longspan.comm.traffic import record
from longspan.data import TokenStore, eval_batches, open_store, unigram_entropy
from longspan.errors import CheckpointError, DivergedError, SpecError
from longspan.model import TransformersConfig
from longspan.train import checkpoint
from longspan.train.axes import nodes_of, run_shape, topology_of
from longspan.train.flops import Meter, Speed, peak_flops
from longspan.train.memory.preflight import preflight, tell
from longspan.train.memory.start_table import Start, degrees
from longspan.train.memory.transformers_budget import transformers_budget
from longspan.train.micro import visible_pairs
from longspan.train.monitor import Monitor
from longspan.train.parallel import make_stages
from longspan.train.run_loader import make_loader
from longspan.train.step import StepResult, TrainStep, check_plan
from longspan.train.train_config import TrainConfig, model_config
from longspan.train.transformers_micro import probe_model
from longspan.train.usage import Balance, BalanceWatch, gather_usage, measure, pairs_of_step


@dataclass(frozen=True)
class Summary(Speed):
    """Final numbers of a run. Losses, entropy and tokens are the same at every CP degree.

    The speed excludes this process's first step, which warms up caches and allocators.
    """

    steps: int
    tokens: int
    """Tokens of all steps, including the steps before a resume."""
    ranks: int
    loss: float
    """Training loss of the last step, in nats per token."""
    heldout_loss: float | None
    """Latest held-out loss, in nats per token. None without an evaluation."""
    unigram_entropy: float
    """Unigram entropy of the corpus, in nats per token."""
    pairs_imbalance: float
    """Imbalance of visible pairs: max / mean over ranks, averaged over steps."""
    time_imbalance: float
    """Imbalance of the time worked in attention: max / mean over ranks, averaged over steps."""
    run_dir: str
    axes: str = ""
    """Degrees above 1, such as "tp 2, cp 2"."""


def train(
    config: TrainConfig,
    *,
    quiet: bool = False,
    progress: Callable[[int], None] | None = None,
    prepared: bool = False,
) -> Summary | None:
    """Train in the world of a launcher such as torchrun, or start one process per rank. Returns the summary on rank 0,
    else None.

    If the configuration, the corpus or a checkpoint is invalid, raises `SpecError`, `DataError` or `CheckpointError` before
    a process starts. `progress` is called with the number of tokenised documents. `prepared`: whether the caller has
    called `prepare`.
    """
    check_ranks(config)
    if not prepared:
        prepare(config, progress)
    if under_torchrun():
        return run_and_leave(config, quiet)
    return launch(run_and_leave, (config, quiet), topology_of(config).world)


def check_ranks(config: TrainConfig) -> None:
    """Raise `SpecError` if this machine has fewer devices than ranks."""
    check_devices(config.parallel.device, local_ranks(topology_of(config).world))


def reckon(config: TrainConfig, store: TokenStore) -> Start:
    """Compute the memory budget, nodes and steps per epoch of a run before its start."""
    topology = topology_of(config)
    loader = make_loader(config, store, dp_rank=0, dp_size=topology.dp)
    return Start(
        expected(config),
        nodes_of(config, topology),
        loader.steps_per_epoch(topology.dp, config.gradient_accumulation_steps),
    )


def expected(config: TrainConfig) -> Budget:
    """Return the expected memory of each rank on the device of the run."""
    model, device = model_config(config), device_type(config.parallel.device)
    if isinstance(model, TransformersConfig):
        return transformers_budget(config, model, device)
    return budget_of(run_shape(config, model, device))


def prepare(config: TrainConfig, progress: Callable[[int], None] | None = None) -> TokenStore:
    """Check the configuration, corpus and checkpoint of a run before its ranks start, and return the corpus.

    Raises `SpecError`, `DataError` or `CheckpointError`.
    """
    check_plan(config, model_config(config))
    probe_model(config, model_config(config))
    store = prepare_corpus(config, progress)
    folder = checkpoint.newest(config.run_dir)
    if config.export:
        checkpoint.check_export(model_config(config))
        if not config.resume and (config.run_dir / "model").exists():
            raise CheckpointError(
                f"{config.run_dir / 'model'} exists: export would overwrite the weights of another run",
                hint="choose another run_dir, remove this folder, or set export=false",
            )
    if folder is not None and not config.resume:
        raise CheckpointError(
            f"{folder} exists: this run would overwrite the checkpoints of another run",
            hint="set resume=true to continue from this checkpoint, or choose another run_dir",
        )
    if folder is None and config.data.manifest is not None:
        make_loader(config, store, dp_rank=0, dp_size=topology_of(config).dp)
    if folder is not None:
        record = checkpoint.read_record(folder)
        checkpoint.check_model(folder, record, model_config(config))
        if record["step"] > config.steps:
            raise CheckpointError(
                f"{folder} is at step {record['step']}, but steps={config.steps}",
                hint=f"set steps to more than {record['step']}",
            )
        make_loader(config, store, dp_rank=0, dp_size=topology_of(config).dp).load_state_dict(record["loader"])
    return store


def prepare_corpus(config: TrainConfig, progress: Callable[[int], None] | None = None) -> TokenStore:
    """Tokenise the corpus once for all ranks, and raise `SpecError` if its vocabulary exceeds the model's."""
    store = open_store(config.data, progress)
    model = model_config(config)
    if store.vocab_size > model.vocab_size:
        raise SpecError(
            f"the tokenizer has {store.vocab_size} tokens, but model.vocab_size is {model.vocab_size}",
            hint=f"set model.vocab_size to at least {store.vocab_size}",
        )
    return store


def run_and_leave(config: TrainConfig, quiet: bool) -> Summary | None:
    """Call `run`, then leave the world. For a process that runs nothing else."""
    try:
        return run(config, quiet=quiet)
    finally:
        leave_world()


def run(config: TrainConfig, *, quiet: bool = False) -> Summary | None:
    """Run training on this rank. Returns the summary on rank 0, else None. Collective over the world."""
    meshes = join(config)
    rank = dist.get_rank()
    store = open_store(config.data)
    loader = make_loader(config, store, meshes.data["dp"].get_local_rank(), meshes.topology.dp)
    step = TrainStep(make_stages(config, meshes), meshes, config)
    if config.preflight:
        budget = expected(config)
        peaks = preflight(step, budget)
        if rank == 0:
            tell(peaks, budget, config.run_dir, quiet=quiet)
    done, tokens, result = 0, 0, None
    if config.resume and (folder := checkpoint.newest(config.run_dir)) is not None:
        saved = checkpoint.load(folder, step)
        done, tokens = saved.step, saved.tokens
        loader.load_state_dict(saved.loader)
    elif config.resume and rank == 0:
        warnings.warn(f"no checkpoint in {config.run_dir}: training starts at step 1", stacklevel=1)
    heldout: float | None = None
    meter = meter_of(config, meshes.data.device_type, dist.get_world_size())
    tokens_stepping, pairs_stepping, seconds_stepping = 0, 0, 0.0
    balances: list[Balance] = []
    watch = BalanceWatch.of(config)
    with Monitor(config.run_dir, config.steps, done, writes=rank == 0, quiet=quiet, watch=watch) as monitor:
        for index in range(done, config.steps):
            began = time.perf_counter()
            with record("waiting") as calls:
                batches = [next(loader) for _ in range(config.gradient_accumulation_steps)]
                result = step(batches, index)
            check_finite(result, index + 1, config.dtype, step.scale.value)
            seconds = time.perf_counter() - began
            tokens += result.tokens
            row_pairs = sum(visible_pairs(batch, meter.model) for batch in batches)
            stage, dp = (meshes.data[axis].get_local_rank() for axis in ("pp", "dp"))
            usage = gather_usage(measure(rank, step.own_targets, calls, stage, dp, row_pairs, device=step.device))
            pairs = pairs_of_step(usage)
            if index > done:
                tokens_stepping += result.tokens
                pairs_stepping += pairs
                seconds_stepping += seconds
            balances.append(Balance.of(usage))
            monitor.step(index + 1, result, meter.speed(result.tokens, pairs, seconds), tokens, usage)
            last = index + 1 == config.steps
            if _due(config.eval_every, index + 1, last):
                heldout = evaluate(step, config, store)
                monitor.evaluation(index + 1, heldout)
            if _due(config.checkpoint_every, index + 1, last):
                checkpoint.save(config.run_dir, step, checkpoint.Progress(index + 1, tokens, loader.state_dict()))
    if config.export:
        checkpoint.export(config.run_dir, step)
    if rank != 0:
        return None
    return Summary(
        **asdict(meter.speed(tokens_stepping, pairs_stepping, seconds_stepping)),
        steps=config.steps,
        tokens=tokens,
        ranks=dist.get_world_size(),
        loss=result.loss if result else float("nan"),
        heldout_loss=heldout,
        unigram_entropy=unigram_entropy(store),
        pairs_imbalance=_mean([balance.pairs_imbalance for balance in balances]),
        time_imbalance=_mean([balance.time_imbalance for balance in balances]),
        run_dir=str(config.run_dir),
        axes=degrees(meshes.topology),
    )


def meter_of(config: TrainConfig, device_type: str, devices: int) -> Meter:
    """Make the speed meter of a run on `devices` devices of this rank's kind. MFU is None on CPU."""
    peak = peak_flops(torch.cuda.get_device_name(), config.dtype) if device_type == "cuda" else None
    return Meter(model_config(config), config.data.seq_len, devices, peak)


def join(config: TrainConfig) -> Meshes:
    """Join the world and return this rank's meshes, with the degrees of the configuration. Collective."""
    parallel = config.parallel
    timeout = timedelta(seconds=parallel.timeout_seconds)
    return join_world(topology_of(config), timeout, parallel.threads, parallel.device)


def evaluate(step: TrainStep, config: TrainConfig, store: TokenStore) -> float:
    """Return the mean loss over held-out rows, in nats per token. Collective over the world."""
    dp = step.meshes.data["dp"]
    data = config.data
    rows = eval_batches(store, data.seq_len, dp.get_local_rank(), dp.size(), config.eval_rows, data.fit_options)
    return step.evaluate(list(rows))


def check_finite(result: StepResult, step: int, dtype: str, scale: float) -> None:
    """Raise `DivergedError` after a skipped step. fp16 may skip steps while its loss scale is at least 1."""
    if result.skipped and (dtype != "fp16" or scale < 1):
        raise DivergedError(
            f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}: the run has diverged",
            hint="lower optim.lr, raise optim.warmup_steps, or set optim.clip_norm; then resume=true from the newest checkpoint",
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _due(every: int | None, step: int, last: bool) -> bool:
    return every is not None and (last or step % every == 0)
