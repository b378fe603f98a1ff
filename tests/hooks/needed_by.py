"""For each hook a test that fails without it, and the backend that it runs on.

`tools/drop_hooks.py` leaves out each in turn. Of a hook that is installed on several
backends, one shows what it is for. `UNSHOWN` are those whose test was tried and passed
without the hook: they need a better one.
"""

_BAD_INPUT = "tests/training/test_bad_input.py"
_EQUALITY = "tests/training/test_equality.py"
_RUN = "tests/core/test_run.py"
_WRITER = "tests/workers/test_one_writer.py"
_SYNCHRONIZED = f"{_EQUALITY}::test_synchronized_batch_normalization"
_REFUSED = f"{_BAD_INPUT}::test_a_model_made_outside_is_refused_inside"
_OF_NOBODY = (
    "tests/core/test_variables.py::test_an_optimizer_of_a_variable_of_nobody_in_run"
)
_ADDING = f"{_RUN}::test_adding_to_a_mirrored_variable"
_JAX = "tests/backends/test_jax.py"
_TF = "tests/backends/test_tensorflow.py"
_COMPILED = "tests/backends/test_torch_compiled.py::test_what_is_compiled"
_JAX_WORKERS = "tests/backends/test_jax_workers.py"
_TRAINING = "tests/workers/test_training.py"
_ROW = "tests/training/test_equality_table.py::test_two_replicas_equal_one_device"
_OPTIMIZER = f"{_ROW}[clipping, decay, EMA and accumulation at once]"
_REDUCTION = f"{_ROW}[reduction sum, sample weights]"
_ENTRY = "tests/training/test_entry_points.py"
_LOSSES = "tests/training/test_own_losses.py"
_DERIVED = "tests/training/test_derived_logs.py"
_RANDOM = "tests/training/test_replicas_own.py"
_NOBODY = (
    "tests/training/test_batch_callbacks.py::test_nobody_is_told_where_nobody_listens"
)
_NUMBERS = "tests/training/test_random_numbers.py"
_EVERY = "test_every_function"
_FUNCTIONS = "normal uniform randint gamma beta binomial categorical shuffle"
_SHARDING = "tests/training/test_sharding.py"
_OWN = "tests/training/test_own_attributes.py::test_what_a_call_keeps_is_its_own"

_LONG = "tests/training/test_long_waits.py::test_a_first_step_that_takes_long"

