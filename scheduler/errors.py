"""Every error a user can meet, one class and one wire code each."""

from mlxd.batching.errors import InvalidParamError, InvalidPromptError, MlxdError, ModelError

__all__ = [
    "ClientTimeoutError",
    "ConfigError",
    "ConnectionLostError",
    "EngineFailedError",
    "IdConflictError",
    "InvalidParamError",
    "InvalidPromptError",
    "InvalidTransitionError",
    "JournalError",
    "MlxdError",
    "ModelError",
    "ProtocolError",
    "RejectedError",
    "RequestFailedError",
    "RevokedError",
    "UnauthenticatedError",
]


UNKNOWN_TYPE = "unknown"
"""In place of a message's type, where it has none that is known."""


class ConfigError(MlxdError):
    """The configuration file is wrong; the message says where, what and the limit."""

    code = "config"


class ProtocolError(MlxdError):
    """A frame that is not a message: `code` says which rule it broke.

    Attributes:
        field: the field at fault, "sampling.seed"; empty where it is the frame as a whole.
        request_id: the id that the frame names; empty where there is none.
        about: the message's type; "unknown" where it has none that is known.
    """

    def __init__(self, code: str, message: str, *, field: str = "", request_id: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.request_id = request_id
        self.about = UNKNOWN_TYPE


class UnauthenticatedError(MlxdError):
    """The credential is missing, wrong or unknown; which of them is never told."""

    code = "unauthenticated"

    def __init__(self, message: str = "no valid credential") -> None:
        super().__init__(message)


class RevokedError(MlxdError):
    """The credential was good, and was withdrawn since."""

    code = "revoked"

    def __init__(self) -> None:
        super().__init__("the tenant or its credential was withdrawn")


class IdConflictError(MlxdError):
    """The tenant has an open request with this id."""

    code = "id_conflict"


class RejectedError(MlxdError):
    """The request was refused before it was accepted.

    Attributes:
        reason: "never_fits", "queue_full", "draining", "loading", "capacity", "quota", "journal_full" or
            "journal_failed".
        retryable: whether the same request can be accepted later.
        retry_after_ms: when to try; 0 where it makes no sense.
    """

    code = "rejected"

    def __init__(self, reason: str, message: str, *, retryable: bool, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retryable = retryable
        self.retry_after_ms = retry_after_ms


class JournalError(RejectedError):
    """The journal could not take a request; `reason`: "journal_full" or "journal_failed"."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message, retryable=True, retry_after_ms=1_000)


class RequestFailedError(MlxdError):
    """An accepted request ended with an error; `code` is "numeric", "internal", "slow_client", ..."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EngineFailedError(MlxdError):
    """The engine stopped on an error of its own; every open request ended with it."""

    code = "engine_failed"


class InvalidTransitionError(MlxdError):
    """A request was moved between states that are not connected: a bug of ours, never the client's."""


class ConnectionLostError(MlxdError):
    """The daemon went away in the middle of a request."""

    code = "connection_lost"


class ClientTimeoutError(MlxdError):
    """The daemon did not answer in time."""

    code = "timeout"
