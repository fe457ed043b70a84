"""What went wrong, in types that a caller can act on.

Whatever the person at the keyboard can mend is a `UserError`: its message is one line that names
the key or the file, the command line prints it without a traceback and exits 2, and no stage is
retried on it.
"""

from collections.abc import Sequence


class UserError(ValueError):
    """Something that the user gave is wrong; the message is one line that names the culprit."""


class ConfigError(UserError):
    """A key of the configuration is unknown, missing, or has a value that it does not take."""


class DataError(UserError):
    """A source, a tokenizer or a dataset folder is not what it should be."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, damaged, or of another model."""


class DeviceError(UserError):
    """A device that was asked for is not there."""


class NonFiniteError(ArithmeticError):
    """The loss or a gradient is NaN or infinite; the weights of the step before are intact.

    `consumed` counts the windows read before the global batch that did it, None if none did.
    """

    def __init__(self, message: str, consumed: int | None = None) -> None:
        super().__init__(message)
        self.consumed = consumed


class StageError(RuntimeError):
    """A stage ended without a result, through no fault of the user's; trying again may help.

    `last_lines` are the last that it printed; `advice` tells in a few words how it is continued.
    """

    advice: str = ""
    last_lines: Sequence[str] = ()
