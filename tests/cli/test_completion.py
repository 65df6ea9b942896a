"""Shells complete commands, options and names: what the scripts of `memstate --show-completion` ask for."""

import pytest

from tests.support.command import memstate


def completed(shell: str, words: str, patch: pytest.MonkeyPatch) -> str:
    """What a shell is told when the cursor stands behind these words."""
    last = len(words.split(" ")) - 1
    asked = {
        "bash": {"COMP_WORDS": words, "COMP_CWORD": str(last)},
        "zsh": {"_TYPER_COMPLETE_ARGS": words},
        "fish": {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
        "powershell": {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_WORD_TO_COMPLETE": words.split(" ")[last]},
    }[shell]
    for name, value in {"_MEMSTATE_COMPLETE": f"complete_{shell}", **asked}.items():
        patch.setenv(name, value)
    return memstate().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
@pytest.mark.parametrize(
    ("words", "found"),
    [("memstate cap", "capacity"), ("memstate bench --pe", "--peer"), ("memstate bench lau", "launches")],
)
def test_shells_complete(shell: str, words: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found in completed(shell, words, monkeypatch)
    assert found not in completed(shell, "memstate replay ", monkeypatch)
