"""Print an expected error on stderr as `error: ...`, a blank line and `hint: ...`, and exit with code 2.

Any exception but `LongspanError` and pydantic's `ValidationError` is a bug and keeps its traceback.
"""

import functools
from collections.abc import Callable
from typing import IO, Any, ParamSpec, TypeVar

import click
from pydantic_core import ValidationError

from longspan.errors import LongspanError

P = ParamSpec("P")
R = TypeVar("R")


class Failure(click.ClickException):
    """An expected error with an optional hint."""

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: IO[Any] | None = None) -> None:
        text = f"error: {self.message}" if self.hint is None else f"error: {self.message}\n\nhint: {self.hint}"
        click.echo(text, file=file, err=file is None)


class Interruption(Failure):
    """Ctrl-C or a termination signal: exit code 130."""

    exit_code = 130


def friendly(function: Callable[P, R]) -> Callable[P, R]:
    """Convert a `LongspanError` or pydantic `ValidationError` into a `Failure`, and a `KeyboardInterrupt` into an
    `Interruption`.

    Place below `@click.command`. Other exceptions pass through.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except LongspanError as error:
            raise Failure(error.message, error.hint) from error
        except ValidationError as error:
            raise Failure(*_describe(error)) from error
        except KeyboardInterrupt as error:
            raise Interruption(
                "interrupted; all ranks were stopped", "set resume=true to continue from the newest checkpoint"
            ) from error

    return wrapped


def _describe(error: ValidationError) -> tuple[str, str]:
    """Return a message that lists every invalid value with its key and reason, and the hints of longspan's checks."""
    lines = [f"{error.title}: {error.error_count()} invalid value{'s' * (error.error_count() != 1)}"]
    hints = []
    for problem in error.errors(include_url=False):
        place = ".".join(map(str, problem["loc"]))
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, LongspanError):
            reason = cause.message
            hints += [cause.hint] if cause.hint else []
        elif problem["type"] == "missing":
            reason = "is missing"
        elif problem["type"] == "extra_forbidden":
            reason = "unknown key"
        else:
            reason = f"{problem['msg']} (got {problem['input']!r})"
        lines.append(f"  {place}: {reason}" if place else f"  {reason}")
    return "\n".join(lines), "; ".join(hints) or "correct the configuration file, or use --set section.key=value"
