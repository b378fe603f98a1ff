"""Replicas as threads of this process, which an adapter gives its tensors to."""
