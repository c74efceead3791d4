"""Which tenant a client belongs to: by its CURVE key, or by its token where nothing encrypts."""

import hmac
from collections.abc import Sequence

from mlxd.scheduler.config import TenantConfig
from mlxd.scheduler.tokens import token_hash


class Credentials:
    """Hashes of all tenants' tokens, and their public keys; the secrets themselves are nowhere.

    What shows a client's tenant, its proof, is the hash of its token or its public key.
    """

    def __init__(self, tenants: Sequence[TenantConfig]) -> None:
        self._by_hash = {digest: tenant for tenant in tenants for digest in tenant.token_hashes}
        self._by_key = {key: tenant for tenant in tenants for key in tenant.public_keys}

    def proof_of(self, key: str, token: str) -> str:
        """`key`: what the connection's handshake proved, or empty. A token beside a key proves nothing."""
        if not key:
            return token_hash(token)
        return "" if token else key

    def knows_key(self, key: str) -> bool:
        return key in self._by_key

    def holder_of(self, proof: str) -> TenantConfig | None:
        """Whose a proof is now that was good before; for guesses there is `tenant_of`."""
        return self._by_key.get(proof) or self._by_hash.get(proof)

    def tenant_of(self, proof: str) -> TenantConfig | None:
        """Takes the same time for all hashes, whichever tenant's they are, and where they are none's."""
        if self.knows_key(proof):
            return self._by_key[proof]
        found = None
        for digest, tenant in self._by_hash.items():
            if hmac.compare_digest(digest, proof):
                found = tenant
        return found