NEEDED_BY = {
    "hooks.first_steps Model.make_train_function": ("torch", f"{_LONG}[fit-train]"),
    "hooks.first_steps Model.make_test_function": ("torch", f"{_LONG}[evaluate-test]"),
    "hooks.first_steps Model.make_predict_function": (
        "torch",
        f"{_LONG}[predict-predict]",
    ),
    "hooks.data_adapters PyDatasetAdapter._get_iterator": (
        "tensorflow",
        "tests/core/test_ahead.py"
        "::test_a_pass_has_one_order_whenever_its_batches_are_read",
    ),
    "hooks.trainer Model.compile": (
        "torch",
        f"{_ENTRY}::test_compile_and_fit_inside_and_outside_of_the_scope",
    ),
    "hooks.trainer Model.fit": ("torch", f"{_REFUSED}[fit]"),
    "hooks.trainer Model.evaluate": ("torch", f"{_REFUSED}[evaluate]"),
    "hooks.trainer Model.predict": (
        "torch",
        f"{_REFUSED}[predict]",
    ),
    "hooks.trainer Model.train_on_batch": ("torch", f"{_REFUSED}[train_on_batch]"),
    "hooks.trainer Model.test_on_batch": (
        "torch",
        f"{_REFUSED}[test_on_batch]",
    ),
    "hooks.trainer Model.predict_on_batch": (
        "torch",
        f"{_REFUSED}[predict_on_batch]",
    ),
    "hooks.trainer Model._symbolic_build": (
        "tensorflow",
        f"{_ENTRY}::test_an_optimizer_and_a_metric_made_outside_of_the_scope",
    ),
    "hooks.callbacks CallbackList.on_epoch_begin": ("jax", f"{_NOBODY}[fit]"),
    "hooks.callbacks CallbackList.on_test_begin": ("jax", f"{_NOBODY}[evaluate]"),
    "hooks.callbacks CallbackList.on_predict_begin": ("jax", f"{_NOBODY}[predict]"),
    "hooks.saving Model.save": (
        "torch",
        f"{_WRITER}::test_the_chief_writes_and_all_go_on",
    ),
    "hooks.saving Model.save_weights": (
        "torch",
        f"{_WRITER}::test_all_hear_that_the_chief_cannot_write",
    ),
    "hooks.saving Model.export": (
        "torch",
        f"{_WRITER}::test_all_hear_that_the_chief_cannot_write",
    ),
    "hooks.saving keras.src.saving.saving_lib.get_attr_skipset": (
        "torch",
        f"{_WRITER}::test_the_chief_writes_and_all_go_on",
    ),
    "hooks.saving keras.src.saving.saving_lib.get_temp_dir": (
        "torch",
        "tests/faults/test_faults.py::test_a_fault_ends_all_workers"
        "[SIGKILL, in save_own_variables, worker 0 of 2]",
    ),
    "hooks.epochs EpochIterator.__iter__": (
        "torch",
        "tests/training/test_backups.py::test_keras_callback_in_a_scope",
    ),
    "hooks.layers Layer.__new__": (
        "torch",
        "tests/training/test_saving.py::"
        "test_clones_belong_to_the_scope_they_are_made_in",
    ),
    "hooks.layers BatchNormalization.__init__": ("torch", _SYNCHRONIZED),
    "hooks.layers BatchNormalization._moments": ("torch", _SYNCHRONIZED),
    "hooks.layers RNN.call": (
        "torch",
        "tests/core/test_where_users_go.py::test_stateful_layers",
    ),
    "hooks.variables Variable.__init__": (
        "torch",
        f"{_RUN}::test_variables_of_a_strategy",
    ),
    "hooks.variables Variable.assign": (
        "torch",
        f"{_RUN}::test_assigning_a_mirrored_variable",
    ),
    "hooks.variables Variable.assign_add": ("torch", _ADDING),
    "hooks.variables Variable.assign_sub": ("torch", _ADDING),
    "hooks.optimizers Optimizer.apply": (
        "torch",
        f"{_RUN}::test_a_training_step_of_ones_own",
    ),
    "hooks.optimizers LossScaleOptimizer.apply": (
        "jax",
        f"{_JAX}::test_loss_scaling_in_run",
    ),
    "hooks.losses keras.src.trainers.compile_utils.get_loss": (
        "torch",
        f"{_LOSSES}::test_a_loss_class_with_a_call_of_its_own",
    ),
    "hooks.layers Layer.add_loss": (
        "torch",
        f"{_LOSSES}::test_what_add_loss_is_taken_for",
    ),
    "backends.tensorflow.hooks tensorflow._api.v2.nn.compute_average_loss": (
        "tensorflow",
        "tests/core/test_losses.py::test_in_a_step_of_fit[8]",
    ),
    "backends.tensorflow.hooks tensorflow._api.v2.nn.scale_regularization_loss": (
        "tensorflow",
        "tests/core/test_losses.py::test_in_a_step_of_fit[8]",
    ),
    "hooks.losses Loss.__call__": ("torch", _REDUCTION),
    "hooks.metrics Mean.update_state": (
        "torch",
        f"{_RANDOM}::test_a_metric_that_is_a_number",
    ),
    "hooks.metrics Metric.result": (
        "torch",
        f"{_DERIVED}::test_a_step_of_ones_own",
    ),
    "hooks.metrics Metric.__init__": (
        "torch",
        f"{_DERIVED}::test_logs_that_are_computed_of_results",
    ),
    "hooks.random SeedGenerator.next": (
        "torch",
        f"{_RANDOM}::test_replicas_draw_different_numbers",
    ),
    "hooks.own_attributes Layer.__setattr__": ("torch", _OWN),
    "hooks.own_attributes TrackedList.append": ("torch", _OWN),
    "hooks.own_attributes TrackedDict.update": ("torch", _OWN),
    "hooks.own_attributes TrackedOrderedDict.update": (
        "torch",
        _OWN,
    ),
    "hooks.own_attributes TrackedSet.add": ("torch", _OWN),
    "backends.threads.hooks keras.src.random.seed_generator.global_seed_generator": (
        "torch",
        f"{_RANDOM}::test_distributions_are_reproducible",
    ),
    "backends.threads.hooks Layer._maybe_build": (
        "torch",
        "tests/training/test_models.py::test_a_model_that_is_built_by_its_first_use",
    ),
    "backends.jax.hooks_data JAXEpochIterator._get_distributed_iterator": (
        "jax",
        f"{_JAX}::test_batches_that_are_not_divided_are_warned_about",
    ),
    "backends.jax.hooks_data keras.src.backend.jax.trainer._distribute_data": (
        "jax",
        "tests/training/test_inputs.py::test_sparse_matrices",
    ),
    "backends.jax.hooks Model._get_jax_state": (
        "jax",
        f"{_JAX}::test_an_average_of_the_weights_shares_no_array_with_them",
    ),
    "backends.jax.hooks_home Model._get_state_sharding_spec": (
        "jax",
        "tests/training/test_central_storage.py::test_fit_evaluate_predict_and_save",
    ),
    "backends.jax.hooks Model.make_train_function": (
        "jax",
        f"{_JAX_WORKERS}::test_what_keras_reads",
    ),
    "backends.jax.hooks Model.make_test_function": (
        "jax",
        f"{_JAX_WORKERS}::test_what_keras_reads",
    ),
    "backends.jax.hooks Model.make_predict_function": (
        "jax",
        f"{_JAX_WORKERS}::test_what_keras_reads",
    ),
    "backends.jax.hooks Model._get_metrics_result_or_logs": (
        "jax",
        "tests/faults/test_faults.py",
    ),
    "backends.jax.hooks Model.__call__": (
        "jax",
        f"{_JAX}::test_calling_a_model_on_an_array_of_another_device",
    ),
    "backends.jax.hooks keras.src.backend.jax.distribution_lib.distribute_tensor": (
        "jax",
        f"{_JAX_WORKERS}::test_replicas_of_different_shapes[2x1]",
    ),
    "backends.jax.hooks Variable._initialize": (
        "jax",
        f"{_TRAINING}::test_fit_equals_one_device",
    ),
    "backends.jax.hooks Variable._initialize_with_initializer": (
        "jax",
        "tests/workers/test_sharding.py::test_two_workers_equal_one_device[optimizer]",
    ),
    "backends.jax.hooks Variable.value": (
        "jax",
        f"{_JAX}::test_a_step_computes_in_the_memory_of_the_one_before",
    ),
    "backends.jax.hooks Variable.__reduce_ex__": (
        "jax",
        f"{_JAX}::test_a_variable_that_shares_its_array_keeps_its_value",
    ),
    "backends.jax.hooks_sharding Optimizer.add_variable": (
        "jax",
        f"{_SHARDING}::test_bytes_on_each_device[optimizer]",
    ),
    "backends.jax.hooks_sharding Optimizer._backend_apply_gradients": (
        "jax",
        f"{_JAX}::test_a_step_with_parts_sends_what_an_all_reduce_does",
    ),
    "backends.jax.hooks_sharding Variable.__array__": (
        "jax",
        "tests/workers/test_sharding.py::test_two_workers_equal_one_device[optimizer]",
    ),
    "backends.threads.hooks_divisions Optimizer.add_variable_from_reference": (
        "torch",
        f"{_SHARDING}::test_bytes_on_each_device[optimizer]",
    ),
    "backends.torch.hooks_sharding Optimizer._backend_apply_gradients": (
        "torch",
        f"{_SHARDING}::test_clipping_decay_average_and_accumulation[2-optimizer]",
    ),
    "backends.threads.hooks_shares Optimizer._clip_gradients": (
        "torch",
        f"{_SHARDING}::test_clipping_decay_average_and_accumulation[2-optimizer]",
    ),
    "backends.threads.hooks_divisions Optimizer._apply_weight_decay": (
        "torch",
        f"{_SHARDING}::test_rules_that_are_not_elementwise[Lamb]",
    ),
    "backends.tensorflow.hooks_sharding Optimizer._backend_apply_gradients": (
        "tensorflow",
        f"{_SHARDING}::test_clipping_decay_average_and_accumulation[2-optimizer]",
    ),
    "backends.tensorflow.hooks_sharding Variable._shared_name": (
        "tensorflow",
        f"{_TF}::test_a_native_checkpoint_of_what_replicas_share",
    ),
    "backends.tensorflow.hooks_sharding Variable._serialize_to_tensors": (
        "tensorflow",
        f"{_TF}::test_a_native_checkpoint_of_what_replicas_share",
    ),
    "backends.tensorflow.hooks_sharding Variable._restore_from_tensors": (
        "tensorflow",
        f"{_TF}::test_a_native_checkpoint_of_what_replicas_share",
    ),
    "backends.tensorflow.hooks_sharding Optimizer._var_key": (
        "tensorflow",
        f"{_SHARDING}::test_clipping_decay_average_and_accumulation[2-optimizer]",
    ),
    "backends.jax.hooks LossScaleOptimizer._common_apply": (
        "jax",
        f"{_JAX}::test_loss_scaling_in_run",
    ),
    "backends.jax.hooks keras.src.random.seed_generator.global_seed_generator": (
        "jax",
        f"{_JAX}::test_the_global_seed_generator_belongs_to_no_strategy",
    ),
    "backends.torch.hooks keras.src.backend.torch.random.dropout": (
        "torch",
        f"{_RANDOM}::test_distributions_are_reproducible",
    ),
    "backends.torch.hooks_compiled keras.src.backend.torch.random.dropout": (
        "torch",
        f"{_COMPILED}[dropout]",
    ),
    "backends.torch.hooks_compiled Layer.add_loss": ("torch", f"{_COMPILED}[adds]"),
    "backends.torch.hooks_compiled "
    "keras.src.backend.torch.nn._can_use_flash_attention": (
        "torch",
        f"{_COMPILED}[attention]",
    ),
    "backends.torch.hooks_compiled keras.src.backend.torch.nn.moments": (
        "torch",
        f"{_COMPILED}[norm]",
    ),
    "backends.torch.hooks Variable.value": (
        "torch",
        "tests/core/test_variables.py::test_on_read",
    ),
    "backends.torch.hooks Variable._initialize": (
        "torch",
        f"{_TRAINING}::test_fit_equals_one_device",
    ),
    "backends.torch.hooks Variable._direct_assign": (
        "torch",
        f"{_ENTRY}::test_reading_and_setting_weights",
    ),
    "backends.torch.hooks Variable.__init__": (
        "torch",
        "tests/workers/test_only_replica.py::test_a_run_that_fails_changes_nothing",
    ),
    "backends.torch.hooks Layer._track_variables": (
        "torch",
        "tests/workers/test_rounds.py::"
        "test_workers_ask_once_for_all_that_a_scope_makes",
    ),
    "backends.torch.hooks_optimizers Adam._parallel_update_step": (
        "torch",
        "tests/backends/test_torch_fused.py::test_as_keras",
    ),
    "backends.torch.hooks Layer.zero_grad": (
        "torch",
        f"{_ROW}[shuffle]",
    ),
    "backends.torch.hooks TorchModuleWrapper.call": (
        "torch",
        "tests/backends/test_torch.py::test_modules_of_torch_train_as_on_one_device",
    ),
    "backends.torch.hooks Model.make_train_function": (
        "torch",
        _REDUCTION,
    ),
    "backends.torch.hooks Model.make_test_function": (
        "torch",
        f"{_ENTRY}::test_evaluate_and_predict",
    ),
    "backends.torch.hooks Model.make_predict_function": (
        "torch",
        f"{_ENTRY}::test_evaluate_and_predict",
    ),
    "backends.torch.hooks TorchEpochIterator._get_iterator": (
        "torch",
        f"{_TRAINING}::test_workers_whose_data_ends_early",
    ),
    "backends.torch.hooks Model.get_metrics_result": (
        "torch",
        "tests/speed/test_torch_figures.py::test_two_processes",
    ),
    **{
        f"hooks.draws keras.random.{name}": ("torch", f"{_NUMBERS}::{_EVERY}")
        for name in _FUNCTIONS.split()
    },
    "hooks.draws keras.random.truncated_normal": (
        "tensorflow",
        f"{_NUMBERS}::{_EVERY}",
    ),
    "hooks.draws keras.random.dropout": (
        "torch",
        f"{_NUMBERS}::test_layers_of_keras",
    ),
    **{
        f"hooks.augmentation {name}": (
            "torch",
            f"{_ROW}[augmentation across rows, no seed]",
        )
        for name in (
            "MixUp.call",
            "CutMix.call",
            "Equalization.transform_images",
        )
    },
    "hooks.augmentation AugMix.call": (
        "torch",
        f"{_NUMBERS}::test_chains_that_python_chooses",
    ),
    "hooks.augmentation keras.ops.image.elastic_transform": (
        "torch",
        f"{_ROW}[RandomElasticTransform, no seed]",
    ),
    "backends.tensorflow.hooks Model.get_metrics_result": (
        "tensorflow",
        f"{_DERIVED}::test_metrics_that_nobody_looks_at_cost_no_reduction",
    ),
    "backends.tensorflow.hooks Variable._direct_assign": (
        "tensorflow",
        "tests/core/test_on_read.py::test_a_sum_is_dealt_out[plainly-int32-5-2]",
    ),
    "backends.tensorflow.hooks Variable.handle": (
        "tensorflow",
        f"{_TF}::test_a_tape_outside_the_replicas",
    ),
    "backends.tensorflow.hooks Variable._initialize": (
        "tensorflow",
        f"{_TF}::test_run_builds_lazily",
    ),
    "backends.tensorflow.hooks Variable._map_aggregation": (
        "tensorflow",
        f"{_RUN}::test_assigning_a_mirrored_variable[mean-int32-2.0]",
    ),
    "backends.tensorflow.hooks Variable.value": (
        "tensorflow",
        "tests/workers/test_tensorflow.py::test_variables_and_dtypes",
    ),
    "backends.tensorflow.hooks Layer._maybe_build": (
        "tensorflow",
        f"{_TF}::test_run_builds_lazily",
    ),
    "backends.tensorflow.hooks_optimizers Optimizer.add_variable_from_reference": (
        "tensorflow",
        f"{_OF_NOBODY}[assign]",
    ),
    "backends.tensorflow.hooks_optimizers Optimizer._apply_weight_decay": (
        "tensorflow",
        _OPTIMIZER,
    ),
    "backends.tensorflow.hooks_optimizers Optimizer._backend_update_step": (
        "tensorflow",
        _REDUCTION,
    ),
    "backends.tensorflow.hooks_optimizers "
    "Optimizer._overwrite_model_variables_with_average_value": (
        "tensorflow",
        _OPTIMIZER,
    ),
    "backends.tensorflow.hooks_optimizers "
    "Optimizer._backend_increment_gradient_accumulators": (
        "tensorflow",
        _OPTIMIZER,
    ),
    "backends.tensorflow.hooks_optimizers Optimizer.assign": (
        "tensorflow",
        f"{_OF_NOBODY}[assign]",
    ),
    "backends.tensorflow.hooks_optimizers Optimizer.assign_add": (
        "tensorflow",
        f"{_OF_NOBODY}[assign_add]",
    ),
    "backends.tensorflow.hooks_optimizers Optimizer.assign_sub": (
        "tensorflow",
        f"{_OF_NOBODY}[assign_sub]",
    ),
    "backends.tensorflow.hooks_optimizers LossScaleOptimizer._tf_apply": (
        "tensorflow",
        f"{_ROW}[LossScaleOptimizer over EMA, overwriting every 2 steps]",
    ),
    "backends.tensorflow.hooks keras.src.losses.loss.scale_loss_for_distribution": (
        "tensorflow",
        f"{_ROW}[kernel and bias regularizers]",
    ),
    "backends.tensorflow.hooks keras.src.losses.loss.unscale_loss_for_distribution": (
        "tensorflow",
        _REDUCTION,
    ),
    "backends.tensorflow.hooks Model.distribute_strategy": (
        "tensorflow",
        f"{_ENTRY}::test_evaluate_and_predict",
    ),
    "backends.tensorflow.hooks Model.make_train_function": (
        "tensorflow",
        f"{_TF}::test_jit_compile_warns[fit]",
    ),
    "backends.tensorflow.hooks Model.make_test_function": (
        "tensorflow",
        f"{_TF}::test_jit_compile_warns[evaluate]",
    ),
    "backends.tensorflow.hooks Model.make_predict_function": (
        "tensorflow",
        f"{_TF}::test_jit_compile_warns[predict]",
    ),
    "backends.tensorflow.hooks TFEpochIterator._get_iterator": (
        "tensorflow",
        f"{_TRAINING}::test_workers_whose_data_ends_early",
    ),
    "backends.tensorflow.hooks Model._maybe_symbolic_build": (
        "tensorflow",
        f"{_BAD_INPUT}::test_rows_that_differ",
    ),
    "backends.tensorflow.hooks keras.src.random.seed_generator.global_seed_generator": (
        "tensorflow",
        "tests/core/test_seeds.py::test_a_seed_that_is_set_reaches_run[True]",
    ),
}

UNSHOWN = {
    "hooks.trainer Model.compile",
    "hooks.layers Layer.__new__",
    "hooks.metrics Mean.update_state",
    "backends.threads.hooks keras.src.random.seed_generator.global_seed_generator",
    "backends.threads.hooks Layer._maybe_build",
    "backends.torch.hooks keras.src.backend.torch.random.dropout",
    "backends.torch.hooks Variable._initialize",
    "backends.torch.hooks Variable._direct_assign",
    "backends.torch.hooks Model.make_train_function",
    "backends.torch.hooks Model.make_test_function",
    "backends.torch.hooks Model.make_predict_function",
    "backends.torch.hooks Model.get_metrics_result",
    "backends.jax.hooks Model.make_test_function",
    "backends.jax.hooks Model._get_metrics_result_or_logs",
    "backends.jax.hooks Variable._initialize",
    "backends.tensorflow.hooks TFEpochIterator._get_iterator",
}
