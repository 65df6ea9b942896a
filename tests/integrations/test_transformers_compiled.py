"""Tests models compiled in place with `model.compile()`: Dynamo traces the forward, but not the manager."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import memstate.integrations.transformers as mst
from memstate.errors import ConfigurationError
from memstate.integrations.transformers.reading import KNOWN
from tests.support.tiny_models import tiny
from tests.support.tiny_served import managed

TWO_LAYERS = (("num_hidden_layers", 2), ("layer_types", ("conv", "full_attention")))
PROMPTS = [[5, 17, 40, 8], [9, 33, 61, 7]]
ON_SLOTS = """
from tests.integrations.test_transformers_compiled import Graphs, TWO_LAYERS, generated, tiny

model, graphs, compiled = tiny("lfm2", changes=TWO_LAYERS), Graphs(), []
expected = generated(model, "slots")
model.compile(backend=graphs)
answers = []
for _ in range(3):
    answers.append(generated(model, "slots"))
    compiled.append(graphs.compiled)
print(answers == [expected] * 3, *compiled)
"""


class Graphs:
    """A backend of Dynamo that runs each graph unchanged; counts compilations and calls."""

    def __init__(self) -> None:
        self.compiled = self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.compiled += 1

        def run(*inputs: Any) -> Any:
            self.calls += 1
            return graph(*inputs)

        return run


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = tiny("lfm2", changes=TWO_LAYERS)
    monkeypatch.setattr(made, "_compiled_call_impl", None)  # restores the value at the end: others use the model
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


def generated(model: Any, kernels: Any = "auto") -> list[list[int]]:
    with mst.StateCache(model, managed(model), kernels=kernels) as cache:
        tokens: list[list[int]] = model.generate(
            torch.tensor(PROMPTS), past_key_values=cache, max_new_tokens=8, do_sample=False
        ).tolist()
    return tokens


def served(model: Any) -> list[list[int]]:
    given = [mst.Prompt(prompt, number, most=8) for number, prompt in enumerate(PROMPTS)]
    return [one.tokens for one in sorted(mst.serve(model, managed(model), given), key=lambda one: int(str(one.id)))]


@pytest.mark.parametrize("run", [generated, served])
def test_a_compiled_model_chooses_the_same_tokens_and_is_not_compiled_at_each_length(model: Any, run: Any) -> None:
    expected, graphs = run(model), Graphs()
    torch._dynamo.utils.counters.clear()
    model.compile(backend=graphs)
    assert run(model) == expected
    assert graphs.compiled <= 4  # graphs of the prompt, of decode at a fixed length, and of decode at any length
    assert not torch._dynamo.utils.counters["unimplemented"]
    before = graphs.calls
    assert run(model) == expected
    assert graphs.calls - before == 8  # one call per forward, so no graph break


@pytest.mark.proof
def test_launches_on_slots_are_not_traced() -> None:
    """
    Dynamo compiles functions in the first and the second run, but none in the third. The runs are in another process,
    because other tests change the functions of a model, and so the compilations.
    """
    done = subprocess.run([sys.executable, "-c", ON_SLOTS], capture_output=True, text=True, check=False)
    same, first, second, third = done.stdout.split()[-4:]
    assert (done.returncode, same) == (0, "True"), done.stderr
    assert 0 < int(first) <= int(second) == int(third)


def test_a_model_is_tried_out_uncompiled(model: Any) -> None:
    graphs = Graphs()
    model.compile(backend=graphs)
    KNOWN.pop(model, None)
    mst.layout(model)
    assert not graphs.compiled


def test_a_wrapped_model_says_how_to_compile_it(model: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"model\.compile\(\)"):
        mst.manager(torch.compile(model, backend=Graphs()), slots=4, max_requests=1)
