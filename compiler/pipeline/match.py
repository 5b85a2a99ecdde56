"""Patterns as plain functions whose constraints explain themselves.

A matcher starts from an anchor op and calls `require`, `producer`, ... on an Attempt. The first
constraint that fails raises Miss, which carries the op, the constraint in words and how many
constraints held before it: so near misses cost a pattern nothing to report.
"""

from __future__ import annotations

from typing import NoReturn

from ropeway.compiler.ir.graph import Op, Operand, Value
from ropeway.compiler.ir.rewrite import Rewriter
from ropeway.compiler.ir.weights import Weight
from ropeway.compiler.pipeline.base import NearMiss


class Miss(Exception):  # noqa: N818 -- control flow inside a matcher, never seen by a user
    """A constraint of a pattern that didn't hold."""

    def __init__(self, near: NearMiss) -> None:
        super().__init__(str(near))
        self.near = near


def describe_op(op: Op) -> str:
    """The op as a person finds it in printed IR: its name and its first result."""
    return f"{op.name} %{op.results[0].name}" if op.results else op.name


def describe_operand(operand: Operand) -> str:
    """Where an operand comes from; without its name, so that equal misses can be counted."""
    if isinstance(operand, Weight):
        return "a weight"
    if operand.producer is None:
        return "an input of the function"
    return f"the result of {operand.producer.name}"


class Attempt:
    """One try to match a pattern at `anchor`, with the rewriter that would then apply it."""

    def __init__(self, anchor: Op, rewriter: Rewriter) -> None:
        self.anchor = anchor
        self.rewriter = rewriter
        self.depth = 0

    def require(self, holds: bool, constraint: str, op: Op | None = None) -> None:
        """Go on if `holds`; else miss, blaming `op` (the anchor if not given)."""
        if holds:
            self.depth += 1
            return
        self.fail(constraint, op)

    def fail(self, constraint: str, op: Op | None = None) -> NoReturn:
        """Miss in any case. Raises Miss."""
        blamed = op or self.anchor
        raise Miss(
            NearMiss(
                op=describe_op(blamed), constraint=constraint, loc=blamed.loc, depth=self.depth
            )
        )

    def value(self, operand: Operand, what: str) -> Value:
        """`operand` as a value computed in the step, not a weight."""
        if not isinstance(operand, Value):
            self.fail(f"{what} is {describe_operand(operand)}; the pattern needs a computed value")
        self.depth += 1
        return operand

    def weight(self, operand: Operand, what: str) -> Weight:
        """`operand` as a weight, known when the artifact is written."""
        if not isinstance(operand, Weight):
            self.fail(f"{what} is {describe_operand(operand)}; the pattern needs a weight")
        self.depth += 1
        return operand

    def producer(self, operand: Operand, what: str, *names: str) -> Op:
        """The op that makes `operand`, whose name must be among `names`."""
        value = self.value(operand, what)
        op = value.producer
        wanted = " or ".join(names)
        if op is None or op.name not in names:
            self.fail(f"{what} must come from {wanted}, but it is {describe_operand(value)}", op)
        self.depth += 1
        return op

    def sole_user(self, value: Value, what: str) -> Op:
        """The one op that reads `value`; a function's output counts as a user."""
        user = self.rewriter.single_user(value)
        if user is None:
            users = [op.name for op in self.rewriter.users(value)]
            outside = " and the function's result" if self.rewriter.is_output(value) else ""
            shown = ", ".join(users) or "no op"
            self.fail(
                f"{what} must have one user, but it is read by {shown}{outside}",
                value.producer,
            )
        self.depth += 1
        return user
