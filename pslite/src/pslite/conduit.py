"""Memory that goes into a socket by reference: the kernel sends the very pages, and copies nothing (vmsplice(2)).

What is given must stay as it is until the peer has read it, not only until it is sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import socket

#: bytes in the pipe at most; more needs rights (pipe(7))
_PIPE_BYTES: Final = 1 << 20


class _Vector(ctypes.Structure):
    """One piece of memory (struct iovec)."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Conduit:
    """The way of one connection's memory into its socket: a pipe, which holds references to pages.

    Raises
    ------
    OSError
        there is no such thing here.

    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        try:
            self._vmsplice = ctypes.CDLL(None, use_errno=True).vmsplice
        except AttributeError as error:
            raise OSError(str(error)) from error
        self._exit, self._entry = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._entry, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        #: bytes on their way
        self.held = 0

    def take(self, view: memoryview) -> int:
        """Take the beginning of some memory into the empty pipe; returns how many bytes.

        Raises
        ------
        OSError
            the kernel does not do that.

        """
        address = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
        vector = _Vector(address, view.nbytes)
        taken = self._vmsplice(self._entry, ctypes.byref(vector), ctypes.c_ulong(1), ctypes.c_uint(0))
        if taken <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.held += taken
        return int(taken)

    def push(self) -> bool:
        """Move on what is held; returns whether nothing is left.

        Raises
        ------
        OSError
            the connection broke, or its socket takes nothing from a pipe (EINVAL).

        """
        while self.held:
            try:
                self.held -= os.splice(self._exit, self._sock.fileno(), self.held, flags=os.SPLICE_F_NONBLOCK)
            except BlockingIOError:
                return False
        return True

    def back(self) -> bytes:
        """Return what is held, to be sent in another way."""
        data = os.read(self._exit, self.held) if self.held else b""
        self.held = 0
        return data

    def close(self) -> None:
        """Drop what is held."""
        os.close(self._exit)
        os.close(self._entry)
