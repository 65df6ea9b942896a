"""Runs `memstate ...` through its entry point, in the process of the tests."""

import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import NamedTuple

import pytest

from memstate.cli import app


class Done(NamedTuple):
    """The exit status and the outputs of a command."""

    status: int
    out: str
    err: str


def memstate(*arguments: object) -> Done:
    """Runs a `memstate` command."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        patch.setattr(sys, "argv", ["memstate", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            app.main()
    return Done(int(left.value.code or 0), out.getvalue(), err.getvalue())
