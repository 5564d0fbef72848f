"""Train transformers on sequences too long for one device: exact context parallelism for PyTorch.

The public names are listed in `__init__.pyi`. Each loads on first use, so that planning and the command line start without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
