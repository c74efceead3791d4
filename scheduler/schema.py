"""What a configuration struct allows, in words."""

from collections.abc import Sequence
from functools import lru_cache

from msgspec import inspect

Type = inspect.Type


@lru_cache(maxsize=16)
def _root(target: type) -> Type:
    return inspect.type_info(target)


def type_at(target: type, keys: Sequence[str | int]) -> Type:
    """The declared type of the value that `keys` lead to from a `target` struct."""
    info = _root(target)
    for key in keys:
        if isinstance(info, inspect.UnionType):
            info = next(
                kind for kind in info.types if isinstance(kind, inspect.VarTupleType | inspect.StructType)
            )
        if isinstance(key, int):
            assert isinstance(info, inspect.VarTupleType | inspect.ListType | inspect.TupleType)
            info = info.item_types[key] if isinstance(info, inspect.TupleType) else info.item_type
        else:
            info = next(field.type for field in _fields(info) if field.name == key)
    return info


def _fields(info: Type) -> Sequence[inspect.Field]:
    """Of a struct, or of the struct that a value may be; none of anything else."""
    kinds = info.types if isinstance(info, inspect.UnionType) else (info,)
    return next((kind.fields for kind in kinds if isinstance(kind, inspect.StructType)), ())


def field_names(info: Type) -> list[str]:
    return [field.name for field in _fields(info)]


def is_secret(info: Type) -> bool:
    """Whether the type, or one that it may be, is marked with `Meta(extra={"secret": True})`."""
    if isinstance(info, inspect.UnionType):
        return any(is_secret(kind) for kind in info.types)
    return isinstance(info, inspect.Metadata) and bool((info.extra or {}).get("secret"))


def describe(info: Type) -> str:
    """The allowed values: what `Meta(extra={"allowed": ...})` says, else as in "auto or an integer"."""
    match info:
        case inspect.Metadata():
            return str((info.extra or {}).get("allowed") or describe(info.type))
        case inspect.UnionType():
            return " or ".join(describe(kind) for kind in info.types)
        case inspect.LiteralType():
            return _one_of(info.values)
        case inspect.IntType():
            return "an integer" + _range(info)
        case inspect.FloatType():
            return "a number" + _range(info)
        case inspect.StrType():
            return "text" + _text_limits(info)
        case inspect.VarTupleType() | inspect.ListType():
            return "a list" + _lengths(info.min_length, info.max_length, "entries")
        case inspect.TupleType():
            return f"a list of {len(info.item_types)} entries"
        case inspect.BoolType():
            return "true or false"
        case inspect.NoneType():
            return "null"
        case inspect.StructType():
            return "a map"
        case _:
            raise AssertionError(f"no words for {type(info).__name__}")


def _one_of(values: Sequence[object]) -> str:
    *others, last = [str(value) for value in values]
    return f"{', '.join(others)} or {last}" if others else last


def _range(info: inspect.IntType | inspect.FloatType) -> str:
    limits = {">": info.gt, ">=": info.ge, "<": info.lt, "<=": info.le}
    shown = [
        f"{sign} {limit:g}" if isinstance(limit, float) else f"{sign} {limit}"
        for sign, limit in limits.items()
        if limit is not None
    ]
    return f" {' and '.join(shown)}" if shown else ""


def _text_limits(info: inspect.StrType) -> str:
    if info.pattern is not None:
        return f" that matches {info.pattern}"
    return _lengths(info.min_length, info.max_length, "characters")


def _lengths(low: int | None, high: int | None, noun: str) -> str:
    if high is None:
        return f" of {low} or more {noun}" if low else ""
    return f" of {low or 0} to {high} {noun}"
