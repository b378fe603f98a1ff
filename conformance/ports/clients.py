"""Packages that build on Keras and call `fit` themselves."""

import keras
import numpy as np
from keras import layers, ops

import keras_strategy as ks
from conformance.compare import scope
from conformance.ports.port import (
    BACKEND,
    ROWS,
    Outcome,
    X,
    Y,
    compiled,
    dense,
    fitted,
    folder,
    port,
    vectors,
)


def mlp(units=8, optimizer="adam"):
    return compiled(dense(4, 1, units), optimizer, "mse", metrics=["mae"])


def with_adam(model, *args, **options):
    return compiled(model, keras.optimizers.Adam(1e-2), *args, **options)


@port(
    "keras-team/keras-io: guides/keras_tuner/distributed_tuning.py", needs="keras_tuner"
)
def keras_tuner(strategy):
    import keras_tuner

    def build_model(hp):
        rate = hp.Choice("learning_rate", [1e-2, 1e-3])
        return mlp(hp.Int("units", 4, 8, 4), keras.optimizers.Adam(rate))

    keras.utils.set_random_seed(1)
    with folder() as path:
        tuner = keras_tuner.GridSearch(
            build_model,
            objective="val_loss",
            max_trials=4,
            distribution_strategy=strategy,
            directory=str(path),
            project_name="search",
        )
        tuner.search(
            X, Y, batch_size=8, epochs=2, validation_data=(X[:11], Y[:11]), verbose=0
        )
        trials = tuner.oracle.get_best_trials(4)
        scores = [trial.score for trial in trials]
        chosen = [list(trial.hyperparameters.values.values()) for trial in trials]
        best = tuner.get_best_models()[0]
        predictions = best.predict(X, batch_size=8, verbose=0)
    return Outcome(best.get_weights(), [*scores, *chosen], [predictions])


@port("adriangb/scikeras: docs/source/quickstart.rst", needs="scikeras")
def scikeras(strategy):
    from scikeras.wrappers import KerasRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def build():
        with scope(strategy):
            return mlp()

    keras.utils.set_random_seed(1)
    regressor = KerasRegressor(build, batch_size=8, epochs=2, verbose=0)
    pipeline = make_pipeline(StandardScaler(), regressor)
    pipeline.fit(X, Y[:, 0])
    model = regressor.model_
    logs = [*regressor.history_.values(), pipeline.score(X, Y[:, 0])]
    return Outcome(model.get_weights(), logs, [pipeline.predict(X)])


RS = "keras-team/keras-io: examples/keras_rs"


@port(f"{RS}/dcn.py", needs="keras_rs")
def keras_rs_dcn(strategy):
    import keras_rs

    def make():
        inputs = keras.Input((4,))
        x = keras_rs.layers.FeatureCross()(inputs, inputs)
        x = keras_rs.layers.FeatureCross(projection_dim=2)(inputs, x)
        outputs = layers.Dense(1)(layers.Dense(8, "tanh")(x))
        return with_adam(keras.Model(inputs, outputs), "mse", metrics=["mae"])

    return fitted(strategy, make, X, Y)


@port(f"{RS}/listwise_ranking.py", needs="keras_rs")
def keras_rs_ranking(strategy):
    """Each row is a list of movies with their ratings."""
    import keras_rs

    def make():
        movies = keras.Input((5,), dtype="int32")
        x = layers.Dense(4, "tanh")(layers.Embedding(9, 4)(movies))
        # A bias would move all scores alike, and have no gradient but rounding.
        scores = layers.Reshape((5,))(layers.Dense(1, use_bias=False)(x))
        ndcg = keras_rs.metrics.NDCG(k=3, name="ndcg")
        loss = keras_rs.losses.ListMLELoss()
        return with_adam(keras.Model(movies, scores), loss, metrics=[ndcg])

    movies = np.random.RandomState(4).randint(0, 9, (ROWS, 5))
    ratings = np.float32(movies % 4)
    return fitted(strategy, make, movies, ratings)


class RetrievalModel(keras.Model):
    """Distinguish each user's choice from the choices of the other rows' users."""

    def __init__(self):
        super().__init__()
        self.user_model = keras.Sequential([layers.Embedding(9, 4), layers.Dense(4)])
        self.candidate_model = layers.Embedding(7, 4)
        self.loss_fn = keras.losses.CategoricalCrossentropy(
            from_logits=True, reduction="sum"
        )

    def call(self, inputs):
        return self.user_model(inputs)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return self.between(y_pred, self.candidate_model(y))

    def between(self, users, candidates):
        labels = ops.eye(ops.shape(users)[0], ops.shape(candidates)[0])
        return self.loss_fn(labels, ops.matmul(users, ops.transpose(candidates)))


class GatheringModel(RetrievalModel):
    """The same over the rows of all replicas, which is a mean that all of them have."""

    def between(self, users, candidates):
        replica = ks.get_replica_context()
        if replica is not None:
            users, candidates = replica.all_gather((users, candidates), axis=0)
        rows = ops.cast(ops.shape(users)[0], users.dtype)
        scores = ops.matmul(users, ops.transpose(candidates))
        losses = ops.logsumexp(scores, axis=1) - ops.diagonal(scores)
        return ops.sum(losses) / rows


def retrieval(strategy, cls):
    def make():
        model = cls()
        model(np.zeros((1,)))
        model.candidate_model(np.zeros((1,)))
        return with_adam(model)

    return fitted(strategy, make, np.arange(ROWS) % 9, np.arange(ROWS) % 7)


@port(f"{RS}/basic_retrieval.py")
def keras_rs_retrieval(strategy):
    return retrieval(strategy, RetrievalModel)


@port(f"{RS}/basic_retrieval.py")
def keras_rs_retrieval_that_gathers(strategy):
    return retrieval(strategy, GatheringModel)


BAYESFLOW = "bayesflow-org/bayesflow: examples"


def imported_bayesflow():
    """Import the package, which turns gradients off for all of torch."""
    if BACKEND != "torch":
        import bayesflow

        return bayesflow
    import torch

    with torch.enable_grad():
        import bayesflow
    return bayesflow


def posterior(strategy, standardize, **network):
    bf = imported_bayesflow()
    parameters, observed = vectors(ROWS, 2, 3, seed=5)
    data = {"inference_variables": parameters, "inference_conditions": observed}
    keras.utils.set_random_seed(1)
    with scope(strategy):
        approximator = bf.approximators.ContinuousApproximator(
            inference_network=bf.networks.CouplingFlow(
                depth=2, subnet_kwargs={"widths": (8,), "dropout": None}, **network
            ),
            standardize=standardize,
        )
        with_adam(approximator)
    dataset = bf.datasets.OfflineDataset(data, 8, None, shuffle=False)
    history = approximator.fit(dataset=dataset, epochs=2, verbose=0).history
    log_prob = approximator.log_prob(data=data)
    return Outcome(approximator.get_weights(), list(history.values()), [log_prob])


@port(f"{BAYESFLOW}/Linear_Regression_Starter.ipynb", needs="bayesflow")
def bayesflow_coupling_flow(strategy):
    return posterior(strategy, None)


@port(f"{BAYESFLOW}/Linear_Regression_Starter.ipynb", needs="bayesflow")
def bayesflow_standardize(strategy):
    """Keep the moments of all rows seen, without an aggregation."""
    return posterior(strategy, "inference_variables")
