"""Every message on the wire, one struct each: the field names here are the field names there."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from mlxd.batching.plan import TokenLogprobs
from mlxd.batching.sampling_params import SamplingParams
from mlxd.metrics.stats import FairnessStats
from mlxd.scheduler.events import Usage
from mlxd.scheduler.priority import PriorityName
from mlxd.scheduler.status import DiskStatus, EngineStatus, JournalStatus, TenantStatus

PROTOCOL_VERSION = 1
MAX_ID_LENGTH = 128
MAX_CREDIT = 2**40

RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_LENGTH)]
EchoId = Annotated[str, Meta(max_length=MAX_ID_LENGTH)]
"""Optional on messages that name no request; the reply carries it back."""
Credit = Annotated[int, Meta(ge=0, le=MAX_CREDIT)]


DeadlineMs = Annotated[int, Meta(ge=1, le=86_400_000)]


class _FromClient(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    v: int = PROTOCOL_VERSION


class Hello(_FromClient, frozen=True, kw_only=True, tag="hello"):
    """First message on each socket.

    Attributes:
        token: the tenant's secret; empty on a CURVE connection, whose key says it all.
        tenant: whom the client takes itself for; another one than its credential's is an error.
        client: a name for the daemon's log.
    """

    v: int
    token: Annotated[str, Meta(max_length=1024)] = ""
    tenant: Annotated[str, Meta(max_length=64)] = ""
    client: Annotated[str, Meta(max_length=128)] = ""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str


class Generate(_FromClient, frozen=True, kw_only=True, tag="generate"):
    """A request. Exactly one of `prompt`, `messages` and `token_ids` is given.

    `stream`: text comes in chunks as it is made; otherwise all of it comes in `done`.
    `priority`: its class; a tenant's highest one may be lower.
    `deadline_ms`: from its arrival on; without its end by then it ends as expired.
    `credit`: bytes of chunks that may be sent until `grant` allows more; unset: as fast as they are read.
    """

    id: RequestId
    prompt: str | UnsetType = UNSET
    messages: tuple[ChatMessage, ...] | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    sampling: SamplingParams = SamplingParams()
    stream: bool = True
    priority: PriorityName = "normal"
    deadline_ms: DeadlineMs | UnsetType = UNSET
    credit: Credit | UnsetType = UNSET


class Resume(_FromClient, frozen=True, kw_only=True, tag="resume"):
    """Tell a request of this tenant again, from `seq` on, to this connection in place of an earlier one.

    `seq`: pieces that the client has; each token is one, and a chunk without tokens is one.
    """

    id: RequestId
    seq: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    credit: Credit | UnsetType = UNSET


class Grant(_FromClient, frozen=True, kw_only=True, tag="grant"):
    """`bytes` of chunks more may be sent for a request that began with `credit`."""

    id: RequestId
    bytes: Annotated[int, Meta(ge=1, le=MAX_CREDIT)]


class Cancel(_FromClient, frozen=True, kw_only=True, tag="cancel"):
    """`id`: the request to end; of this tenant, whichever connection sent it."""

    id: RequestId


class Status(_FromClient, frozen=True, kw_only=True, tag="status"):
    id: EchoId = ""


class Ping(_FromClient, frozen=True, kw_only=True, tag="ping"):
    """Answered by the scheduler itself, so that a hung engine does not look alive."""

    id: EchoId = ""


class Drain(_FromClient, frozen=True, kw_only=True, tag="drain"):
    """Stop admitting, finish what runs, exit. For operators."""

    id: EchoId = ""


class Reload(_FromClient, frozen=True, kw_only=True, tag="reload"):
    """Read the configuration file anew, for its tenants. For operators."""

    id: EchoId = ""


ClientMessage = Hello | Generate | Resume | Grant | Cancel | Status | Ping | Drain | Reload
CLIENT_MESSAGE_TYPES = (
    *("cancel", "drain", "generate", "grant", "hello"),
    *("ping", "reload", "resume", "status"),
)


class _FromServer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    v: int = PROTOCOL_VERSION


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a message may hold; `max_model_len` and `vocab_size` are 0 while the model loads."""

    max_message_bytes: int
    max_string_bytes: int
    max_items: int
    max_depth: int
    max_client_buffer_bytes: int
    heartbeat_ms: int
    max_model_len: int = 0
    vocab_size: int = 0


