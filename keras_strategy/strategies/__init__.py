"""The strategies: each is a choice of devices and a few lines."""
