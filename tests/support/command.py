"""Runs `memstate ...` through its entry point, in the process of the tests."""

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any, NamedTuple

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


def report(*arguments: object) -> Any:
    """Runs a `memstate` command that writes its report to stdout, and nothing else, and returns the report."""
    done = memstate(*arguments, "--json", "-")
    assert (done.status, done.err) == (0, "")
    return json.loads(done.out)
