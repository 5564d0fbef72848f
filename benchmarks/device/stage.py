"""Run one stage in a new process, so that a broken device or a hang does not affect other stages.

    python -m benchmarks.device.stage 2 '{"device": "cuda", ...}'

Rows go to stdout, one JSON object per line; all other output goes to stderr.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from itertools import chain

import torch

from benchmarks.device.rows import HARD_SECONDS, Check, Options, Row, run_stage

STAGES = {
    1: ("kernels against fp64", ("kernels",)),
    2: ("attention and a training step on one rank, compared with plain SDPA", ("step", "attention")),
    3: ("several ranks", ("ranks",)),
    4: ("compiled code, CUDA graphs, a trace", ("compiled",)),
}
"""Title of each stage, and the modules whose `checks` it runs."""


def rows_of(stage: int, options: Options, seconds: float = HARD_SECONDS) -> Iterator[Row]:
    """Yield the rows of a stage as they arrive, and a failing row if its process was killed or failed."""
    command = [sys.executable, "-m", "benchmarks.device.stage", str(stage), json.dumps(asdict(options))]
    quiet = os.environ | {"KINETO_LOG_LEVEL": "99"}  # silences the profiler's messages at each start and stop
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=quiet) as process:
        late = threading.Event()

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)  # and the ranks that the process started

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            assert process.stdout is not None, "stdout is a pipe"
            for line in process.stdout:
                yield Row(**json.loads(line))
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if late.is_set():
        reason = f"killed after {seconds:.0f} seconds; the check that was running is not listed above"
    elif code:
        reason = f"the process was killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    else:
        return
    yield Row(stage, "the rest of the stage", "fails", reason)


def checks(stage: int, options: Options) -> Iterator[Check]:
    """Yield the checks of a stage lazily."""
    modules = (import_module(f"benchmarks.device.{name}") for name in STAGES[stage][1])
    return chain.from_iterable(module.checks(options) for module in modules)


def main() -> None:
    stage, options = int(sys.argv[1]), Options(**json.loads(sys.argv[2]))
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if options.quick:
        torch.set_num_threads(1)
    for row in run_stage(stage, checks(stage, options)):
        print(json.dumps(asdict(row)), file=rows, flush=True)


if __name__ == "__main__":
    main()
