"""Meta copies of modules: their structure, without the memory of their parameters and buffers.

`from_module` hands out copies of a module's tensors, and has to run the module's code on them later. If it kept the
module for that, its own tensors would stay in memory for the whole training. So it keeps a second tree of module
objects, with the same classes and attributes, and with tensors that have a shape but no memory (on the device "meta").

Attributes of the original are followed as long as it lives, and as they were when it died: `module.eval()` counts,
also as the last thing that happens to it. This is possible because what is kept of the original is its `__dict__`.
That dict holds its tensors and parts, but is let go of when the original dies; so the memory lasts as long as the user
keeps the module, and no longer. (This relies on `__dict__` outliving its object, as it does in CPython.)
"""

from __future__ import annotations

import gc
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fdp.errors import ArgumentError, build_message
from fdp.pytorch.registries import REGISTRIES, SUBMODULES, tensor_registries

_LEAVES = (type, types.ModuleType, types.CodeType, str, bytes, int, float, complex, torch.dtype, torch.device,
           torch.Size, type(None))  # fmt: skip
_MAX_VISITED = 20_000
_NOTHING = object()


class MetaCopy:
    """A stand-in for a module: the same code and attributes, and no memory.

    Args:
        module: the original. One that cannot be separated from its parts (a hook that is a lambda over the module, a
            class with `__slots__` or `__del__`, tensors of classes of their own) stands in for itself, with its memory.

    Attributes:
        parts: of which modules it is made; none if the original stands in for itself.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        self._module = module
        self.parts: list[ModuleCopy] = []
        self._pairs: dict[int, tuple[weakref.ref[Any], Any]] = {}
        modules = list(module.modules())
        tensors = [t for m in modules for held in tensor_registries(m) for t in held.values() if t is not None]
        if not all(map(_is_its_attributes, modules)) or not all(map(_is_plain, tensors)):
            return
        for original in modules:
            self._pairs[id(original)] = weakref.ref(original), object.__new__(type(original))
        for tensor in tensors:
            if id(tensor) not in self._pairs:  # a tied one keeps one stand-in
                self._pairs[id(tensor)] = weakref.ref(tensor), _without_memory(tensor)
        live: list[dict[str, Any]] = []
        parts = [ModuleCopy(name, part, self._stand_in(part), live) for name, part in module.named_modules()]
        try:
            for part in parts:
                self._build(part)
                self._follow(part)
        except _Entangled:
            return
        self._module, self.parts = self._stand_in(module), parts

    def follow(self) -> nn.Module:
        """Update the stand-in with changes that were made to the original since.

        Returns:
            The stand-in, a module whose tensors are all to be replaced when it is called.

        Raises:
            ArgumentError: parts of the original were replaced, or it was given attributes that hold parts of it.
        """
        for part in self.parts:
            try:
                self._follow(part)
            except _Entangled as error:
                where = f"the part {part.name!r} of {self._name}" if part.name else self._name
                raise ArgumentError(
                    build_message(
                        f"{where} was changed after from_module took it apart: {error}.",
                        remedy="call from_module after the last change to the module.",
                    )
                ) from None
        return self._module

    def has_its_parts(self, part: ModuleCopy) -> bool:
        """Whether a part of the module has the parts and the class that it had; also said of one that has died."""
        original = part.original()
        try:
            if original is not None:
                self._refuse_other_parts(part, original)
        except _Entangled:
            return False
        return True

    def _stand_in(self, original: object) -> Any:
        """The stand-in for an original; None for any other object."""
        # The number of an original that died may have been given to another object.
        reference, stand_in = self._pairs.get(id(original), (_NOTHING, None))
        return stand_in if reference is not _NOTHING and reference() is original else None  # type: ignore[operator]

    def _build(self, part: ModuleCopy) -> None:
        for registry in REGISTRIES:
            held = part.attributes[registry]
            mine = {key: None if value is None else self._stand_in(value) for key, value in held.items()}
            vars(part.stand_in)[registry] = type(held)(mine)

    def _follow(self, part: ModuleCopy) -> None:
        original = part.original()  # held, so that it does not die meanwhile
        if original is None:
            part.settle()
        else:
            self._refuse_other_parts(part, original)
        mine = vars(part.stand_in)
        for key, value in list(part.attributes.items()):
            # What was translated is translated anew: a dict of hooks may have got another one.
            as_it_was = part.seen.get(key, _NOTHING) is value and mine[key] is value
            if key not in REGISTRIES and not as_it_was:
                translated = self._translate(value)
                if _leads_to(translated, lambda item: self._stand_in(item) is not None):
                    raise _Entangled(f"its attribute {key!r} holds parts of the module, or its tensors")
                part.seen[key], mine[key] = value, translated
        if original is None:
            part.attributes, part.seen = {}, {}
        else:
            part.forget_deleted()

    def _refuse_other_parts(self, part: ModuleCopy, original: nn.Module) -> None:
        if type(original) is not type(part.stand_in):
            raise _Entangled(f"it has become a {type(original).__name__}")
        now, mine = part.attributes[SUBMODULES], vars(part.stand_in)[SUBMODULES]
        names = [*now, *(name for name in mine if name not in now)]
        other = [
            name for name in names if name not in mine or name not in now or self._stand_in(now[name]) is not mine[name]
        ]
        if other:
            raise _Entangled(f"its parts {other} are others")

    def _translate(self, value: Any) -> Any:
        """A value with stand-ins in the place of originals; the value itself if there are none in it."""
        kind = type(value)
        if (stand_in := self._stand_in(value)) is not None:
            return stand_in
        if kind in (list, tuple, set):
            items = [self._translate(item) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else kind(items)
        if kind in (dict, OrderedDict):
            new = {key: self._translate(item) for key, item in value.items()}
            return value if all(new[key] is value[key] for key in new) else kind(new)
        if kind is types.MethodType and (owner := self._translate(value.__self__)) is not value.__self__:
            return types.MethodType(value.__func__, owner)
        if kind is weakref.ref and (target := self._stand_in(value())) is not None:
            return weakref.ref(target)
        return value


class _Entangled(Exception):
    """A stand-in would lead back to its original."""


class ModuleCopy:
    """One module of the tree, and its copy.

    Attributes:
        name: its path from the root.
        original: the module, while it lives.
        stand_in: the module without memory.
        live: of all parts of the tree, the live `__dict__` of the original; when it is dead, what changed last, and
            then nothing.
        at: the position of this part in it.
        seen: for each attribute that was copied to the stand-in, its value in the original.
    """

    def __init__(self, name: str, original: nn.Module, stand_in: nn.Module, live: list[dict[str, Any]]) -> None:
        self.name, self.stand_in = name, stand_in
        self.live, self.at = live, len(live)
        live.append(vars(original))
        self.seen = dict[str, Any]()
        self._settled = False
        own = weakref.ref(self)  # or both would wait for the garbage collector, with the memory of the original

        def on_death(_: object) -> None:
            part = own()
            if part is not None:
                part.settle()

        self.original = weakref.ref(original, on_death)

    @property
    def attributes(self) -> dict[str, Any]:
        """What is in `live` of this part."""
        return self.live[self.at]

    @attributes.setter
    def attributes(self, attributes: dict[str, Any]) -> None:
        self.live[self.at] = attributes

    def settle(self) -> None:
        """Release a dead original, except for attributes that changed since the last update."""
        if not self._settled:
            self._settled = True
            self.forget_deleted()
            live, seen = self.attributes, self.seen
            self.attributes = {
                key: value
                for key, value in live.items()
                if key not in REGISTRIES and seen.get(key, _NOTHING) is not value
            }
            self.seen = {}

    def forget_deleted(self) -> None:
        """Delete attributes of the stand-in that the original no longer has."""
        for key in [key for key in self.seen if key not in self.attributes]:
            del self.seen[key], vars(self.stand_in)[key]


def _is_its_attributes(module: nn.Module) -> bool:
    """Whether a module is made again by giving a new object of its class its attributes."""
    kinds = type(module).__mro__
    return not any(vars(kind).get("__slots__") for kind in kinds) and not hasattr(module, "__del__")


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _leads_to(value: object, is_original: Callable[[Any], bool]) -> bool:
    """Whether an original can be reached from a value; also said of a value from which too much can be reached."""
    visited: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, _LEAVES) or id(item) in visited:
            continue
        if is_original(item) or len(visited) == _MAX_VISITED:
            return True
        visited.add(id(item))
        if isinstance(item, types.FunctionType):
            pending += [*(item.__closure__ or ()), item.__defaults__, item.__kwdefaults__, vars(item)]
            # Of its globals only what it names, and not what those lead to: that would be all of the program.
            if any(is_original(item.__globals__.get(name)) for name in _names_in(item.__code__)):
                return True
        elif isinstance(item, weakref.ReferenceType):
            pending.append(item())
        elif not isinstance(item, torch.Tensor):
            pending += gc.get_referents(item)
    return False


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
