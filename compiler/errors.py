"""Every error a user can meet. One line: what happened, where, why, and the next step.

The class carries the process exit code: 2 for bad input, 1 for a run that failed.
"""


class RopewayError(Exception):
    """Base of all errors that Ropeway raises on purpose; its text is one line for a person."""

    exit_code = 1


class RunError(RopewayError):
    """Good input, but the run failed: out of memory, a broken device, a failed self-check."""


class InputError(RopewayError):
    """The input can't be used; nothing was changed on disk."""

    exit_code = 2


class CheckpointError(InputError):
    """A checkpoint is incomplete, damaged or of a kind that can't be read."""


class ImportModelError(InputError):
    """A model holds an op or a structure that the importer doesn't know."""


class ArtifactError(InputError):
    """An artifact is damaged, incomplete or of another format version."""


class IRSyntaxError(InputError):
    """IR text, a dim or a pass spec that doesn't parse; says line, column and what was expected."""

    def __init__(self, message: str, *, line: int = 0, column: int = 0, expected: str = "") -> None:
        super().__init__(message)
        self.line = line
        self.column = column
        self.expected = expected


class VerifyError(InputError):
    """A module breaks a rule of the IR; names the rule, the op and its source line.

    `code` and `rule` identify the rule, `op` is the op's text, `loc` the line of the model's
    source, and `around` the text of up to five ops around the fault, for a longer report.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        rule: str = "",
        op: str = "",
        loc: str = "",
        around: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.rule = rule
        self.op = op
        self.loc = loc
        self.around = around


class PipelineError(InputError):
    """A pipeline that can't be built, or a pass that failed."""


class TargetError(InputError):
    """A target is unknown, unavailable here or can't take the program."""


class MissingExtraError(InputError):
    """An optional dependency isn't installed; names the extra that brings it."""

    def __init__(self, what: str, module: str, extra: str) -> None:
        super().__init__(
            f"{what} needs the package '{module}', which isn't installed: "
            f"pip install 'ropeway[{extra}]'"
        )


class RequestError(InputError):
    """A request has a bad value; `field` names it as the caller wrote it, `reason` is the rest."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = message
