"""Pure rules that all adapters share: no hooks, no engine."""
