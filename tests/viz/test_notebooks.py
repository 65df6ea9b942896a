"""Runs all notebooks on a CPU and compares their outputs, except pictures, with the stored outputs, in `make docs`.

After a change of outputs, `python -m tests.viz.test_notebooks` runs all notebooks and stores their new outputs;
`python -m tests.viz.test_notebooks 01` runs the notebooks whose names begin with 01.

Sliders are `ipywidgets.interact`. A notebook stores the first output of such a cell, such as a picture, but no slider:
sliders have random ids and need a live kernel. The test moves every slider to both ends.
"""

import os
import sys
from ast import literal_eval
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests import TOOLS

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
VIEW = "application/vnd.jupyter.widget-view+json"  # output type of a slider
PICTURES = ("image/svg+xml", "image/png")
# Code that runs in the kernel after the last cell. It moves each control of each `interact` to its ends and back, and
# shows (control, how often the function raised, number of different results)
MOVE = """
import gc, json
import ipywidgets
_moved = []
for _each in [one for one in gc.get_objects() if issubclass(type(one), ipywidgets.interactive)]:
    for _control in _each.kwargs_widgets:
        _name, _ends = ("index", (0, len(_control.options) - 1)) if hasattr(_control, "options") else (
            "value", (False, True) if isinstance(_control.value, bool) else (_control.min, _control.max))
        _start, _seen, _failed = getattr(_control, _name), set(), 0
        for _end in (*_ends, _start):
            if _end == getattr(_control, _name):
                continue
            _each.result = None
            setattr(_control, _name, _end)
            if _each.result is None:
                _failed += 1
                continue
            _seen.add(json.dumps(get_ipython().display_formatter.format(_each.result)[0]))
        _moved.append((_control.description, _failed, len(_seen)))
_moved
"""
CELL_SECONDS = 120  # ends a cell that hangs: all notebooks together take less than a minute
MOST_BYTES = 400_000


def fresh(path: Path, then: Sequence[str] = ()) -> Any:
    """Runs all cells of a notebook in a kernel of this Python, and returns the notebook with its new outputs.

    The kernel's environment is always the same: no Triton interpreter, no GPU, one thread, 100 columns, no settings of
    a user.

    Args:
        then: code of more cells at the end.
    """
    import nbclient
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    book = nbformat.read(path, as_version=4)
    book.cells += map(nbformat.v4.new_code_cell, then)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with TemporaryDirectory(prefix="nb") as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"IPYTHONDIR": folder, "PYTHONHASHSEED": "0", "COLUMNS": "100"}
        environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(TOOLS), os.environ.get("PYTHONPATH", "")))
        environment.pop("TRITON_INTERPRET", None)
        # Without kernel folders, `python3` is the kernel of the running Python
        manager = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            connection_file=str(Path(folder) / "kernel.json"),
            transport="ipc",  # no port is opened, since another test process could take it
        )
        client = nbclient.NotebookClient(
            book, km=manager, timeout=CELL_SECONDS, allow_errors=True, record_timing=False,
            coalesce_streams=True, resources={"metadata": {"path": str(ROOT)}},
        )  # fmt: skip
        client.owns_km = True  # the client ends the kernel
        client.store_widget_state = False
        # Without a registry, outputs go to the cell and not to an Output widget. nbclient would answer the widget
        # on the socket that it waits on, and could miss the end of the cell
        client.widget_registry = {}
        client.execute(env=environment)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if VIEW not in output.get("data", {})]
            for output in cell.outputs:
                if "image/svg+xml" in output.get("data", {}):
                    output.data.pop("image/png", None)  # under `interact`, IPython draws each figure twice
    return book


def moved(cell: Any) -> dict[str, tuple[int, int]]:
    """Returns control -> (failures, number of different results), from the output of a cell of `MOVE`."""
    results = [output.data["text/plain"] for output in cell.outputs if output.output_type == "execute_result"]
    assert len(results) == 1, cell.outputs
    return {name: (failed, seen) for name, failed, seen in literal_eval(results[0])}


