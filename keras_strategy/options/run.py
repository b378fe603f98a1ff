"""Options and argument checks of `strategy.run`."""

import logging
from typing import Any, NamedTuple

logger = logging.getLogger("keras_strategy")


class RunOptions(NamedTuple):
    """Options of `strategy.run`.

    The three experimental ones are for TPUs under TensorFlow. They are accepted
    everywhere and have no effect; a value other than the default is logged.

    Attributes:
        experimental_enable_dynamic_batch_size: Has no effect.
        experimental_bucketizing_dynamic_shape: Has no effect.
        experimental_xla_options: Has no effect.
        compile: False runs the function as Python on every call, which is slow but
            easy to debug; on JAX each replica then runs by itself, so control flow may
            depend on its id. None and True compile where the backend does: on
            TensorFlow, and on JAX with several replicas.

    Example:

    ```python
    import keras_strategy as ks

    strategy = ks.OneDeviceStrategy("cpu:0")
    options = ks.RunOptions(compile=None)
    assert strategy.run(lambda: 3, options=options) == 3
    ```
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
    compile: bool | None = None


_DEFAULT = RunOptions()


def check_call(fn: Any, args: Any) -> None:
    """Raise unless `fn` is callable and `args` is a tuple or list.

    Raises:
        TypeError: If `fn` is not callable.
        ValueError: If `args` is neither a tuple nor a list.
    """
    if not callable(fn):
        raise TypeError(
            "Argument `fn` must be a function. "
            f"Received: fn={fn!r} of type {type(fn).__name__}"
        )
    if not isinstance(args, tuple | list):
        raise ValueError(
            "Argument `args` must be a tuple or list of positional arguments, "
            f"such as (x,). Received: args={args!r} of type {type(args).__name__}"
        )


def check_run_options(options: Any) -> RunOptions:
    """Return the options, or the default ones for None.

    Raises:
        TypeError: If `options` has another type.
        ValueError: If an option is invalid.
    """
    if options is None:
        return _DEFAULT
    if not isinstance(options, RunOptions):
        raise TypeError(
            "Argument `options` of `run` must be a `keras_strategy.RunOptions` or "
            f"None. Received: options={options!r} of type {type(options).__name__}"
        )
    if options.compile not in (None, True, False):
        raise ValueError(
            "`RunOptions.compile` must be None, True or False. Received: "
            f"compile={options.compile!r}"
        )
    if options[:3] != _DEFAULT[:3]:
        logger.info("The experimental options of %r have no effect here.", options)
    return options
