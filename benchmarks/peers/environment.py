"""The peers' environment, `.venv-peers`: created from requirements/peers.txt, and entered by re-executing the command."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = ROOT / ".venv-peers"
REQUIREMENTS = ROOT / "requirements" / "peers.txt"
TORCH = "torch==2.13.0"


def enter_environment(module: str) -> None:
    """Re-execute as `python -m module` in the environment, created first if needed. Return if this process runs in it."""
    if Path(sys.prefix) == ENVIRONMENT:
        return
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / ".installed"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"creating {ENVIRONMENT.name} from {REQUIREMENTS.relative_to(ROOT)}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        # Pin torch next to the file, so that no peer's requirement selects another build.
        pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, TORCH, "-r", REQUIREMENTS], check=True)
        stamp.write_text(wanted)
    # longspan is imported from the sources, so that the environment does not depend on its version.
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "DS_ACCELERATOR": "cpu",
        "KINETO_LOG_LEVEL": "99",  # silences the profiler
        # DeepSpeed compiles an operator at initialisation: keep the binary in the environment, not in the user's home.
        "TORCH_EXTENSIONS_DIR": str(ENVIRONMENT / "extensions"),
    }
    os.execve(python, [str(python), "-m", module, *sys.argv[1:]], environment)
