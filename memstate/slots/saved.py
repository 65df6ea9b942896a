"""Checks the fields of a saved inspection, one by one. The file may come from a stranger."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from memstate.checks import INT32_MAX, shown
from memstate.errors import InvalidArgument
from memstate.kernels.levels import bitmap_ints, bitmap_words
from memstate.kernels.tables import REGISTERS_PER_ROW

INT64_MAX: Final = 2**63 - 1
KINDS: Final = ("live", "lane", "cached", "session", "mark", "snapshot", "unknown")  # of owners
CHANGES: Final = ("claim", "release", "move", "plan")  # of owners
AGES: Final = ("oldest_row", "idlest_row", "oldest_session", "idlest_session")  # figures in seconds
DIFFERENCES: Final = ("free", "held_by_snapshots", "leaked_records")  # figures that a fault can take below 0
FIGURES_DEEP: Final = 4  # the tiers have prefetches, and these have flaws by name

Check = Callable[[Any], None]  # raises _Refused


class _Refused(Exception):
    """What is wrong with a value, and where the value is."""

    place = ""


def require_saved(found: Any, form: str, fields: Iterable[str]) -> None:
    """Refuses everything that `Inspection.save` does not write.

    Args:
        found: what the file holds, as `json` reads it. No object in it has a key twice.
        form: the value of the field `format`.
        fields: names of the other fields.

    Raises:
        InvalidArgument: names the field and its value.
    """
    try:
        _object(found)
        if "format" in found and found["format"] != form:
            raise InvalidArgument(f"format is {shown(found['format'])}, expected {form!r}")
        _require_names(found, ("format", *fields))
        _within("capacity", _whole(1), found["capacity"])
        _within("slots", _list(_int32), found["slots"])
        for name, check in _checks(found["capacity"], found["slots"]).items():
            _within(name, check, found[name])
    except _Refused as refused:
        raise InvalidArgument(f"{refused.place.removeprefix('.') or 'it'}{refused}") from refused


def _checks(capacity: int, slots: list[int]) -> dict[str, Check]:
    """Returns the checks of the other fields. They depend on these two."""
    rows, held = len(slots) // REGISTERS_PER_ROW, {str(register) for register, slot in enumerate(slots) if slot}
    register, count, number = _whole(0, len(slots) - 1), _whole(0), _whole(0, INT64_MAX)
    node: dict[str, Check] = {
        "salt": _salt, "parent": _whole(-1), "start": count, "end": count, "register": register,
        "evicted": _flag, "ghost": _flag, "uses": _whole(0, INT64_MAX), "leases": count, "children": count,
    }  # fmt: skip
    request: dict[str, Check] = {
        "row": _whole(1, rows - 1), "id": _text, "length": count, "confirmed": count, "finished": _flag,
        "unsettled": count,
    }  # fmt: skip
    ages: dict[str, Check] = {"age": _seconds, "idle": _seconds}  # which older files do not have
    session: dict[str, Check] = {
        "id": _text, "row": _whole(0, rows - 1), "tokens": count, "states": _list(_pair(register, count)),
        "pages": count,
    }  # fmt: skip
    change: dict[str, Check] = {
        "serial": _whole(1, INT64_MAX), "submit": _whole(0, INT64_MAX), "what": _one_of(CHANGES), "register": register,
        "kind": _kind, "owner": _text, "label": _int32, "source": register, "source_owner": _text,
    }  # fmt: skip
    plane: dict[str, Check] = {
        "name": _text, "shape": _list(count), "dtype": _text, "payload": number, "padding": number,
    }  # fmt: skip
    layout: dict[str, Check] = {
        "order": _text, "layers": count, "bytes_per_slot": number, "page_size": _whole(1),
        "planes": _list(_record(plane, {"layers": count})),
    }  # fmt: skip
    return {
        "owners": _list(_whole(0, len(slots)), capacity + 1),
        "free": _list(_flag, capacity + 1),
        "labels": _list(_int32, len(slots)),
        "names": _by_register(_text, held, complete=True),
        "kinds": _by_register(_kind, held, complete=True),
        "tags": _by_register(_text, held, complete=False),
        "by_id": _ascending(_whole(0, capacity)),
        "rows": _ascending(_record(request, ages), "row"),
        "prefix": _below(_list(_record(node))),
        "sessions": _list(_record(session, ages)),
        "changes": _ascending(_record(change), "serial"),
        "stats": _figures(FIGURES_DEEP),
        "layout": _record(layout),
        "faults": _list(_text),
        "summary": _ascending(_whole(bitmap_words(capacity), bitmap_ints(capacity) - 1)),
    }


def _within(place: str, check: Check, value: Any) -> None:
    """Checks a value; `place` leads to it."""
    try:
        check(value)
    except _Refused as refused:
        refused.place = place + refused.place
        raise


def _require_names(found: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if name not in found:
            _within(f".{name}", _missing, None)
    for name in found.keys() - set(names):
        raise _Refused(f": {shown(name)} is no field, its value is {shown(found[name])}")


def _missing(_: Any) -> None:
    raise _Refused(" is missing")


def _is(test: Callable[[Any], bool], expected: str) -> Check:
    def check(value: Any) -> None:
        if not test(value):
            raise _Refused(f" is {shown(value)}, expected {expected}")

    return check


def _whole(least: int, most: int = INT32_MAX) -> Check:
    """A whole number. True is none, and neither is 1.0."""
    return _is(lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most}")


def _one_of(texts: tuple[str, ...]) -> Check:
    return _is(lambda value: value in texts, f"one of {', '.join(texts)}")


_object = _is(lambda value: type(value) is dict, "an object")
_text = _is(lambda value: type(value) is str, "a text")
_salt = _is(lambda value: value is None or type(value) is str, "a text or null")
_flag = _is(lambda value: type(value) is bool, "true or false")
_kind = _one_of(KINDS)
_int32 = _whole(-INT32_MAX - 1)
# of the manager's clock, which may be any; no NaN either
_seconds = _is(lambda value: type(value) in (int, float) and -INT64_MAX <= value <= INT64_MAX, "a number of seconds")
_any_list = _is(lambda value: type(value) is list, "a list")


def _list(check: Check, size: int | None = None) -> Check:
    def check_all(values: Any) -> None:
        _any_list(values)
        if size is not None and len(values) != size:
            raise _Refused(f" has {len(values)} entries, expected {size}")
        for at, value in enumerate(values):
            _within(f"[{at}]", check, value)

    return check_all


def _ascending(check: Check, key: str = "") -> Check:
    """A list in ascending order, without duplicates; of objects, by one of their fields."""
    each = _list(check)

    def check_order(values: Any) -> None:
        each(values)
        keys = [value[key] for value in values] if key else values
        for at in range(1, len(keys)):
            more = _is(keys[at - 1].__lt__, f"more than {keys[at - 1]}, the one before")
            _within(f"[{at}]" + f".{key}" * bool(key), more, keys[at])

    return check_order


def _pair(first: Check, second: Check) -> Check:
    size = _list(lambda _: None, 2)

    def check(values: Any) -> None:
        size(values)
        _within("[0]", first, values[0])
        _within("[1]", second, values[1])

    return check


def _record(checks: Mapping[str, Check], since: Mapping[str, Check] = MappingProxyType({})) -> Check:
    """An object with the fields of `checks`. The fields of `since` came later: it has all of them or none."""

    def check_each(value: Any) -> None:
        _object(value)
        every = {**checks, **since} if since.keys() & value.keys() else checks
        _require_names(value, every)
        for name, check in every.items():
            _within(f".{name}", check, value[name])

    return check_each


def _below(nodes: Check) -> Check:
    """Nodes of the prefix cache: a parent comes before its children, and a child begins where its parent ends.

    None of them ends before its start.
    """

    def check(values: Any) -> None:
        nodes(values)
        for at, node in enumerate(values):
            parent = node["parent"]
            _within(f"[{at}].start", _whole(0, node["end"]), node["start"])
            _within(f"[{at}].parent", _whole(-1, at - 1), parent)
            begin = values[parent]["end"] if parent >= 0 else 0
            _within(f"[{at}].start", _whole(begin, begin), node["start"])

    return check


def _by_register(check: Check, held: set[str], complete: bool) -> Check:
    """An object by numbers of registers that hold a slot; `complete`: of all of them."""

    def check_each(value: Any) -> None:
        _object(value)
        for register in held - value.keys() if complete else ():
            _within(f"[{register!r}]", _missing, None)
        for register, each in value.items():
            if register not in held:
                place = f"[{shown(register)}] is {shown(each)}"
                raise _Refused(f"{place}, expected no such entry: the key is no register that holds a slot")
            _within(f"[{register!r}]", check, each)

    return check_each


def _figures(deep: int) -> Check:
    """Figures by name: whole numbers, seconds, null, or figures in turn."""

    def check_each(value: Any) -> None:
        _object(value)
        for name, each in value.items():
            number = _whole(-INT64_MAX if name in DIFFERENCES else 0, INT64_MAX)
            inner = _figures(deep - 1) if type(each) is dict and deep > 1 else _seconds if name in AGES else number
            if each is not None:
                _within(f".{name}" if name.isidentifier() else f"[{shown(name)}]", inner, each)

    return check_each
