"""Changes of tensors that call no operator: followed while a step is traced, or refused.

`x.data = y` gives an object another value; NumPy, DLPack and storages hand out memory that anybody may write to;
`torch.utils.swap_tensors` exchanges two objects. No dispatcher is told of any of these. So while a step is traced, and
in the thread that traces it, the methods of torch that do so are replaced by those of this file. All of them are
public, but for `torch._C._swap_tensor_impl`, which stands behind `swap_tensors` for those who hold that already.

`x.data = y` is followed. On a value of the step it is what it is in plain torch: from there on the object is the other
value. On an argument it changes what the caller holds; so the step ends with a copy into the argument's own memory,
which is a change like any other: refused where the argument was not donated.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.dlpack
from torch import fx

from fdp.errors import FdpError, PurityError, TraceError, build_message
from fdp.pytorch.tensors import is_transformed, place_of, storage_id
from fdp.trace.operators.source import Source, user_line

_TENSOR, _STORAGES = torch.Tensor, (torch.UntypedStorage, torch.storage.TypedStorage)
_STORAGE_WRITES = ("resize_", "fill_", "copy_", "__setitem__")
_DLPACK = "DLPack"
_TO_DLPACK = ((_TENSOR, "__dlpack__"), (torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack"))
_ELEMENT_WRITES = ("apply_", "map_", "map2_")
"""Methods that call a Python function for each element, and take its memory for granted: a fake tensor has none."""


class UndispatchedChanges:
    """Follows changes of the tensors of one trace that the dispatcher does not see.

    Args:
        arguments: the tensors that stand for the step's arguments, in order.
        names: their key paths.
        is_traced: whether a tensor is one of the trace's own.
        stand_for: makes the trace take its first argument for its second from here on.
        last_node: the node that was made last.
        tracing: whether the thread that asks is the one that traces.
        closed_over: finds the tensors that the step can reach without being passed them: by `id`, name and tensor.
    """

    def __init__(
        self,
        arguments: Sequence[torch.Tensor],
        names: Sequence[str],
        is_traced: Callable[[Any], bool],
        stand_for: Callable[[torch.Tensor, torch.Tensor], None],
        last_node: Callable[[], fx.Node],
        tracing: Callable[[], bool],
        closed_over: Callable[[], Mapping[int, tuple[str, torch.Tensor]]],
    ) -> None:
        self._arguments, self._names = arguments, names
        self._is_traced, self._stand_for, self._last_node = is_traced, stand_for, last_node
        self._tracing, self._closed_over = tracing, closed_over
        self._position = {id(tensor): position for position, tensor in enumerate(arguments)}
        self._moved: dict[int, tuple[torch.Tensor, Source | None]] = {}

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Patch the methods that change tensors without the dispatcher."""
        with ExitStack() as stack:
            for owner, name, make in (
                (_TENSOR, "data", lambda original: property(original.__get__, self._set_data(original))),
                (_TENSOR, "numpy", self._refuse_export(".numpy()")),
                *((owner, name, self._refuse_export(_DLPACK)) for owner, name in _TO_DLPACK),
                *((_TENSOR, name, self._by_element) for name in _ELEMENT_WRITES),
                (torch.utils, "swap_tensors", self._swap),
                (torch._C, "_swap_tensor_impl", self._swap),
                *((kind, name, self._storage_write) for kind in _STORAGES for name in _STORAGE_WRITES),
            ):
                stack.enter_context(replaced(owner, name, make))
            yield

    def write_back(self, outputs: Sequence[Any]) -> list[Any]:
        """Copy what `x.data = y` assigned to arguments into their memory, at the end of the step.

        Args:
            outputs: what the step returns.

        Returns:
            The same, without a view of memory that has been written so.

        Raises:
            PurityError: an argument was given another shape, dtype or device.
        """
        moved = {
            at: before for at, (before, _) in self._moved.items() if place_of(before) != place_of(self._arguments[at])
        }
        self._refuse_other_kinds(moved)
        with torch.no_grad():
            memory = {storage_id(before.untyped_storage()) for before in moved.values()}

            def apart(value: Any) -> Any:
                lies_there = isinstance(value, torch.Tensor) and storage_id(value.untyped_storage()) in memory
                return value.clone() if lies_there else value

            returned = [self._position.get(id(value)) for value in outputs]
            kept = [v if at in moved else apart(v) for v, at in zip(outputs, returned, strict=True)]
            values = {at: apart(self._arguments[at].detach()) for at in moved}
            for at, before in moved.items():
                before.copy_(values[at])
                node = self._last_node()
                node.meta["source"], node.meta["stands_for"] = self._moved[at][1], f"{self._names[at]}.data = ..."
            # What the step returns lies as the object does by now, if not in the argument's own memory.
            own = {at: before if _same_layout(before, values[at]) else values[at] for at, before in moved.items()}
        return [value if at is None else own.get(at, value) for value, at in zip(kept, returned, strict=True)]

    def _refuse_other_kinds(self, moved: Mapping[int, torch.Tensor]) -> None:
        offenders = [
            f"{self._names[at]}: {_kind_text_of(before)} became {_kind_text_of(self._arguments[at])} "
            f"by .data = at {self._moved[at][1]}"
            for at, before in moved.items()
            if _kind_text_of(before) != _kind_text_of(self._arguments[at])
        ]
        if offenders:
            raise PurityError(
                build_message(
                    "the step gives its arguments memory of another kind.",
                    offenders,
                    remedy="make a new tensor and return it, as in w = w.half(); the argument stays as it is.",
                )
            )

    def _set_data(self, original: Any) -> Callable[[torch.Tensor, Any], None]:
        def set_data(tensor: torch.Tensor, value: Any) -> None:
            plain = isinstance(value, torch.Tensor) and not is_transformed(tensor) and not is_transformed(value)
            if not plain or not self._tracing():
                original.__set__(tensor, value)
                return
            line = user_line(sys._getframe(1))
            if not self._is_traced(tensor):
                raise self._closed_over_change(tensor, ".data =", line)
            position = self._position.get(id(tensor))
            if position is not None and position not in self._moved:
                self._moved[position] = (tensor.detach(), line)
            seen = value.detach()  # an operator, which the trace sees
            original.__set__(tensor, seen)
            if place_of(tensor) != place_of(seen):
                raise AssertionError("this release of PyTorch sets .data in another way than fdp knows")
            self._stand_for(tensor, seen)

        return set_data

    def _refuse_export(self, how: str) -> Callable[[Any], Any]:
        """Patch a method that exports the memory of a tensor: refuse it for closed-over tensors, and DLPack for all.
        (Fake tensors refuse the others; with DLPack the process would end.)

        What is read there would be frozen, and what is written is not seen.
        """

        def replace(original: Any) -> Any:
            @functools.wraps(original)
            def hand_out(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if self._tracing() and not self._is_traced(tensor):
                    raise self._closed_over_change(tensor, how, user_line(sys._getframe(1)))
                if self._tracing() and how == _DLPACK:
                    raise TraceError(
                        build_message(
                            "DLPack hands out the memory of a tensor, which a traced step does not have.",
                            remedy="use the tensor itself: torch.from_dlpack(x) is x.detach().",
                        )
                    )
                return original(tensor, *args, **kwargs)

            return hand_out

        return replace

    def _by_element(self, original: Any) -> Any:
        @functools.wraps(original)
        def by_element(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._tracing():
                return original(tensor, *args, **kwargs)
            how = f".{original.__name__}()"
            if not self._is_traced(tensor):
                raise self._closed_over_change(tensor, how, user_line(sys._getframe(1)))
            raise TraceError(
                build_message(
                    f"{how} calls a Python function with the value of each element, which a traced step does not have.",
                    remedy="write the function with operators of torch, on the whole tensor.",
                )
            )

        return by_element

    def _swap(self, original: Any) -> Any:
        @functools.wraps(original)
        def swap(one: torch.Tensor, two: torch.Tensor) -> Any:
            if not self._tracing():
                return original(one, two)
            raise TraceError(
                build_message(
                    "torch.utils.swap_tensors exchanges two objects, which no trace sees.",
                    remedy="exchange the values: one.data, two.data = two.data, one.data; or use each under the "
                    "other's name.",
                )
            )

        return swap

    def _storage_write(self, original: Any) -> Any:
        @functools.wraps(original)
        def write(storage: Any, *args: Any, **kwargs: Any) -> Any:
            if self._tracing():
                # Private to torch: a storage with a dtype has one without.
                untyped = getattr(storage, "_untyped_storage", storage)
                if (error := self._refusal_of_storage(untyped, original.__name__)) is not None:
                    raise error
            return original(storage, *args, **kwargs)

        return write

    def _refusal_of_storage(self, storage: Any, what: str) -> FdpError | None:
        if storage.device.type == "meta":  # those of the trace are; they hold nothing
            return TraceError(
                build_message(
                    f"{what} of a storage changes memory that a trace does not have.",
                    remedy="change the tensor instead: x.copy_(y), x.fill_(0), x[i] = y.",
                )
            )
        held = [tensor for _, tensor in self._closed_over().values() if tensor.layout == torch.strided]
        found = next((tensor for tensor in held if _storages_overlap(tensor.untyped_storage(), storage)), None)
        return None if found is None else self._closed_over_change(found, f"{what} of its storage", None)

    def _closed_over_change(self, tensor: torch.Tensor, how: str, line: Source | None) -> PurityError:
        known, _ = self._closed_over().get(id(tensor), (f"a tensor of shape {list(tensor.shape)}", tensor))
        return PurityError(
            build_message(
                "the step changes, or may change, a tensor that it closes over, out of the trace's sight.",
                [f"{known}: {how}" + (f" at {line}" if line else "")],
                remedy="pass the tensor as an argument and return its new value; read values outside of the step.",
            )
        )


@contextmanager
def replaced(owner: object, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Patch an attribute of a class or module."""
    own = vars(owner).get(name)
    setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _same_layout(one: torch.Tensor, two: torch.Tensor) -> bool:
    steps = zip(one.shape, one.stride(), two.stride(), strict=True)
    return one.numel() == 0 or all(size == 1 or a == b for size, a, b in steps)


def _storages_overlap(one: Any, two: Any) -> bool:
    """Whether two storages share a byte."""
    if storage_id(one) == storage_id(two):
        return True
    if one.device != two.device or one.device.type == "meta":
        return False
    first, second = one.data_ptr(), two.data_ptr()
    return bool(first < second + two.nbytes() and second < first + one.nbytes())


def _kind_text_of(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} {tensor.device}"
