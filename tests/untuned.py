"""tf.data without the thread that tunes it."""

import tensorflow as tf


def leave_untuned() -> None:
    """Iterate over all datasets from now on without tuning.

    Whoever drops an iterator waits for that thread. On busy cores it can look whether
    it is to end just before the request, and then sleeps first, for up to a minute.
    """
    iterate = tf.data.Dataset.__iter__
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    tf.data.Dataset.__iter__ = lambda self: iterate(self.with_options(untuned))
