"""The peers' environment, `.venv-peers`: made from requirements/peers.txt, entered by starting again in it."""

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
    """Make the environment if need be, and go on in it as `python -m module`, unless this process runs there already."""
    if Path(sys.prefix) == ENVIRONMENT:
        return
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / ".installed"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making {ENVIRONMENT.name} from {REQUIREMENTS.relative_to(ROOT)}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        # torch is named beside the file, so that no peer's own requirement picks another build of it.
        pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, TORCH, "-r", REQUIREMENTS], check=True)
        stamp.write_text(wanted)
    # longspan is read from the sources, so that the environment does not change with it.
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "DS_ACCELERATOR": "cpu",
        "KINETO_LOG_LEVEL": "99",  # the profiler would say twice per contender that it ran
        # DeepSpeed compiles an operator when its communication starts: beside it, not in the user's home.
        "TORCH_EXTENSIONS_DIR": str(ENVIRONMENT / "extensions"),
    }
    os.execve(python, [str(python), "-m", module, *sys.argv[1:]], environment)
