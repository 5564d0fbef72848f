"""Python as on a machine with one GPU, ranks that are spawned included: for subprocesses, by this folder on PYTHONPATH.

Whatever really asks for the GPU raises, since torch is built without CUDA.
"""

import torch

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
