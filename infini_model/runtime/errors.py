"""Exception types that callers handle differently.

Anything the user can fix is a `UserError`: its message is one line that names the key or the file,
the command line prints it without a traceback and exits 2, and stages are not retried after it.
"""

from collections.abc import Sequence

# HTTP status codes of a busy server: worth a retry.
BUSY = (408, 425, 429)


class UserError(ValueError):
    """Wrong user input; the message is one line that names the key or the file."""


class ConfigError(UserError):
    """A configuration key is unknown or missing, or has an invalid value."""


class DataError(UserError):
    """A source, a tokenizer or a dataset folder is missing, invalid or damaged."""


class StoreError(UserError):
    """An object store refuses a request for good, or an address is wrong."""


class ObjectMissingError(StoreError):
    """There is no object at an address."""


class ObjectDamagedError(StoreError):
    """An object does not have the checksum that its record names."""


class ObjectChangedError(StoreError):
    """An object was overwritten between two requests that belong together."""


class RunLostError(UserError):
    """Another machine has taken over a run whose store this one could not reach."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete or damaged, or belongs to another model."""


class DeviceError(UserError):
    """A requested device does not exist or cannot be used."""


class NonFiniteError(ArithmeticError):
    """The loss or a gradient is NaN or infinite; the weights are those of the previous step."""


class UnreachableError(ConnectionError):
    """A host or a store does not answer or cuts the connection; a retry may help. One line."""


class StageError(RuntimeError):
    """A stage failed through no fault of the user's; a retry may succeed.

    `last_lines` are the last lines of its output; if it `is_final`, a retry would not help.
    """

    last_lines: Sequence[str] = ()
    is_final = False


def describe_error(error: BaseException) -> str:
    """An error in one line: its message, and the notes on it that the message does not have."""
    message = str(error)
    notes = (note for note in getattr(error, "__notes__", ()) if note not in message)
    return "; ".join([" ".join(message.split()), *notes])
