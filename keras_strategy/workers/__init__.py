"""Where the workers of one strategy meet, agree on small facts and fail together.

It imports no engine. The tensors travel by the engine's own means; what goes through
here is small: who is there, what each is about to do, and who has failed.
"""

from keras_strategy.workers.member import Member
from keras_strategy.workers.settings import default_timeout_seconds, hub_address

__all__ = ["Member", "default_timeout_seconds", "hub_address"]
