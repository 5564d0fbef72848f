"""`longspan doctor`: what of longspan can run on this machine, and why the rest cannot."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from longspan.attention.kernel import KERNELS
from longspan.plan import Shape

_PACKAGES = ("longspan", "torch", "numpy", "pyarrow", "tokenizers", "safetensors", "matplotlib", "transformers")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool) -> None:
    """Say which backends and attention kernels run here, for which types, and why others do not."""
    findings = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "cuda_devices": torch.cuda.device_count(),
        "backends": {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()},
        "packages": {name: _version(name) for name in _PACKAGES},
        "kernels": kernels(),
    }
    if as_json:
        click.echo(json.dumps(findings))
        return
    table = Table(show_header=False, box=None)
    for name, value in findings.items():
        lines = [f"{key}: {state}" for key, state in value.items()] if isinstance(value, dict) else [str(value)]
        table.add_row(name.replace("_", " "), "\n".join(lines))
    Console(highlight=False).print(table)


def kernels() -> dict[str, str]:
    """For each kernel, device and type: "runs", or why it does not; found by running one small tile forward and backward."""
    found = {}
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            q = torch.randn(1, 2, 8, 16).to(device, dtype)
            for name, kernel in KERNELS.items():
                found[f"{name} {device} {str(dtype).removeprefix('torch.')}"] = kernel.refusal(q, q, q) or _try(name, q)
    return found


def _try(name: str, q: torch.Tensor) -> str:
    kernel, shape = KERNELS[name], Shape(8, 8, 0, 7)
    try:
        out, lse = kernel.forward(q, q, q, (shape,), 0.25)
        kernel.backward(out, q, q, q, out, lse, (shape,), 0.25)
    except RuntimeError as error:
        return f"fails: {str(error).splitlines()[0]}"
    return "runs"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
