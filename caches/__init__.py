"""Cache kinds, their pages and the ledger that counts their bytes."""
