"""Interrupt an operation at every point at which Ctrl-C can interrupt it, one point per run.

    for at in range(1, len(list_points(operation)) + 1):
        outcome = interrupt_at(at, operation)
        ...                                         # check the state

The signals are real. Before an instruction at which CPython may check for signals, C code makes a signal pending.
So CPython itself decides whether the handler runs at that instruction, and which ``try`` gets the exception.
(*Rejected:* raising in a trace function. Such an exception belongs to the *next* instruction, which may be outside of
the ``try``.)

The instructions are those with ``CHECK_EVAL_BREAKER`` in Python/ceval.c of CPython 3.11: RESUME, the CALLs,
JUMP_BACKWARD and its conditional forms; other versions use similar names. If CPython skips the check for signals at
such an instruction, the signal arrives later, in the trace function, and the point does not count.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import os
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

_SIGNAL = signal.SIGUSR2
_set_pending: Any = ctypes.pythonapi.PyErr_SetInterruptEx
_set_pending.argtypes = [ctypes.c_int]
_set_pending.restype = ctypes.c_int


class Interrupt(BaseException):
    """The exception that the handler raises by default."""


class InterruptPoint(NamedTuple):
    """The point at which an operation was interrupted."""

    function: str
    line: int
    instruction: str
    offset: int

    def __str__(self) -> str:
        return f"{self.function}:{self.line} ({self.instruction} at {self.offset})"


class InterruptOutcome(NamedTuple):
    """The result of one run of an operation."""

    points: int
    """Number of points that the run passed, including the interrupted one."""
    place: InterruptPoint | None
    """The interrupted point, or None."""
    result: Any
    error: BaseException | None


class _Trigger:
    """``+trigger`` makes the signal pending. It needs no CALL: there CPython would handle the signal too early."""

    __pos__ = functools.partial(_set_pending, int(_SIGNAL))


_trigger: Any = _Trigger()
_package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_alike = (_package, os.path.dirname(functools.__file__))


@functools.cache
def _points(code: CodeType) -> dict[int, str]:
    """Return the instructions of a function at which CPython may check for signals, by offset."""
    found = {}
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name.startswith("CALL") or ("JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name):
            found[instruction.offset] = name
    return found


@functools.cache
def _is_traced(code: CodeType) -> bool:
    """Return whether a function belongs to the package or the standard library, except import machinery and tests."""
    name = code.co_filename
    return not name.startswith("<") and name.startswith(_alike) and name != __file__ and "site-packages" not in name


def _is_called_by_package(frame: FrameType | None) -> bool:
    """Return whether the function of this frame belongs to the package, or was called by it, even indirectly."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_package) and frame.f_code.co_filename != __file__:
            return True
        frame = frame.f_back
    return False


class _InterruptedRun:
    """One run of an operation, with an interrupt at the n-th point."""

    def __init__(self, at: int, error: Callable[[], BaseException]) -> None:
        self.at = at
        self.error = error
        self.count = 0
        self.aimed: InterruptPoint | None = None
        self.place: InterruptPoint | None = None
        self.passed: list[InterruptPoint] | None = None

    def enter(self, frame: FrameType, event: str, arg: object) -> Any:
        if not _is_traced(frame.f_code) or not _is_called_by_package(frame):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self.count += 1
        if self.passed is not None:
            self.passed.append(InterruptPoint(_name_of(frame.f_code), frame.f_lineno, "RESUME", frame.f_lasti))
        elif self.count == self.at:
            self.aimed = InterruptPoint(_name_of(frame.f_code), frame.f_lineno, "RESUME", frame.f_lasti)
            _ = +_trigger
        return self.step

    def step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            name = _points(frame.f_code).get(frame.f_lasti)
            if name is not None:
                self.count += 1
                if self.passed is not None:
                    self.passed.append(InterruptPoint(_name_of(frame.f_code), frame.f_lineno, name, frame.f_lasti))
                elif self.count == self.at:
                    self.aimed = InterruptPoint(_name_of(frame.f_code), frame.f_lineno, name, frame.f_lasti)
                    _ = +_trigger
        return self.step

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal: raise the error of this run.

        Ignore the signal while a function of this file runs: CPython then noticed it before or after the operation's
        own code.
        """
        if frame is None or frame.f_code.co_filename == __file__:
            return
        self.place = self.aimed
        raise self.error()

    def run(self, operation: Callable[[], Any]) -> InterruptOutcome:
        before = signal.signal(_SIGNAL, self.handle)
        measuring = sys.gettrace()  # the trace function of coverage, restored afterwards
        result, raised = None, None
        try:
            sys.settrace(self.enter)
            try:
                result = operation()
            finally:
                sys.settrace(measuring)
        except BaseException as error:
            raised = error
        signal.signal(_SIGNAL, before)
        return InterruptOutcome(self.count, self.place, result, raised)


def _name_of(code: CodeType) -> str:
    return f"{os.path.basename(code.co_filename).removesuffix('.py')}.{code.co_qualname}"


def interrupt_at(
    at: int, operation: Callable[[], Any], error: Callable[[], BaseException] = Interrupt
) -> InterruptOutcome:
    """Run the operation in this thread, the main thread, with an interrupt at its ``at``-th point, counted from 1."""
    return _InterruptedRun(at, error).run(operation)


def list_points(operation: Callable[[], Any]) -> list[InterruptPoint]:
    """Return the points that an operation passes, in order. Raise the operation's errors."""
    run = _InterruptedRun(0, Interrupt)
    run.passed = []
    outcome = run.run(operation)
    if outcome.error is not None:
        raise outcome.error
    return run.passed