class Welcome(_FromServer, frozen=True, kw_only=True, tag="hello"):
    """The answer to hello.

    Attributes:
        versions: lowest and highest protocol version spoken.
        epoch: changes with each start of the daemon; a new one means that older requests are gone.
        control: endpoint of the control socket.
    """

    versions: tuple[int, int]
    epoch: str
    tenant: str
    model: str
    state: str
    control: str
    limits: Limits


class Accepted(_FromServer, frozen=True, kw_only=True, tag="accepted"):
    id: str


class Chunk(_FromServer, frozen=True, kw_only=True, tag="chunk"):
    """`seq`: pieces of the answer before this chunk. It holds one for each of its tokens, or one without any.

    Text may lag behind the ids: half a character or a possible stop string is held back.
    """

    id: str
    seq: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | UnsetType = UNSET


class KeepAlive(_FromServer, frozen=True, kw_only=True, tag="keepalive"):
    """Sent once a heartbeat for a request that yields nothing, and without id on an idle connection."""

    id: str | UnsetType = UNSET
    state: Literal["waiting", "running", "paused", "idle"]


class Done(_FromServer, frozen=True, kw_only=True, tag="done"):
    """Terminal. The last three fields only where the request had `stream: false`."""

    id: str
    finish_reason: Literal["stop", "length"]
    usage: Usage
    text: str | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    logprobs: tuple[TokenLogprobs, ...] | UnsetType = UNSET


class Error(_FromServer, frozen=True, kw_only=True, tag="error"):
    """Terminal without `about`. With it, the answer to one message: a request open under `id` goes on.

    `about`: that message's type; "unknown" where it has none that is known.
    """

    id: str | UnsetType = UNSET
    code: str
    message: str
    field: str | UnsetType = UNSET
    about: str | UnsetType = UNSET


class Cancelled(_FromServer, frozen=True, kw_only=True, tag="cancelled"):
    """Terminal."""

    id: str
    usage: Usage


class Rejected(_FromServer, frozen=True, kw_only=True, tag="rejected"):
    """Terminal, in place of `accepted`."""

    id: str
    reason: str
    message: str
    retryable: bool
    retry_after_ms: int = 0


class CancelReply(_FromServer, frozen=True, kw_only=True, tag="ok"):
    """`not_found` covers unknown, finished and other tenants' ids alike."""

    id: str
    result: Literal["cancelling", "not_found"]


class Pong(_FromServer, frozen=True, kw_only=True, tag="pong"):
    id: str
    state: str


class Draining(_FromServer, frozen=True, kw_only=True, tag="draining"):
    """The daemon takes no more requests and exits when the open ones are done."""

    id: str


class Reloaded(_FromServer, frozen=True, kw_only=True, tag="reloaded"):
    """`changes`: a line for each tenant that was added, removed or changed."""

    id: str
    changes: tuple[str, ...]


class StatusReply(_FromServer, frozen=True, kw_only=True, tag="status"):
    """The daemon as the asker may see it: nothing here depends on other tenants, but for an operator.

    `tenants`, `waiting`, `running`, `paused`: the asker's own, or those of all for an operator. `engine`,
    `disk`, where there is one, and `fairness` are for operators. `journal`: None where there is none.
    """

    id: str
    state: str
    epoch: str
    uptime_s: float = 0.0
    model: str
    tenants: dict[str, TenantStatus]
    waiting: int
    running: int
    paused: int = 0
    kv_capacity_bytes: int
    engine: EngineStatus | None = None
    disk: DiskStatus | None = None
    fairness: FairnessStats | None = None
    journal: JournalStatus | None = None
    notes: dict[str, str]
    error: str


ServerMessage = (
    Welcome
    | Accepted
    | Chunk
    | KeepAlive
    | Done
    | Error
    | Cancelled
    | Rejected
    | CancelReply
    | Pong
    | Draining
    | Reloaded
    | StatusReply
)
Terminal = Done | Error | Cancelled | Rejected
