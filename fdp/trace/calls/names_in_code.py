"""Which names the code of a function reads: globals, and attributes of whatever object."""

from __future__ import annotations

import dis
import functools
import types
from collections import defaultdict
from collections.abc import Iterable, Mapping

_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"})
_IMPORTS = frozenset({"IMPORT_NAME"})
_MATCHES = frozenset({"MATCH_CLASS"})
_ASSIGNS = frozenset({"STORE_ATTR"})
"""Instructions, as `dis` names them in Python 3.10 to 3.14."""

_LOOKED_FOR = _GLOBALS | _ATTRIBUTES | _IMPORTS | _MATCHES | _ASSIGNS

_VARIABLES = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF"})
_SUBSCRIPTS = frozenset({"BINARY_SUBSCR"})
_STORES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "STORE_SUBSCR"})
_ON_THE_STACK = frozenset(
    {"CACHE", "COPY", "DUP_TOP", "DUP_TOP_TWO", "EXTENDED_ARG", "NOP", "PRECALL", "ROT_TWO", "ROT_THREE", "SWAP"}
)
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_SIMPLE = (*_CONSTANTS, "LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")

_BY_STRING = frozenset({"getattr", "hasattr", "attrgetter", "itemgetter"})
"""Functions that take the name of an attribute as a string."""

ALL = "*"
"""Among the attributes that code reads: any attribute."""


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> frozenset[str]:
    """The globals that a function reads, and the functions that are defined in it."""
    return _names(code, _GLOBALS)


@functools.lru_cache(maxsize=4096)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """The attributes that a function reads, of any object, and the functions that are defined in it."""
    names, known = _names(code, _ATTRIBUTES), _names(code, _GLOBALS)
    if "vars" in known or "__dict__" in names:
        names |= {ALL}
    by_string = not _BY_STRING.isdisjoint(names | known) or _has(code, _MATCHES)
    return names | _strings(code.co_consts) if by_string else names


@functools.lru_cache(maxsize=4096)
def names_read_for_more(code: types.CodeType) -> frozenset[str]:
    """What a function reads, and not only to count it on, as `self.calls += 1` does.

    Returns:
        Names of variables and attributes; of items their key, as text in brackets.
    """
    inner = [names_read_for_more(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    steps = [step for step in dis.get_instructions(code) if step.opname not in _ON_THE_STACK]
    found = ((at, name) for at in range(len(steps)) if (name := _what_is_read(steps, at)) is not None)
    read = frozenset(name for at, name in found if not _counts_on(steps, at + 1, name))
    by_string = not _BY_STRING.isdisjoint(read) or _has(code, _MATCHES)
    return read.union(_strings(code.co_consts) if by_string else (), *inner)


def _what_is_read(steps: list[dis.Instruction], at: int) -> str | None:
    step = steps[at]
    if step.opname in _ATTRIBUTES | _GLOBALS | _VARIABLES:
        return str(step.argval)
    is_item = step.opname in _SUBSCRIPTS or (step.opname == "BINARY_OP" and step.argrepr == "[]")
    return _key(steps, at) if is_item else None


def _key(steps: list[dis.Instruction], at: int) -> str | None:
    """The constant in brackets, of an instruction that reads or stores an item."""
    before = steps[at - 1] if at else None
    return f"[{before.argval!r}]" if before is not None and before.opname.startswith(_CONSTANTS) else None


def _counts_on(steps: list[dis.Instruction], at: int, name: str) -> bool:
    """Whether what was read goes, with another value, into one operation, and from there to where it was."""
    operation = _after_a_value(steps, at)
    if not _begins(steps, operation, ("BINARY_", "INPLACE_")):
        return False
    at = _after_a_value(steps, _after_a_value(steps, operation + 1))
    if at >= len(steps) or steps[at].opname not in _STORES:
        return False
    if steps[at].opname == "STORE_SUBSCR":
        return at == operation + 1 or _key(steps, at) == name
    return bool(steps[at].argval == name)


def _after_a_value(steps: list[dis.Instruction], at: int) -> int:
    """Behind what loads a variable, a constant or an attribute, if that is what comes next."""
    if _begins(steps, at, _SIMPLE):
        at += 1
        while _begins(steps, at, ("LOAD_ATTR",)):
            at += 1
    return at


def _begins(steps: list[dis.Instruction], at: int, names: tuple[str, ...]) -> bool:
    return at < len(steps) and steps[at].opname.startswith(names)


@functools.lru_cache(maxsize=4096)
def imported_names(code: types.CodeType, package: str) -> frozenset[str]:
    """The modules that a function may import when it runs.

    Args:
        code: of the function.
        package: the package that it belongs to, for relative imports, of whatever level.
    """
    around = [package.rsplit(".", levels)[0] for levels in range(package.count(".") + 1)] if package else []
    found = _names(code, _IMPORTS)
    return found.union(f"{outer}.{name}" if name else outer for name in found for outer in around) - {""}


@functools.lru_cache(maxsize=4096)
def names_read_by(kind: type, method: str, until: type) -> frozenset[str]:
    """The attributes that a method of a class reads, and the methods that it calls; of its own object or of others.

    Args:
        kind: the class.
        method: the name of the method.
        until: a base class, whose methods are not followed.
    """
    return frozenset().union(*map(attribute_names, _codes_of(kind, method, until)))


@functools.lru_cache(maxsize=4096)
def names_looked_up_by(kind: type, method: str) -> frozenset[str]:
    """The attributes that a method of a class reads, if neither it nor what it calls assigns any: one that does counts
    or moves on, and is called for that."""
    codes = _codes_of(kind, method, object)
    if any(_has(code, _ASSIGNS) for code in codes):
        return frozenset()
    return frozenset().union(*map(attribute_names, codes))


def _codes_of(kind: type, method: str, until: type) -> list[types.CodeType]:
    """The code of a method of a class, and of the methods that it calls; those of `until` are not followed."""
    codes: list[types.CodeType] = []
    pending, followed = [method], set[str]()
    while pending:
        name = pending.pop()
        followed.add(name)
        function = getattr(kind, name, None)
        if isinstance(function, types.FunctionType) and function is not getattr(until, name, None):
            codes.append(function.__code__)
            pending += attribute_names(function.__code__) - followed
    return codes


def _strings(constants: Iterable[object]) -> frozenset[str]:
    found: set[str] = set()
    for constant in constants:
        if isinstance(constant, str) and constant.isidentifier():
            found.add(constant)
        elif isinstance(constant, tuple):
            found |= _strings(constant)
        elif isinstance(constant, types.CodeType):
            found |= _strings(constant.co_consts)
    return frozenset(found)


def _has(code: types.CodeType, instructions: frozenset[str]) -> bool:
    return not instructions.isdisjoint(_names_by_instruction(code))


def _names(code: types.CodeType, instructions: frozenset[str]) -> frozenset[str]:
    found = _names_by_instruction(code)
    return frozenset().union(*(found[each] for each in instructions if each in found))


@functools.lru_cache(maxsize=4096)
def _names_by_instruction(code: types.CodeType) -> Mapping[str, frozenset[str]]:
    """The names that each kind of instruction is given, in a function and in those that are defined in it.

    To take code apart is what the search for outside values takes longest for, so that it is done once.
    """
    found: defaultdict[str, set[str]] = defaultdict(set)
    for step in dis.get_instructions(code):
        if step.opname in _LOOKED_FOR:
            found[step.opname].add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for opname, names in _names_by_instruction(constant).items():
                found[opname] |= names
    return {opname: frozenset(names) for opname, names in found.items()}
