"""Replicas as threads of one process, for any backend."""
