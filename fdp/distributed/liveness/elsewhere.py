"""Runs a call that may wait for other ranks without end in another thread, while this one asks the monitor."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from fdp.distributed.liveness.patience import never_delete, until
from fdp.distributed.liveness.threads import start_thread
from fdp.errors import FdpError, build_message, first_line


class Elsewhere:
    """Work of another thread.

    A thread that never comes back does not keep the process from ending, but for some seconds.

    Args:
        work: what it does.
        name: of the work, for errors.
        uses_device: whether it works with tensors, on the device that is current here. To ask which one that is makes
            torch set up the device.
    """

    def __init__(self, work: Callable[[], None], name: str, uses_device: bool = True) -> None:
        self._work, self._name, self._done = work, name, threading.Event()
        self._error: BaseException | None = None
        accelerator = uses_device and torch.accelerator.is_available()
        self._device = torch.accelerator.current_device_index() if accelerator else None
        try:
            start_thread(self._run, name)
        except RuntimeError as error:  # which would be taken for a failure of what the thread was to ask
            raise FdpError(
                build_message(
                    f"this process can start no more threads, and waiting in {name} needs one.",
                    [f"{type(error).__name__}: {first_line(error)}"],
                    remedy="end threads of the program, or raise the limit of the system (ulimit -u).",
                )
            ) from error

    @property
    def is_running(self) -> bool:
        """Whether it is not done."""
        return not self._done.is_set()

    def comes(self, group: dist.ProcessGroup | None, timeout_s: float = math.inf) -> bool:
        """Wait for it; whether it came in time.

        Args:
            group: the process group whose ranks are watched; None for none.
            timeout_s: seconds to wait.

        Raises:
            PeerError: another rank will not come.
            BaseException: what the work raised.
        """
        if not until(self._done.is_set, group, timeout_s, self._name, pause=self._done.wait):
            return False
        if self._error is not None:
            raise self._error
        return True

    def wait(self, *groups: dist.ProcessGroup | None) -> None:
        """Wait for work that sends messages.

        Args:
            groups: process groups on which it sends them; the first is the one whose ranks are watched.

        Raises:
            PeerError: another rank will not come.
            BaseException: what the work raised.
        """
        try:
            self.comes(groups[0])
        except BaseException:
            if self.is_running:
                for group in groups:
                    if group is not None:
                        never_delete(group)
            raise

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.accelerator.set_device_index(self._device)
            self._work()
        except BaseException as error:  # raised where it is waited for
            self._error = error
        finally:
            del self._work  # it may hold a state
            self._done.set()
