"""What the code of a model raises that meets what it does not expect, and how that is told."""

MODEL_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Which of them it is depends on the model's own code."""

_LONGEST_MESSAGE = 400


def summary_of(error: Exception) -> str:
    """Kind and message of a foreign error on one line, however much its library had to say."""
    message = " ".join(str(error).split())
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]} ..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
