"""Makes arguments of each decode op in each of its forms: plain, with marks, with a tail, and with a tree."""

from collections.abc import Callable, Iterator
from inspect import signature
from itertools import count
from typing import Any

from memstate.kernels import decode_checks
from memstate.kernels.dispatch import Backend
from tests.support import byte_cases
from tests.support.op_case import Maker

OPS = ("conv_step", "gated_delta_step", "selective_step", "mamba3_step")
FORMS = {  # name of a form -> the arguments that make it
    "plain": (), "marks": ("marks",), "tail": ("tail", "cursor"), "tree": ("tail", "cursor", "parents"),
    "tree with marks": ("marks", "tail", "cursor", "parents"),
}  # fmt: skip
WEIGHTS = ("weight", "bias", "a_log", "dt_bias", "a", "d", "b_bias", "c_bias")


def whole(op: str) -> dict[str, Any]:
    """Returns arguments of an op, of which none is None. They name the marks, a tail and a tree, if the op has them."""
    for seed in count():
        given: dict[str, Any] = getattr(byte_cases, op)(Maker(seed)).arguments
        if all(value is not None for value in given.values()):
            return given
    raise AssertionError


def low_rank(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a gated delta step as those of a generalized delta rule."""
    none = dict.fromkeys(("beta", "a_log", "dt_bias", "scales", "lengths", "seed"))
    none |= {"sigmoid": False, "normalize": False, "state": given["state"].float()}
    k, tail = given["k"], given["tail"]
    return given | none | {"a": k.clone(), "b": -k, "tail": tail._replace(beta=None, a=tail.k.clone(), b=-tail.k)}


def forms() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (op, form, arguments)."""
    for op in OPS:
        given = whole(op)
        cases = {"": given} | ({"low rank, ": low_rank(given)} if "q" in given else {})
        has = set(FORMS["tree with marks"]) & set(given)
        for kind, every in cases.items():
            for form, names in FORMS.items():
                if has.issuperset(names):
                    yield op, kind + form, every | dict.fromkeys(has.difference(names))


def checked(op: str, given: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the check of an op, and all its arguments by name."""
    check = getattr(decode_checks, f"check_{op.removesuffix('_step')}")
    bound = signature(getattr(Backend, op)).bind(**given)
    bound.apply_defaults()
    return check, {name: bound.arguments[name] for name in signature(check).parameters}
