"""Requests, policies, the engine, the wire and the command line."""
