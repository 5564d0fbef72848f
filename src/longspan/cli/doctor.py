"""`longspan doctor`: which backends and attention kernels run on this machine, and why the other kernels do not."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn.attention import current_flash_attention_impl

from longspan.kernels.capability import capability
from longspan.kernels.choice import KERNELS, choose_auto
from longspan.kernels.protocol import BackwardInputs
from longspan.plan import Shape

_PACKAGES = ("longspan", "torch", "numpy", "pyarrow", "tokenizers", "safetensors", "matplotlib", "transformers")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool) -> None:
    """List the backends, packages and attention kernels of this machine, and why a kernel does not run."""
    findings = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "cuda_devices": torch.cuda.device_count(),
        "backends": {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()},
        "packages": {name: _version(name) for name in _PACKAGES},
        "attention": attention(),
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


def attention() -> dict[str, str]:
    """Return the kernel that "auto" takes at head dim 128 on each device and dtype, and why faster kernels are refused."""
    found = {}
    for name, device in _devices().items():
        for dtype in _DTYPES:
            q = torch.empty(1, 1, 128, 128, dtype=dtype, device=device)
            kernel, passed_over = choose_auto(q, q, q, regular=True)
            if device.type == "cpu":
                text = kernel
            else:
                others, _ = choose_auto(q, q, q)
                text = kernel if kernel == others else f"{kernel} for full and causal tiles, else {others}"
                text = "; ".join([_described(text), *(f"not {faster}: {why}" for faster, why in passed_over.items())])
            found[f"{name} {str(dtype).removeprefix('torch.')}"] = text
    return found


def _described(text: str) -> str:
    """Add the implementation behind `sdpa` on CUDA: FlashAttention-2, unless the program activated another one."""
    active = current_flash_attention_impl() or "FlashAttention-2"
    return text.replace("sdpa", f"sdpa ({active})")


def _devices() -> dict[str, torch.device]:
    devices = {"cpu": torch.device("cpu")}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        major, minor = capability(device)
        devices[f"cuda:{index} ({torch.cuda.get_device_name(device)}, {major}.{minor})"] = device
    return devices


def kernels() -> dict[str, str]:
    """Run a small tile forward and backward on each kernel, device and dtype. Return "runs" or why the kernel failed."""
    found = {}
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for dtype in _DTYPES:
            q = torch.randn(1, 2, 8, 16).to(device, dtype)
            for name, kernel in KERNELS.items():
                found[f"{name} {device} {str(dtype).removeprefix('torch.')}"] = kernel.refusal(q, q, q) or _try(name, q)
    return found


def _try(name: str, q: torch.Tensor) -> str:
    kernel, shape = KERNELS[name], Shape(8, 8, 0, 7)
    try:
        out, lse = kernel.forward(q, q, q, (shape,), 0.25)
        kernel.backward(BackwardInputs(out, q, q, q, out, lse), (shape,), 0.25)
    except RuntimeError as error:
        return f"fails: {str(error).splitlines()[0]}"
    return "runs"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
