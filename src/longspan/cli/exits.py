"""What a user sees when something cannot be done: `error: ...`, a blank line, `hint: ...` on stderr, exit code 2.

Our errors are told in a few words; any other exception is a bug of ours and keeps its traceback.
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
    """An error on its way to stderr."""

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: IO[Any] | None = None) -> None:
        text = f"error: {self.message}" if self.hint is None else f"error: {self.message}\n\nhint: {self.hint}"
        click.echo(text, file=file, err=file is None)


class Interruption(Failure):
    """Ctrl-C, or a termination, on its way to stderr."""

    exit_code = 130


def friendly(function: Callable[P, R]) -> Callable[P, R]:
    """Turn a `LongspanError` or a pydantic `ValidationError` of a command's function into a `Failure`.

    Goes below `@click.command`. Catches neither `KeyboardInterrupt` nor errors that nobody raised on purpose.
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
                "interrupted; all ranks were ended", "a run that wrote checkpoints goes on with resume=true"
            ) from error

    return wrapped


def _describe(error: ValidationError) -> tuple[str, str]:
    """Each value that is not valid, where it stands and why; and what to do: what our own checks say, if they were asked."""
    lines = [f"{error.title}: {error.error_count()} value{'s' * (error.error_count() != 1)} not valid"]
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
            reason = "is not a key that is known"
        else:
            reason = f"{problem['msg']} (got {problem['input']!r})"
        lines.append(f"  {place}: {reason}" if place else f"  {reason}")
    return "\n".join(lines), "; ".join(hints) or "correct them in the configuration file or with --set name=value"
