"""A decoder with explicit positions, its loss, and conversion from and to Hugging Face Llama folders.

`__init__.pyi` lists the public names. Each is imported on first use, so that a configuration can be read without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
