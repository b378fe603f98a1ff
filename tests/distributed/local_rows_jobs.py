"""Workers of which each trains on rows that it alone has read."""

import contextlib
import inspect
from typing import Any

import keras
import numpy as np

import keras_strategy as ks
from tests.distributed.input_jobs import Rows, model_of, weights_of
from tests.distributed.jobs import classifier, digits, in_charge, weights
from tests.speed.input_figures import Watch

# Rows of each worker's batches, step by step; 0 where its data has ended. A job takes
# as many columns as there are workers.
EQUAL = [[4, 4, 4], [4, 4, 4], [2, 2, 2]]
UNEQUAL = [[5, 2, 4], [4, 6, 1], [3, 0, 2], [1, 0, 0]]
TABLES = {"equal": EQUAL, "unequal": UNEQUAL}
VALIDATION = {"equal": [[2, 2, 2], [4, 4, 4]], "unequal": [[3, 1, 2], [0, 2, 1]]}


class Reads(keras.utils.PyDataset):
    """Batches in a list, which notes how many rows were read."""

    def __init__(self, batches: list):
        super().__init__()
        self.batches = batches
        self.rows = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        self.rows += len(self.batches[index][0])
        return self.batches[index]


def of_workers(table: list[list[int]], workers: int, make: Any) -> list[list]:
    """Each worker's batches; one after the other, those of a step make up one's.

    Args:
        table: The rows of each.
        workers: How many workers there are.
        make: Makes arrays of so many rows.
    """
    table = [rows[:workers] for rows in table]
    arrays = make(sum(map(sum, table)))
    batches, begin = [], 0
    for rows in table:
        step = []
        for count in rows:
            end = begin + count
            step.append(tuple(array[begin:end] for array in arrays))
            begin = end
        batches.append(step)
    return batches


def own_of(steps: list[list], rank: int) -> Reads:
    return Reads([step[rank] for step in steps if len(step[rank][0])])


def joined(steps: list[list]) -> Reads:
    return Reads(
        [tuple(map(np.concatenate, zip(*step, strict=True))) for step in steps]
    )


def sentences(rows: int) -> tuple[np.ndarray, ...]:
    """Words, of which 0 is none, a class for each, and weights of the sentences."""
    rng = np.random.default_rng(rows)
    words = rng.integers(0, 6, (rows, 5))
    return (
        words,
        (words * 2 + 1) % 4,
        rng.uniform(0.2, 2.0, (rows, 5)).astype("float32"),
    )


def tagger() -> keras.Model:
    """A model with masks, sample weights that are divided by, and random numbers."""
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(6, 7, mask_zero=True),
            keras.layers.Dropout(0.3, seed=5),
            keras.layers.Dense(4),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01, global_clipnorm=0.5),
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        weighted_metrics=["accuracy"],
    )
    return model


def own_rows(name: str, workers: int, alone: bool = False) -> dict:
    """Trains, evaluates and predicts on rows of each worker's own."""
    keras.utils.set_random_seed(17)
    strategy, scope = in_charge(alone)
    with scope:
        model = tagger()
    rank = 0 if strategy is None else strategy.extended.cluster.rank
    train = of_workers(TABLES[name], workers, sentences)
    validation = of_workers(VALIDATION[name], workers, sentences)
    off = ks.InputOptions(auto_shard_policy="OFF")
    reads = joined(train) if alone else own_of(train, rank)
    x: Any = reads
    held_out: Any = joined(validation)
    if strategy is not None:
        x = strategy.experimental_distribute_dataset(reads, off)
        held_out = strategy.distribute_datasets_from_function(
            lambda context: parts_of_replicas(
                own_of(validation, context.input_pipeline_id).batches, strategy
            )
        )
    # Builds it, for which a batch is read.
    first = model.evaluate(x, verbose=0, return_dict=True)
    reads.rows = 0
    seen: list[dict] = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(dict(logs))
    )
    watching = None if strategy is None else Watch(strategy)
    with watching.watching() if watching else contextlib.nullcontext():
        history = model.fit(
            x,
            epochs=2,
            shuffle=False,
            validation_data=held_out,
            verbose=0,
            callbacks=[watch],
        )
    gathered = watching.gathered if watching else []
    rows = reads.rows
    steps = [] if strategy is None else [len(strategy.gather(y, 0)) for _, y, _ in x]
    result = {
        "weights": weights(model),
        "history": history.history,
        "logs": seen,
        "evaluated": [first, model.evaluate(held_out, verbose=0, return_dict=True)],
        "predicted": predictions(model, x, train, rank, alone),
    }
    return {"same": result, "rows": rows, "gathered": gathered, "steps": steps}


