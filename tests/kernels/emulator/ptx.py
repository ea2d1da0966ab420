"""PTX as text, to instructions with their operands."""

from __future__ import annotations

import re
from typing import NamedTuple


class Address(NamedTuple):
    """[base + offset], or with coordinates [base, {x, y}]."""

    base: str
    offset: int
    coordinates: tuple[str, ...] = ()


# A register or a number by its text, several in braces, or an address.
Operand = str | tuple[str, ...] | Address


class Instruction(NamedTuple):
    guard: str | None
    negated: bool
    name: tuple[str, ...]  # as it is written, between the dots
    operands: tuple[Operand, ...]
    targets: tuple[int, ...]  # where a branch goes, as positions in the code
    source: str  # where it comes from

    def __str__(self) -> str:
        return f"{'.'.join(self.name)} {', '.join(map(str, self.operands))}  # {self.source}"


class Kernel(NamedTuple):
    parameters: tuple[str, ...]
    threads: int
    registers: int  # for each thread, at most; 0 if nothing is said
    code: tuple[Instruction, ...]


class _Line(NamedTuple):
    scope: tuple[int, ...]
    text: str
    source: str


_LABEL = re.compile(r"([\w$]+):\s*(.*)", re.S)


def parse(text: str) -> Kernel:
    head, body = text.split(".entry", 1)[1].split("\n{", 1)
    parameters = tuple(re.findall(r"\.param .*?(\w+)(?:\[\d+\])?\s*[,\n)]", head))
    threads, registers = (int((re.findall(rf"\.{what} (\d+)", head) or ["0"])[0]) for what in ("reqntid", "maxnreg"))
    statements, labels = _statements(body)
    return Kernel(parameters, threads, registers, tuple(_instruction(line, labels) for line in statements))


def _statements(body: str) -> tuple[list[_Line], dict[tuple[tuple[int, ...], str], list[str] | int]]:
    """What is executed, in order, and by scope and name where labels stand, or the labels that a list of them names."""
    statements: list[_Line] = []
    labels: dict[tuple[tuple[int, ...], str], list[str] | int] = {}
    scope, scopes, source, pending = (), 0, "", ""
    for raw in body.splitlines():
        code, _, comment = raw.partition("//")
        code = code.strip()
        if code.startswith(".loc"):
            source = comment.split("@")[0].strip() or source
            continue
        while code.startswith("{"):
            scopes += 1
            scope, code = (*scope, scopes), code[1:].strip()
        closes = 0
        while code.endswith("}") and (code == "}" or code[:-1].rstrip().endswith((";", "}"))):
            closes, code = closes + 1, code[:-1].strip()
        pending += " " + code
        *complete, pending = pending.split(";")
        for statement in complete:
            _add(statement.strip(), scope, source, statements, labels)
        if (label := _LABEL.fullmatch(pending.strip())) and not label[2]:
            labels[scope, label[1]] = len(statements)
            pending = ""
        for _ in range(closes):
            if not scope:
                return statements, labels
            scope = scope[:-1]
    raise ValueError("the kernel's body does not end")


def _add(statement: str, scope: tuple[int, ...], source: str, statements: list[_Line], labels: dict) -> None:
    while label := _LABEL.fullmatch(statement):
        if label[2].startswith(".branchtargets"):
            labels[scope, label[1]] = [name.strip() for name in label[2].removeprefix(".branchtargets").split(",")]
            return
        labels[scope, label[1]] = len(statements)
        statement = label[2]
    if statement and not statement.startswith("."):
        statements.append(_Line(scope, statement, source))


def _instruction(line: _Line, labels: dict) -> Instruction:
    guard = re.match(r"@(!?)([%\w]+)\s+", line.text)
    name, _, rest = line.text[guard.end() if guard else 0 :].partition(" ") if " " in line.text else (line.text, "", "")
    name, *more = name.split(None, 1)
    operands = tuple(_operands(" ".join([*more, rest])))
    parts = tuple(name.split("."))
    targets: tuple[int, ...] = ()
    if parts[0] == "bra":
        targets = (_find(operands[0], line.scope, labels),)
    elif parts[0] == "brx":
        targets = tuple(_find(each, line.scope, labels) for each in _find(operands[1], line.scope, labels))
    return Instruction(guard[2] if guard else None, bool(guard and guard[1]), parts, operands, targets, line.source)


def _find(name: Operand, scope: tuple[int, ...], labels: dict):
    while (scope, name) not in labels:
        if not scope:
            raise ValueError(f"no label {name}")
        scope = scope[:-1]
    return labels[scope, name]


def _operands(text: str) -> list[Operand]:
    """Separated by commas, outside of brackets and braces; r|p are two."""
    found = []
    for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", text):
        if part[0] == "{":
            found.append(tuple(name.strip() for name in part[1:-1].split(",")))
        elif part[0] == "[":
            found.append(_address(part[1:-1]))
        else:
            found += part.split("|")
    return found


def _address(text: str) -> Address:
    coordinates = re.search(r",\s*\{(.*)\}", text)
    base, _, offset = re.split(r",", text)[0].partition("+")
    names = tuple(name.strip() for name in coordinates[1].split(",")) if coordinates else ()
    return Address(base.strip(), int(offset or 0), names)
