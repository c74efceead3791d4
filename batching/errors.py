"""The root of every error a user can see, and those that rows raise."""


class MlxdError(Exception):
    """Base of all errors of mlxd. `code` is stable and goes over the wire; messages name value and limit."""

    code = "internal"


class InvalidParamError(MlxdError):
    """A request's parameter is outside its range."""

    code = "invalid_param"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {value!r}; it must be {allowed}")
        self.field = field

    @classmethod
    def from_message(cls, field: str, message: str) -> "InvalidParamError":
        """The error as it came over the wire, in its own words."""
        error = cls.__new__(cls)
        MlxdError.__init__(error, message)
        error.field = field
        return error


class InvalidPromptError(MlxdError):
    """A prompt is empty or has token ids outside the vocabulary."""

    code = "invalid_prompt"


class ModelError(MlxdError):
    """A model folder cannot be loaded or served; the message says which file or which layer kind."""

    code = "model"


class OutOfMemoryError(MlxdError, RuntimeError):
    """The device had no memory for a step, or for what belongs to one. A RuntimeError, as MLX's own are."""

    code = "out_of_memory"


def show_path(keys: tuple[str | int, ...]) -> str:
    """("tenants", 0, "name") -> "tenants[0].name"."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


class SettingError(ModelError):
    """A setting that is wrong for this model or this machine: no restart mends it.

    Attributes:
        keys: its path in the configuration, ("cache", "budget") or ("tenants", 0, "kv_share").
        sentence: what follows the setting's name: "is 0.5; it must be ...".
    """

    def __init__(self, keys: tuple[str | int, ...], sentence: str) -> None:
        super().__init__(f"{show_path(keys)} {sentence}")
        self.keys = keys
        self.sentence = sentence
