"""The line that `serve(progress=)` shows on a terminal."""

import sys
from io import StringIO

import pytest

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import TEXT, managed

pytest.importorskip("transformers")
pytest.importorskip("rich")
from rich.console import Console

import memstate.integrations.transformers as mst


def test_a_line_says_what_is_done_and_what_was_found() -> None:
    model, out = tiny("lfm2"), StringIO()
    terminal = Console(file=out, force_terminal=True, width=160)
    prompts = [mst.Prompt(TEXT[:19], number, most=4) for number in range(3)]
    served = list(mst.serve(model, managed(model, max_requests=1), prompts, progress=terminal))
    last = out.getvalue().splitlines()[-2:]
    assert "3 done, 0 running, 0 waiting · 12 tokens, " in "".join(last)
    assert "32 prompt tokens found in a cache" in "".join(last)
    assert sum(one.cached for one in served) == 32


def test_a_line_without_rich_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("lfm2")
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert [one.reason for one in mst.serve(model, managed(model), [mst.Prompt(TEXT, most=1)])] == ["length"]
    with pytest.raises(ms.ConfigurationError, match=r"'\.\[cli\]' in a checkout"):
        list(mst.serve(model, managed(model), [TEXT], progress=True))
