"""What Codetta raises and what it answers when it refuses.

An error names the argument at fault and the remedy. A refusal is not an error: it is a `Reason`, collected in
lists by every `why_not`, so that callers can try the next candidate and `explain` can print all of them.
"""

from __future__ import annotations

from dataclasses import dataclass


class CodettaError(Exception):
    """Base class of everything that Codetta raises on purpose."""


class ArgumentError(CodettaError, ValueError):
    """A call that cannot be carried out as given: which argument, what is wrong with it, what to do."""

    def __init__(self, argument: str, problem: str, remedy: str) -> None:
        super().__init__(f"{argument}: {problem}. {remedy[:1].upper()}{remedy[1:]}.")
        self.argument = argument
        self.problem = problem
        self.remedy = remedy


class TraceError(CodettaError, TypeError):
    """The epilogue function does something that cannot become part of a program."""


class LoweringError(CodettaError, RuntimeError):
    """A backend could not turn a program into a kernel, with the reasons."""

    def __init__(self, what: str, reasons: list[Reason]) -> None:
        super().__init__(f"{what}: " + "; ".join(str(reason) for reason in reasons))
        self.reasons = reasons


class CheckError(CodettaError, AssertionError):
    """A program disagrees with the reference on the tensors of a call (CODETTA_CHECK=1)."""


@dataclass(frozen=True)
class Reason:
    """Why a candidate is refused: the rule it breaks and, where there is one, a counter-example."""

    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail}"


class Stage:
    """A part of a compilation, by name: an exception that leaves it knows where it was raised (`stage_of`)."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and not hasattr(error, "codetta_stage"):
            error.codetta_stage = self.name  # type: ignore[attr-defined]


def stage_of(error: BaseException) -> str | None:
    """The innermost stage that the exception was raised in, None for one from outside of all."""
    found: str | None = getattr(error, "codetta_stage", None)
    return found


class RefusedByPyTorchError(Exception):
    """A graph that PyTorch's own operators refuse when they run, though tracing lets it pass: they are to say so themselves."""
