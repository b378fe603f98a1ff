"""Protocols of backends and the per-thread context, independent of backends."""
