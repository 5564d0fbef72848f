"""A decoder with explicit positions, its loss, and Hugging Face Llama folders in and out.

The public names are listed in `__init__.pyi`. Each loads on first use, so that a run's configuration is read without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
