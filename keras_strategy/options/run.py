"""What a call takes: a function, its arguments, and options beside them."""

import logging
from typing import Any, NamedTuple

logger = logging.getLogger("keras_strategy")


class RunOptions(NamedTuple):
    """How `strategy.run` calls its function.

    The three experimental ones are for TPUs under TensorFlow. They are accepted
    everywhere, and have no effect where this package runs; a value other than the
    default is logged.

    Attributes:
        experimental_enable_dynamic_batch_size: Has no effect.
        experimental_bucketizing_dynamic_shape: Has no effect.
        experimental_xla_options: Has no effect.
        compile: False calls the function as Python on every call, which is slow and
            good for looking into it; on JAX each replica then runs by itself, and
            may decide by its number. None and True compile it where the engine does: on
            TensorFlow and JAX with several replicas.

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
    """Checks what is to be called on components or replicas.

    Args:
        fn: The function.
        args: Its positional arguments.

    Raises:
        TypeError: If `fn` cannot be called.
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
    """Returns the options of a run.

    Args:
        options: `RunOptions`, or None for the default ones.

    Raises:
        TypeError: If `options` is something else.
        ValueError: If one of them has a value that it cannot have.
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
        logger.info("The experimental ones of %r have no effect here.", options)
    return options
