"""Which tenant a token belongs to."""

import hashlib
import hmac
from collections.abc import Sequence

from mlxd.scheduler.config import TenantConfig


class Credentials:
    """Digests of all tenants' tokens; the tokens themselves are nowhere."""

    def __init__(self, tenants: Sequence[TenantConfig]) -> None:
        self._tenants = [(bytes.fromhex(tenant.token_sha256), tenant) for tenant in tenants]

    def tenant_of(self, token: str) -> TenantConfig | None:
        """Takes the same time whichever tenant it is, and where it is none."""
        digest = hashlib.sha256(token.encode()).digest()
        found = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found
