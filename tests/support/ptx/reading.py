"""Reads the text of a PTX kernel: its registers, basic blocks and instructions. Knows no meaning of an instruction."""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

# A label, the line of source or a brace, which stand before an instruction without a semicolon.
HEAD = re.compile(r"(?:\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)[^\n]*|(?P<label>[$\w]+):|(?P<brace>[{}]))\s*")
ASSEMBLY = re.compile("// begin inline asm.*?// end inline asm", re.DOTALL)  # some Tritons count its lines on
INSTRUCTION = re.compile(r"(?:@(?P<negated>!?)(?P<guard>%\w+)\s+)?(?P<words>[\w.:]+)\s*(?P<args>.*)", re.DOTALL)
ARGUMENT = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
ENDS, BARRIER = ("bra", "ret"), ("bar", "sync")
BITS = {"pred": "?", "8": "u1", "16": "u2", "32": "u4", "64": "u8"}  # width of a register -> numpy type


class Fault(AssertionError):
    """Raised where a compiled kernel does what no kernel may do, or has an instruction that is not known here."""


class Instruction(NamedTuple):
    """One instruction.

    words: opcode and modifiers, such as ("ld", "global", "b32"). guard: predicate register under which it runs, "" for
    always. negated: whether it runs where the guard is false. place: file and line of source, such as "bitmap.py:183".
    used: a bit for each byte of a load whose value is used, -1 for all.
    """

    words: tuple[str, ...]
    args: tuple[str, ...]
    guard: str
    negated: bool
    text: str
    place: str
    used: int

    def fault(self, what: str) -> Fault:
        """Returns an error that names this instruction."""
        return Fault(f"{self.place}: {what}: {self.text}")


class Listing(NamedTuple):
    """A kernel as text.

    params: names of its parameters. kinds: register -> numpy type of its bits. blocks: basic blocks, in order; control
    leaves a block only at its end. targets: label -> index of a block. files: paths of the source.
    """

    name: str
    params: tuple[str, ...]
    kinds: dict[str, str]
    blocks: list[list[Instruction]]
    targets: dict[str, int]
    files: dict[str, Path]


def read(text: str) -> Listing:
    """Reads the first kernel of a PTX text.

    Raises:
        Fault: a line is no instruction.
    """
    files = {number: Path(path) for number, path in re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', text)}
    text = ASSEMBLY.sub(lambda lines: re.sub(r"\.loc[^\n]*", "", lines[0]), text)
    text = re.sub(r"//[^\n]*", "", text)
    entry = re.search(r"\.entry\s+(\w+)\s*\(([^)]*)\)[^{]*", text)
    if entry is None:
        raise Fault("no kernel in this text")
    aims = set(re.findall(r"\bbra(?:\.uni)?\s+([$\w]+)", text))
    kinds: dict[str, str] = {}
    blocks: list[list[Instruction]] = [[]]
    targets: dict[str, int] = {}
    scopes: list[dict[str, str]] = []  # names of registers in inner braces, which may be declared again
    place, used, serial = "?", -1, Counter[str]()
    for statement in text[entry.end() :].split(";"):
        rest = statement.strip()
        while head := HEAD.match(rest):
            rest = rest[head.end() :]
            if head["line"] and head["line"] != "0":
                place = f"{files[head['file']].name if head['file'] in files else '?'}:{head['line']}"
            elif head["label"] in aims:
                blocks += [[]] if blocks[-1] else []
                targets[head["label"]] = len(blocks) - 1
            elif head["brace"] == "{":
                scopes.append({})
            elif head["brace"] == "}":
                scopes.pop()
        if not scopes:
            break
        if rest.startswith(".reg"):
            _, kind, names = rest.split(None, 2)
            for name, count in re.findall(r"([%\w]+)(?:<(\d+)>)?", names):
                for each in [f"{name}{number}" for number in range(int(count))] if count else [name]:
                    own = each if len(scopes) == 1 else f"{each}~{serial[each]}"
                    serial[each] += 1
                    scopes[-1][each] = own
                    kinds[own] = BITS[kind.strip(".bfsu") if kind != ".pred" else "pred"]
        elif mask := re.match(r'\.pragma\s+"used_bytes_mask (\w+)"', rest):
            used = int(mask[1], 16)
        elif rest and not rest.startswith(".pragma"):
            blocks[-1].append(_instruction(_renamed(rest, scopes[1:]), place, used))
            used = -1
            if blocks[-1][-1].words[0] in ENDS or blocks[-1][-1].words[:2] == BARRIER:
                blocks.append([])
    params = tuple(re.findall(r"(\w+)\s*(?:,|$)", entry[2].strip()))
    return Listing(entry[1], params, kinds, blocks, targets, {path.name: path for path in files.values()})


def _renamed(text: str, scopes: list[dict[str, str]]) -> str:
    """Returns an instruction with the registers of inner braces under names of their own."""
    names = {name: own for scope in scopes for name, own in scope.items()}
    return re.sub(r"[%\w]+", lambda found: names.get(found[0], found[0]), text) if names else text


def _instruction(text: str, place: str, used: int) -> Instruction:
    found = INSTRUCTION.fullmatch(text)
    if found is None:
        raise Fault(f"{place}: no instruction: {text}")
    args = tuple(each.strip() for each in ARGUMENT.findall(found["args"]))
    words = tuple(found["words"].replace("shared::cta", "shared").split("."))
    return Instruction(words, args, found["guard"] or "", found["negated"] == "!", " ".join(text.split()), place, used)
