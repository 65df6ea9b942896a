"""`memstate demo`."""

from inspect import signature
from typing import Any

from memstate.cli.demo_options import DemoOptions
from memstate.cli.options import Json, choose_backend
from memstate.cli.output import device_of, emit, fail, one_line_errors, progress


def demo(*, json_path: Json = None, **options: Any) -> None:
    """Run with and without memstate, and compare.

    A decode loop of a small model serves conversations. Then each runs again without a cache, and tokens, logits and
    states must be the same, bit for bit.
    """
    choose_backend(options["backend"])
    from memstate.cli.demo import DemoConfig, run  # after the backend is chosen: kernels are imported with it

    with one_line_errors():
        config = DemoConfig(device=device_of(options["backend"]), **options)
        with progress("demo", "requests") as report:
            result = run(config, report)
    emit(
        json_path, result.to_json(), "demo", [{"figure": name, "value": text} for name, text in result.table().items()]
    )
    if not result.ok:
        fail(result.failure(), status=1)


# Each field is an option.
_parameters = [*signature(DemoOptions).parameters.values(), signature(demo).parameters["json_path"]]
vars(demo).update(
    __signature__=signature(demo).replace(parameters=_parameters),
    __annotations__={each.name: each.annotation for each in _parameters},
)
