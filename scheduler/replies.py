"""From errors to replies, and from replies to the exceptions that a client raises."""

from msgspec import UNSET

from mlxd.scheduler import messages as wire
from mlxd.scheduler.errors import (
    ConfigError,
    EngineFailedError,
    IdConflictError,
    InvalidParamError,
    InvalidPromptError,
    MlxdError,
    ProtocolError,
    RejectedError,
    RequestFailedError,
    RevokedError,
    UnauthenticatedError,
)
from mlxd.scheduler.events import Rejected

_PROTOCOL_CODES = frozenset(
    {
        "busy",
        "decode",
        "flood",
        "forbidden",
        "malformed_frames",
        "too_large",
        "too_many_clients",
        "unsupported",
    }
)


def reply_of(error: MlxdError, request_id: str, about: str = "") -> wire.Rejected | wire.Error:
    """What the daemon answers for a request that met `error`, or to a message of type `about` that did."""
    if isinstance(error, RejectedError):
        return wire.Rejected(
            id=request_id,
            reason=error.reason,
            message=str(error),
            retryable=error.retryable,
            retry_after_ms=error.retry_after_ms,
        )
    field = error.field if isinstance(error, InvalidParamError) else UNSET
    return wire.Error(id=request_id, code=error.code, message=str(error), field=field, about=about or UNSET)


def rejection_reply(event: Rejected) -> wire.Rejected:
    return wire.Rejected(
        id=event.key.request_id,
        reason=event.reason,
        message=event.message,
        retryable=event.retryable,
        retry_after_ms=event.retry_after_ms,
    )


def error_of(reply: wire.Error) -> MlxdError:
    field = "" if reply.field is UNSET else reply.field
    match reply.code:
        case "unauthenticated":
            return UnauthenticatedError()
        case "config":
            return ConfigError(reply.message)
        case "revoked":
            return RevokedError()
        case "invalid_param":
            return InvalidParamError.from_message(field, reply.message)
        case "invalid_prompt":
            return InvalidPromptError(reply.message)
        case "engine_failed":
            return EngineFailedError(reply.message)
        case code if code in _PROTOCOL_CODES:
            return ProtocolError(code, reply.message, field=field)
        case code:
            return RequestFailedError(code, reply.message)


def rejection_of(reply: wire.Rejected) -> MlxdError:
    if reply.reason == "id_conflict":
        return IdConflictError(reply.message)
    return RejectedError(
        reply.reason, reply.message, retryable=reply.retryable, retry_after_ms=reply.retry_after_ms
    )
