"""The predictions of all workers' rows, where each reads rows of its own."""

from typing import Any

import keras
from keras import tree

from keras_strategy.input.splitting import reads_per_worker_rows
from keras_strategy.rules.ownership import strategy_of_model


def predict(model: keras.Model, x: Any, gather: bool = False, **kwargs: Any) -> Any:
    """`model.predict`, and the predictions of other workers' rows if they are wanted.

    Where all workers have the same data, `model.predict` gives the predictions of all
    rows. Where each reads rows of its own it gives those of this worker's; all of them
    travel only with `gather=True`.

    Args:
        model: The model.
        x: See `keras.Model.predict`.
        gather: Whether to join the workers' own predictions. All workers must call
            this, and each gets all of them: first those of worker 0, in the order in
            which it has read the rows, then those of worker 1.
        **kwargs: Other arguments of `keras.Model.predict`.

    Returns:
        The predictions, as NumPy arrays in the structure of the model's outputs.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks

    with ks.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    x = np.ones((4, 3), "float32")
    assert ks.predict(model, x, gather=True, verbose=0).shape == (4, 1)
    ```
    """
    predictions = model.predict(x, **kwargs)
    strategy = strategy_of_model(model)
    if not gather or strategy is None or not reads_per_worker_rows(x, strategy):
        return predictions
    workers = strategy.extended.group.workers
    with strategy.scope():

        def of_all(part):
            rows, _ = workers.gather("predict", keras.ops.convert_to_tensor(part), 0)
            return keras.ops.convert_to_numpy(rows)

        return tree.map_structure(of_all, predictions)