def texts(cells: Any) -> list[list[tuple[str, str]]]:
    """Returns the outputs of each code cell as (kind, text); neighbouring pieces of one stream are one text."""
    outputs = []
    for cell in cells:
        if cell.cell_type != "code":
            continue
        said: list[tuple[str, str]] = []
        for output in cell.outputs:
            if output.output_type == "stream":
                before = said.pop()[1] if said and said[-1][0] == output.name else ""
                said.append((output.name, before + output.text))
            elif output.output_type == "error":
                said.append(("error", f"{output.ename}: {output.evalue}"))
            else:
                said += [(kind, str(text)) for kind, text in sorted(output.data.items()) if kind not in PICTURES]
        outputs.append(said)
    return outputs


def without_transformers(cells: Any) -> list[str]:
    """Returns code that hides Transformers and repeats the cells up to the last that uses it; empty if none does."""
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    last = max((at for at, source in enumerate(sources, 1) if "transformers" in source), default=0)
    return ["import sys\nsys.modules['transformers'] = None", *sources[:last]] if last else []


each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.mark.slow
@pytest.mark.proof
@each_notebook
def test_notebook_runs_and_says_what_is_stored(path: Path) -> None:
    """The notebook that can use Transformers runs again without it, in the same kernel, since a new one
    starts slowly.
    """
    import nbformat

    stored = nbformat.read(path, as_version=4)
    sliding = any("interact(" in cell.source for cell in stored.cells if cell.cell_type == "code")
    again = without_transformers(stored.cells)
    assert bool(again) == path.name.startswith("06")
    now = fresh(path, [*[MOVE] * sliding, *again])
    nbformat.validate(now)
    now.cells, more = now.cells[: len(stored.cells)], now.cells[len(stored.cells) :]
    if sliding:
        controls = moved(more.pop(0))
        assert controls and {name: each for name, each in controls.items() if each[0] or each[1] < 2} == {}
    assert [said for cell in texts([*now.cells, *more]) for said in cell if said[0] in ("error", "stderr")] == []
    for number, (old, new) in enumerate(zip(texts(stored.cells), texts(now.cells), strict=True), 1):
        assert new == old, f"{path.name}, code cell {number} is stale: run `python -m tests.viz.test_notebooks`"
    pictures = [
        [kind for output in cell.outputs for kind in output.get("data", {}) if kind in PICTURES]
        for cell in now.cells
        if cell.cell_type == "code"
    ]
    assert any(pictures[:3]), f"{path.name}: no picture in the first three code cells"
    kept = [cell.execution_count for cell in stored.cells if cell.cell_type == "code"]
    assert kept == list(range(1, len(kept) + 1)), f"{path.name}: stored outputs are not those of one run in order"
    if again:
        said = texts(more)[-1][0][1]
        assert "pip install '.[transformers]' in a checkout" in said and "'weights': 0.0" in said
        assert any("image/svg+xml" in output.get("data", {}) for output in more[-1].outputs)


@each_notebook
def test_notebook_is_small_and_knows_no_machine(path: Path) -> None:
    import nbformat

    book = nbformat.read(path, as_version=4)
    assert path.stat().st_size < MOST_BYTES
    assert set(book.metadata) <= {"kernelspec", "language_info"} and book.metadata.kernelspec.name == "python3"
    assert [cell.metadata for cell in book.cells if cell.metadata] == []  # drops times and states of editors
    lines = [
        line for cell in texts(book.cells) for kind, text in cell if kind == "stdout" for line in text.splitlines()
    ]
    assert [line for line, times in Counter(lines).items() if line and times > 3] == []  # no loop repeats its output
    assert "jupyter.widget" not in path.read_text(encoding="utf-8")


def store(path: Path) -> None:
    """Runs a notebook and stores its outputs, without metadata of the machine or the run."""
    import nbformat

    book = fresh(path)
    book.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in book.cells:
        cell.metadata = {}
    nbformat.write(book, path)


if __name__ == "__main__":
    for each in NOTEBOOKS:
        if not each.name.startswith(tuple(sys.argv[1:]) or ""):
            continue
        store(each)
        print(each.relative_to(ROOT), file=sys.stderr)
