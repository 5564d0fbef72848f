"""Mark kernel calls that longspan makes itself, so that the drop-in does not intercept them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


@contextmanager
def own_kernel() -> Iterator[None]:
    """Mark kernel calls of this thread inside the block as longspan's."""
    _thread.own = True
    try:
        yield
    finally:
        _thread.own = False


def is_own_kernel() -> bool:
    """Whether this thread is inside `own_kernel`."""
    return getattr(_thread, "own", False)