def predictions(model, x, train, rank, alone):
    """The predictions of each worker's rows: this one's, or those of all."""
    got = model.predict(x, verbose=0)
    if not alone:
        return {rank: got}
    order = [
        (worker, len(part[0])) for step in train for worker, part in enumerate(step)
    ]
    ends = np.cumsum([rows for _, rows in order])[:-1]
    parts = list(zip(order, np.split(got, ends), strict=True))
    return {
        worker: np.concatenate([p for (w, _), p in parts if w == worker])
        for worker in range(len(train[0]))
    }


def parts_of_replicas(batches: list, strategy: Any) -> list:
    """A worker's batches as those of its replicas, which take them in turn."""
    local = len(strategy.extended.worker_devices)
    if local == 1:
        return batches
    parts = []
    for batch in batches:
        cuts = [np.array_split(array, local) for array in batch]
        parts += list(zip(*cuts, strict=True))
    return parts


def of_tables(tables: list[str], workers: int, alone: bool = False) -> list[dict]:
    """`own_rows` of several tables."""
    return [own_rows(name, workers, alone) for name in tables]


def of_sources(alone: bool = False) -> dict:
    """Fits what all workers have, by rows or by batches: 29 rows by 8."""
    import torch

    _, model = model_of(alone)
    x, y = digits(29)
    indexed = ks.IndexedDataset(Rows(), 8, shuffle=True)
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 29, 8)]
    result = {}
    for name, data in {
        "arrays": (x, y, 8),
        "indexed": (indexed,),
        "loader": (torch.utils.data.DataLoader(Rows(), batch_size=8),),
        "stream": (batch for batch in batches),
    }.items():
        model.fit(*(data if isinstance(data, tuple) else (data,)), verbose=0)
        result[name] = weights_of(model)
    return result


def reads_ahead() -> bool:
    """Return True if Keras, on one device, reads a batch before the step needs it."""
    if keras.backend.backend() != "jax":
        return keras.backend.backend() == "tensorflow"
    from keras.src.backend.jax import trainer

    # Keras up to 3.14 does so on CPUs too.
    read = inspect.getsource(trainer.JAXEpochIterator._get_iterator)
    return "default_backend" not in read


def ways_to_fit(alone: bool = False) -> dict:
    """Generators with `steps_per_epoch`, class weights, tf.data; and who waits when."""
    keras.utils.set_random_seed(17)
    strategy, scope = in_charge(alone)
    with scope:
        model = classifier(keras.optimizers.SGD(0.1))
    rank = 0 if strategy is None else strategy.extended.cluster.rank
    steps = of_workers(UNEQUAL[:2] * 4, 2, digits)
    batches = (joined(steps) if alone else own_of(steps, rank)).batches

    def data(source):
        if strategy is None:
            return source
        return strategy.distribute_datasets_from_function(lambda context: source)

    # One after the other, and none is left out in between.
    generator = data(batch for batch in batches)
    model.fit(generator, steps_per_epoch=2, epochs=2, verbose=0)
    if not reads_ahead():
        model.fit(generator, steps_per_epoch=1, verbose=0)
    known = data(Reads(batches[:3]))
    model.fit(known, class_weight={0: 0.2, 1: 3.0}, shuffle=False, verbose=0)
    result = {"weights": weights(model), "asked": []}
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        size = len(batches[0][0]) + len(batches[1][0])
        options = tf.data.Options()
        policy = tf.data.experimental.AutoShardPolicy.OFF
        options.experimental_distribute.auto_shard_policy = policy
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(size)
        model.fit(dataset.with_options(options), verbose=0)
        result["weights"] += weights(model)
    if strategy is not None:
        even = data(own_of(of_workers(EQUAL, 2, digits), rank))
        watch = Watch(strategy)
        with watch.watching():
            callbacks = [watch.callback]
            model.fit(even, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
        result["asked"] = watch.asked
        nothing = data(Reads(batches[:3] if rank == 0 else []))
        try:
            model.fit(nothing, verbose=0)
        except ks.errors.WorkerInputError as error:
            result["refused"] = str(error)
    return result


def goes_on() -> list[tuple[list, list]]:
    """What datasets give after their first element, and when they go on there."""
    strategy, _ = in_charge(False)
    rank = strategy.extended.cluster.rank
    own = [np.arange(2) + 10 * rank + 2 * step for step in range(3 + rank)]

    def distributed():
        indexed = ks.IndexedDataset(range(12), 4, shuffle=True, seed=3)
        off = ks.InputOptions(auto_shard_policy="OFF")
        return [
            strategy.experimental_distribute_dataset(indexed),
            strategy.experimental_distribute_dataset(own, off),
        ]

    def rest(dataset):
        local = [strategy.experimental_local_results(x) for x in dataset]
        return [[np.array(part).tolist() for part in parts] for parts in local]

    result = []
    for whole, first, again in zip(*(distributed() for _ in range(3)), strict=True):
        expected = rest(whole)
        next(iter(first))
        again.load_state_dict(first.state_dict())
        result.append((expected[1:], rest(again)))
    return result
