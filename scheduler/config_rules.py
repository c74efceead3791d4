"""What is wrong with a configuration beyond the types of single fields.

Each rule yields a value's path and the sentence that follows it.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from mlxd.batching.errors import show_path
from mlxd.caches.budget import check_budget, parse_size
from mlxd.caches.quantization import Quantization
from mlxd.scheduler.addresses import check_socket_address, split_host_port
from mlxd.scheduler.document import Keys
from mlxd.scheduler.sections import CacheConfig, JournalConfig, ServerConfig, TenantConfig, TenantLimits
from mlxd.scheduler.z85 import is_key

Problem = tuple[Keys, str]


def attention_problems(quantization: Quantization | None, attention: str) -> Iterator[Problem]:
    if quantization is None:
        return
    if attention == "gathered":
        yield ("decode", "attention"), "is 'gathered'; with cache.quantization pages are read where they lie"
    if attention == "kernel" and quantization.start:
        yield (
            ("decode", "attention"),
            "is 'kernel'; with cache.quantization.start above 0 pages are read in_place",
        )


def chunk_problems(chunk: int | Literal["auto"], page: int | Literal["auto"]) -> Iterator[Problem]:
    if chunk != "auto" and page != "auto" and chunk % page:
        sentence = f"is {chunk}; it must be a multiple of cache.page_size, {page}"
        yield ("scheduler", "prefill_chunk"), sentence


def cache_problems(cache: CacheConfig) -> Iterator[Problem]:
    try:
        check_budget(cache.budget)
    except ValueError as error:
        yield ("cache", "budget"), str(error)
    yield from _disk_problems(cache)


def _disk_problems(cache: CacheConfig) -> Iterator[Problem]:
    if cache.disk is None:
        return
    if not cache.prefix:
        yield ("cache", "disk"), "needs cache.prefix: true"
    try:
        _ = cache.disk.folder
    except ValueError as error:
        yield ("cache", "disk", "path"), str(error)
    try:
        _ = cache.disk.capacity_bytes
    except ValueError as error:
        yield ("cache", "disk", "max_bytes"), str(error)


def journal_problems(journal: JournalConfig) -> Iterator[Problem]:
    if journal.durability == "accepted" and journal.path is None:
        yield ("journal", "path"), "is null; with durability 'accepted' it must name a file"
    try:
        parse_size(journal.max_bytes)
    except ValueError as error:
        yield ("journal", "max_bytes"), str(error)


def path_problems(paths: Mapping[Keys, str | None]) -> Iterator[Problem]:
    """`paths`: what becomes a file's name, by its setting."""
    for keys, path in paths.items():
        try:
            os.fsencode(path or "")
        except UnicodeEncodeError:
            encoding = sys.getfilesystemencoding().upper()
            yield keys, f"is {path!r}; file names are {encoding} here, which lacks a character of it"


def address_problems(server: ServerConfig) -> Iterator[Problem]:
    addresses = _addresses(server)
    for keys, address in addresses.items():
        try:
            check_socket_address(address, encrypted=keys[1] == "curve")
        except ValueError as error:
            yield keys, str(error)
    try:
        split_host_port(server.metrics)
    except ValueError as error:
        yield ("server", "metrics"), str(error)
    holders: dict[str, str] = {}
    for keys, address in addresses.items():
        name = show_path(keys)
        first = holders.setdefault(os.path.normpath(address), name)
        if first != name:
            yield keys, f"is {address!r}; it must differ from {first}"
        if address.removeprefix("tcp://") == server.metrics:
            yield ("server", "metrics"), f"is {server.metrics!r}; {name} has that port"


def _addresses(server: ServerConfig) -> dict[Keys, str]:
    found: dict[Keys, str] = {
        ("server", "submit"): server.submit,
        ("server", "control"): server.control,
    }
    if server.curve is not None:
        found["server", "curve", "submit"] = server.curve.submit
        found["server", "curve", "control"] = server.curve.control
    return found


def tenant_problems(tenants: Sequence[TenantConfig], *, has_curve: bool) -> Iterator[Problem]:
    yield from limit_problems(tenants)
    holders: dict[str, int] = {}
    for index, tenant in enumerate(tenants):
        credentials = {"token_sha256": tenant.token_hashes, "public_key": tenant.public_keys}
        if not tenant.token_hashes and (not has_curve or not tenant.public_keys):
            hint = ", and public_key, too" if has_curve else ""
            yield ("tenants", index, "token_sha256"), f"is missing{hint}"
        for key in tenant.public_keys:
            if not is_key(key):
                yield ("tenants", index, "public_key"), f"is {key!r}; it is no key: Z85 text of 32 bytes"
        for setting, noun in (("token_sha256", "tokens"), ("public_key", "keys")):
            for number, credential in enumerate(credentials[setting]):
                first = holders.setdefault(credential, index)
                if first != index or credential in credentials[setting][:number]:
                    yield ("tenants", index, setting), f"is that of tenants[{first}]; {noun} must differ"


def limit_problems(tenants: Sequence[TenantLimits]) -> Iterator[Problem]:
    """What is wrong with a list of tenants beside each other."""
    names: dict[str, int] = {}
    kept = 0.0
    for index, tenant in enumerate(tenants):
        first = names.setdefault(tenant.name, index)
        if first != index:
            yield ("tenants", index, "name"), f"is {tenant.name!r}; tenants[{first}] has that name"
        if tenant.kv_reserve > tenant.kv_share:
            sentence = f"is {tenant.kv_reserve:g}; it must not be above its kv_share, {tenant.kv_share:g}"
            yield ("tenants", index, "kv_reserve"), sentence
        kept += tenant.kv_reserve
        if kept > 1 + 1e-9:
            yield ("tenants", index, "kv_reserve"), f"makes the reserves {kept:g} together; the limit is 1"
