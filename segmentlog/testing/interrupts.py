"""Interrupts at every place where there can be one: what Ctrl-C may meet, met in turn.

    for at in range(1, len(list_points(operation)) + 1):
        outcome = interrupt_at(at, operation)
        ...                                         # is everything as it should be?

Real signals, not imitations: before an instruction at which CPython may look for signals is executed, a signal
is made pending from within C; so it is the interpreter itself that decides whether its handler runs right there, and
to which ``try`` the exception belongs. (An exception that a trace function raises belongs to the *next* instruction:
that of ``finally`` may be another one's.)

Which instructions those are is in Python/ceval.c of CPython 3.11, wherever it says ``CHECK_EVAL_BREAKER``: RESUME, the
CALLs, JUMP_BACKWARD and its conditional forms; other versions have them under similar names. Where the guess is wrong,
the signal is noticed by the trace function before anything else, and does not count.
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
    """What the handler raises unless it is told to raise something else."""


class Place(NamedTuple):
    """Where an operation was interrupted."""

    function: str
    line: int
    instruction: str
    offset: int

    def __str__(self) -> str:
        return f"{self.function}:{self.line} ({self.instruction} at {self.offset})"


class Outcome(NamedTuple):
    """What became of one run."""

    points: int
    """How many places it passed, this one included."""
    place: Place | None
    """Where it was interrupted; None when it was not."""
    result: Any
    error: BaseException | None


class _Trigger:
    """``+trigger`` makes the signal pending without a CALL: nothing looks for it before the trace function returned."""

    __pos__ = functools.partial(_set_pending, int(_SIGNAL))


_trigger: Any = _Trigger()
_package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_alike = (_package, os.path.dirname(functools.__file__))


@functools.cache
def _points(code: CodeType) -> dict[int, str]:
    """Instructions of a function at which signals may be looked for, by offset."""
    found = {}
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name.startswith("CALL") or ("JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name):
            found[instruction.offset] = name
    return found


@functools.cache
def _is_traced(code: CodeType) -> bool:
    """Functions of the package, and those of the standard library that it calls; not imports, nor tests."""
    name = code.co_filename
    return not name.startswith("<") and name.startswith(_alike) and name != __file__ and "site-packages" not in name


def _is_called_by_package(frame: FrameType | None) -> bool:
    """Whether it is a function of the package, or works for one."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_package) and frame.f_code.co_filename != __file__:
            return True
        frame = frame.f_back
    return False


class _Run:
    """One run of an operation, with an interrupt at the n-th point."""

    def __init__(self, at: int, error: Callable[[], BaseException]) -> None:
        self.at = at
        self.error = error
        self.count = 0
        self.aimed: Place | None = None
        self.place: Place | None = None
        self.passed: list[Place] | None = None

    def enter(self, frame: FrameType, event: str, arg: object) -> Any:
        if not _is_traced(frame.f_code) or not _is_called_by_package(frame):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self.count += 1
        if self.passed is not None:
            self.passed.append(Place(_name_of(frame.f_code), frame.f_lineno, "RESUME", frame.f_lasti))
        elif self.count == self.at:
            self.aimed = Place(_name_of(frame.f_code), frame.f_lineno, "RESUME", frame.f_lasti)
            _ = +_trigger
        return self.step

    def step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            name = _points(frame.f_code).get(frame.f_lasti)
            if name is not None:
                self.count += 1
                if self.passed is not None:
                    self.passed.append(Place(_name_of(frame.f_code), frame.f_lineno, name, frame.f_lasti))
                elif self.count == self.at:
                    self.aimed = Place(_name_of(frame.f_code), frame.f_lineno, name, frame.f_lasti)
                    _ = +_trigger
        return self.step

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """The signal's handler. In a frame of this file the signal was noticed too early or too late."""
        if frame is None or frame.f_code.co_filename == __file__:
            return
        self.place = self.aimed
        raise self.error()

    def run(self, operation: Callable[[], Any]) -> Outcome:
        before = signal.signal(_SIGNAL, self.handle)
        measuring = sys.gettrace()  # coverage's, in a process whose lines are counted: they are again afterwards
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
        return Outcome(self.count, self.place, result, raised)


def _name_of(code: CodeType) -> str:
    return f"{os.path.basename(code.co_filename).removesuffix('.py')}.{code.co_qualname}"


def interrupt_at(at: int, operation: Callable[[], Any], error: Callable[[], BaseException] = Interrupt) -> Outcome:
    """Run the operation in this thread, the main one, with an interrupt at its ``at``-th point, counted from 1."""
    return _Run(at, error).run(operation)


def list_points(operation: Callable[[], Any]) -> list[Place]:
    """The points that an operation passes, in order. Raises what it raises."""
    run = _Run(0, Interrupt)
    run.passed = []
    outcome = run.run(operation)
    if outcome.error is not None:
        raise outcome.error
    return run.passed
