"""A test that fails without it for each patch, and the backend of the test.

`tools/drop_hooks.py` leaves out each patch in turn. A patch of several backends has a
test on one of them.
"""

_BAD_INPUT = "tests/training/test_bad_input.py"
_EQUALITY = "tests/training/test_equality.py"
_RUN = "tests/core/test_run.py"
_WRITER = "tests/distributed/test_chief_writes.py"
_SYNCHRONIZED = f"{_EQUALITY}::test_synchronized_batch_normalization"
_REFUSED = f"{_BAD_INPUT}::test_model_from_outside_scope_is_refused"
_OF_NOBODY = (
    "tests/core/test_variables.py::test_optimizer_of_foreign_variable_in_run_is_refused"
)
_ADDING = f"{_RUN}::test_mirrored_variable_addition"
_JAX = "tests/backends/test_jax.py"
_TF = "tests/backends/test_tensorflow.py"
_COMPILED = "tests/backends/test_torch_compiled.py::test_step_is_compiled"
_JAX_WORKERS = "tests/backends/test_jax_workers.py"
_TRAINING = "tests/distributed/test_training.py"
_ROW = "tests/training/test_equality_table.py::test_two_replicas_equal_one_device"
_OPTIMIZER = f"{_ROW}[clipping, decay, EMA and accumulation at once]"
_REDUCTION = f"{_ROW}[reduction sum, sample weights]"
_ENTRY = "tests/training/test_entry_points.py"
_LOSSES = "tests/training/test_custom_losses.py"
_DERIVED = "tests/training/test_derived_logs.py"
_RANDOM = "tests/training/test_per_replica_state.py"
_NOBODY = (
    "tests/training/test_batch_callbacks.py::test_unused_batch_callbacks_are_not_called"
)
_NUMBERS = "tests/training/test_random_numbers.py"
_EVERY = "test_every_random_function"
_FUNCTIONS = "normal uniform randint gamma beta binomial categorical shuffle"
_SHARDING = "tests/training/test_sharding.py"
_TORCH_SHARDING = "tests/backends/test_torch_sharding.py"
_OWN = (
    "tests/training/test_per_replica_attributes.py"
    "::test_layer_attributes_are_per_replica"
)

_CLEAR = "tests/training/test_changes_during_fit.py::test_clear_session_in_scope"
_LONG = "tests/training/test_slow_operations.py::test_slow_first_step_is_logged"

NEEDED_BY = {
    "keras_patches.trainer Model.make_train_function": (
        "torch",
        f"{_LONG}[fit-train]",
    ),
    "keras_patches.trainer Model.make_test_function": (
        "torch",
        f"{_LONG}[evaluate-test]",
    ),
    "keras_patches.trainer Model.make_predict_function": (
        "torch",
        f"{_LONG}[predict-predict]",
    ),
    "keras_patches.data_adapters PyDatasetAdapter._get_iterator": (
        "tensorflow",
        "tests/data/test_prefetch.py::test_epoch_order_is_independent_of_prefetch",
    ),
    "keras_patches.trainer Model.compile": (
        "torch",
        "tests/training/test_models.py::test_callback_compiles_and_fits_plain_model",
    ),
    "keras_patches.trainer Model.fit": ("torch", f"{_REFUSED}[fit]"),
    "keras_patches.trainer Model.evaluate": ("torch", f"{_REFUSED}[evaluate]"),
    "keras_patches.trainer Model.predict": (
        "torch",
        f"{_REFUSED}[predict]",
    ),
    "keras_patches.trainer Model.train_on_batch": (
        "torch",
        f"{_REFUSED}[train_on_batch]",
    ),
    "keras_patches.trainer Model.test_on_batch": (
        "torch",
        f"{_REFUSED}[test_on_batch]",
    ),
    "keras_patches.trainer Model.predict_on_batch": (
        "torch",
        f"{_REFUSED}[predict_on_batch]",
    ),
    "keras_patches.trainer Model._symbolic_build": (
        "tensorflow",
        f"{_ENTRY}::test_optimizer_and_metric_from_outside_scope",
    ),
    "keras_patches.trainer keras.src.utils.traceback_utils.include_frame": (
        "torch",
        f"{_BAD_INPUT}::test_error_in_fit_has_short_traceback[layer]",
    ),
    "keras_patches.trainer CallbackList.on_epoch_begin": ("jax", f"{_NOBODY}[fit]"),
    "keras_patches.trainer CallbackList.on_test_begin": ("jax", f"{_NOBODY}[evaluate]"),
    "keras_patches.trainer CallbackList.on_predict_begin": (
        "jax",
        f"{_NOBODY}[predict]",
    ),
    "keras_patches.saving Model.save": (
        "torch",
        f"{_WRITER}::test_only_chief_writes",
    ),
    "keras_patches.saving Model.save_weights": (
        "torch",
        f"{_WRITER}::test_write_error_of_chief_reaches_all_workers",
    ),
    "keras_patches.saving Model.export": (
        "torch",
        f"{_WRITER}::test_write_error_of_chief_reaches_all_workers",
    ),
    "keras_patches.saving keras.src.saving.saving_lib.get_temp_dir": (
        "torch",
        "tests/faults/test_faults.py::test_fault_ends_all_workers"
        "[SIGKILL, in save_own_variables, worker 0 of 2]",
    ),
    "keras_patches.resume EpochIterator.__iter__": (
        "torch",
        "tests/training/test_resume.py::test_keras_callback_in_scope",
    ),
    "keras_patches.layers Layer.__new__": (
        "torch",
        "tests/training/test_models.py::test_wrapper_model[wrapper]",
    ),
    "keras_patches.layers BatchNormalization.__init__": ("torch", _SYNCHRONIZED),
    "keras_patches.layers BatchNormalization._moments": ("torch", _SYNCHRONIZED),
    "keras_patches.layers RNN.call": (
        "torch",
        "tests/core/test_unsupported_programs.py::test_stateful_layers",
    ),
    "keras_patches.variables_optimizers Variable.__init__": (
        "torch",
        f"{_RUN}::test_strategy_variables",
    ),
    "keras_patches.variables_optimizers Variable.assign": (
        "torch",
        f"{_RUN}::test_mirrored_variable_assignment",
    ),
    "keras_patches.variables_optimizers Variable.assign_add": ("torch", _ADDING),
    "keras_patches.variables_optimizers Variable.assign_sub": ("torch", _ADDING),
    "keras_patches.variables_optimizers Optimizer.apply": (
        "torch",
        f"{_RUN}::test_custom_training_step",
    ),
    "keras_patches.losses_metrics keras.src.trainers.compile_utils.get_loss": (
        "torch",
        f"{_LOSSES}::test_loss_with_custom_call_equals_one_device",
    ),
    "keras_patches.layers Layer.activity_regularizer": (
        "torch",
        f"{_LOSSES}::test_activity_regularizers_equal_one_device",
    ),
    "keras_patches.trainer keras.backend.clear_session": ("jax", _CLEAR),
    "keras_patches.trainer keras.utils.clear_session": ("jax", _CLEAR),
    "backends.tensorflow.patches _DefaultGraphStack.reset": (
        "tensorflow",
        _CLEAR,
    ),
    "backends.tensorflow.patches tensorflow.python.ops.cond_v2.cond_v2": (
        "tensorflow",
        f"{_TF}::test_apply_in_branch_of_one_replica_is_refused",
    ),
    "backends.tensorflow.patches tensorflow._api.v2.nn.compute_average_loss": (
        "tensorflow",
        "tests/training/test_losses.py::test_compute_average_loss_in_fit[8]",
    ),
    "backends.tensorflow.patches tensorflow._api.v2.nn.scale_regularization_loss": (
        "tensorflow",
        "tests/training/test_losses.py::test_compute_average_loss_in_fit[8]",
    ),
    "keras_patches.losses_metrics Loss.__call__": ("torch", _REDUCTION),
    "keras_patches.losses_metrics Mean.update_state": (
        "torch",
        f"{_RANDOM}::test_number_as_metric",
    ),
    "keras_patches.losses_metrics Metric.result": (
        "torch",
        f"{_DERIVED}::test_custom_step_logs",
    ),
    "keras_patches.random SeedGenerator.next": (
        "torch",
        f"{_RANDOM}::test_replicas_draw_different_numbers",
    ),
    "keras_patches.layers Layer.__setattr__": ("torch", _OWN),
    "keras_patches.layers Variable.trainable": (
        "torch",
        "tests/training/test_per_replica_attributes.py"
        "::test_replicas_find_variables_trainable[eager]",
    ),
    "keras_patches.layers TrackedList.append": ("torch", _OWN),
    "keras_patches.layers TrackedDict.update": ("torch", _OWN),
    "keras_patches.layers TrackedOrderedDict.update": (
        "torch",
        _OWN,
    ),
    "keras_patches.layers TrackedSet.add": ("torch", _OWN),
    "backends.threads.patches keras.src.random.seed_generator.global_seed_generator": (
        "torch",
        "tests/training/test_seed_generators.py::test_assigned_seed_reaches_run[True]",
    ),
    "backends.threads.patches Layer.add_loss": (
        "torch",
        f"{_LOSSES}::test_added_losses_of_two_models_count_in_every_run",
    ),
    "backends.threads.patches StatelessScope.__exit__": (
        "jax",
        f"{_LOSSES}::test_added_losses_count_when_a_step_is_traced_again",
    ),
    "backends.threads.patches Layer._maybe_build": (
        "torch",
        "tests/core/test_unsupported_programs.py::test_built_property_in_run",
    ),
    "backends.jax.patches_data JAXEpochIterator._get_distributed_iterator": (
        "jax",
        f"{_JAX}::test_indivisible_batches_warn",
    ),
    "backends.jax.patches_data keras.src.backend.jax.trainer._distribute_data": (
        "jax",
        "tests/training/test_input_kinds.py::test_sparse_matrices",
    ),
    "backends.jax.patches Model._get_jax_state": (
        "jax",
        f"{_JAX}::test_ema_shares_no_array_with_weights",
    ),
    "backends.jax.patches Model._get_state_sharding_spec": (
        "jax",
        "tests/training/test_central_storage.py::test_fit_evaluate_predict_and_save",
    ),
    "backends.jax.patches Model.make_train_function": (
        "jax",
        f"{_JAX_WORKERS}::test_keras_reads_local_values",
    ),
    "backends.jax.patches Model.make_test_function": (
        "jax",
        "tests/training/test_central_storage.py::test_fit_evaluate_predict_and_save",
    ),
    "backends.jax.patches Model.make_predict_function": (
        "jax",
        f"{_JAX_WORKERS}::test_keras_reads_local_values",
    ),
    "backends.jax.patches Model._get_metrics_result_or_logs": (
        "jax",
        f"{_JAX}::test_wait_for_last_step_is_tracked",
    ),
    "backends.jax.patches Model.__call__": (
        "jax",
        f"{_JAX}::test_model_call_accepts_array_of_another_device",
    ),
    "backends.jax.patches keras.src.backend.jax.distribution_lib.distribute_tensor": (
        "jax",
        f"{_JAX_WORKERS}::test_replicas_of_different_shapes[2x1]",
    ),
    "backends.jax.patches Variable._initialize": (
        "jax",
        "tests/distributed/test_uneven_rounds.py::test_scope_compares_variables_once",
    ),
    "backends.jax.patches Variable._initialize_with_initializer": (
        "jax",
        "tests/distributed/test_sharding.py::test_two_workers_equal_one_device[optimizer]",
    ),
    "backends.jax.patches Variable.value": (
        "jax",
        f"{_JAX}::test_step_reuses_donated_memory",
    ),
    "backends.jax.patches Variable.__reduce_ex__": (
        "jax",
        f"{_JAX}::test_variables_sharing_an_array_keep_values",
    ),
    "backends.jax.patches Optimizer.add_variable": (
        "jax",
        f"{_SHARDING}::test_bytes_per_device[optimizer]",
    ),
    "backends.jax.patches Optimizer._backend_apply_gradients": (
        "jax",
        f"{_JAX}::test_sharded_step_sends_as_much_as_all_reduce",
    ),
    "backends.jax.patches Variable.__array__": (
        "jax",
        "tests/distributed/test_sharding.py::test_two_workers_equal_one_device[optimizer]",
    ),
    "keras_patches.sharded_slots Optimizer.add_variable_from_reference": (
        "torch",
        f"{_SHARDING}::test_bytes_per_device[optimizer]",
    ),
    "backends.torch.patches_optimizers Optimizer._backend_apply_gradients": (
        "torch",
        f"{_SHARDING}::test_clipping_decay_average_and_accumulation[2-optimizer]",
    ),
    "keras_patches.sharded_updates Optimizer._clip_gradients": (
        "torch",
        f"{_SHARDING}::test_clipping_decay_average_and_accumulation[2-optimizer]",
    ),
    "keras_patches.sharded_slots Optimizer._apply_weight_decay": (
        "torch",
        f"{_SHARDING}::test_optimizers_that_are_not_elementwise[Lamb]",
    ),
    "backends.tensorflow.patches_sharding Optimizer._backend_apply_gradients": (
        "tensorflow",
        f"{_SHARDING}::test_clipping_decay_average_and_accumulation[2-optimizer]",
    ),
    "backends.tensorflow.patches_sharding Variable._shared_name": (
        "tensorflow",
        f"{_TF}::test_native_checkpoint_of_sharded_state",
    ),
    "backends.tensorflow.patches_sharding Variable._serialize_to_tensors": (
        "tensorflow",
        f"{_TF}::test_native_checkpoint_of_sharded_state",
    ),
    "backends.tensorflow.patches_sharding Variable._restore_from_tensors": (
        "tensorflow",
        f"{_TF}::test_native_checkpoint_of_sharded_state",
    ),
    "backends.tensorflow.patches_sharding Optimizer._var_key": (
        "tensorflow",
        f"{_SHARDING}::test_clipping_decay_average_and_accumulation[2-optimizer]",
    ),
    "backends.jax.patches LossScaleOptimizer._common_apply": (
        "jax",
        f"{_JAX}::test_loss_scaling_in_run",
    ),
    "backends.jax.patches keras.src.random.seed_generator.global_seed_generator": (
        "jax",
        f"{_JAX}::test_global_seed_generator_is_not_mirrored",
    ),
    "backends.torch.patches keras.src.backend.torch.random.dropout": (
        "torch",
        "tests/backends/test_torch_random.py::test_workers_draw_different_masks_in_run",
    ),
    "backends.torch.patches_compiled keras.src.backend.torch.random.dropout": (
        "torch",
        f"{_COMPILED}[dropout]",
    ),
    "backends.torch.patches_compiled Layer.add_loss": ("torch", f"{_COMPILED}[adds]"),
    "backends.torch.patches_compiled "
    "keras.src.backend.torch.nn._can_use_flash_attention": (
        "torch",
        f"{_COMPILED}[attention]",
    ),
    "backends.torch.patches_compiled keras.src.backend.torch.nn.moments": (
        "torch",
        f"{_COMPILED}[norm]",
    ),
    "backends.torch.patches Layer._track_variables": (
        "torch",
        "tests/distributed/test_uneven_rounds.py::test_scope_compares_variables_once",
    ),
    "backends.torch.patches Layer._post_track_variable": (
        "torch",
        f"{_TORCH_SHARDING}::test_programs_equal_one_device[2-LoRA]",
    ),
    "backends.torch.patches Layer.state_dict": (
        "torch",
        f"{_TORCH_SHARDING}::test_state_dict_is_refused",
    ),
    "backends.torch.patches Layer.load_state_dict": (
        "torch",
        f"{_TORCH_SHARDING}::test_state_dict_is_refused",
    ),
    "backends.torch.patches_optimizers LossScaleOptimizer.check_finite": (
        "torch",
        f"{_SHARDING}::test_equality_table_with_sharding[mixed_float16]",
    ),
    "backends.torch.patches_optimizers TorchParallelOptimizer._backend_update_step": (
        "torch",
        f"{_TORCH_SHARDING}::test_optimizer_updates_few_shards_at_a_time",
    ),
    "backends.torch.patches_optimizers Adam._parallel_update_step": (
        "torch",
        "tests/backends/test_torch_fused.py::test_fused_update_matches_keras",
    ),
    "backends.torch.patches Layer.zero_grad": (
        "torch",
        f"{_ROW}[shuffle]",
    ),
    "backends.torch.patches TorchModuleWrapper.call": (
        "torch",
        "tests/backends/test_torch.py::test_counting_module_is_refused",
    ),
    "backends.torch.patches Model.make_train_function": (
        "torch",
        f"{_LOSSES}::test_added_sum_warns_and_equals_one_device",
    ),
    "backends.torch.patches Model.make_test_function": (
        "torch",
        f"{_TRAINING}::test_fit_equals_one_device[3x1]",
    ),
    "backends.torch.patches Model.make_predict_function": (
        "torch",
        f"{_ENTRY}::test_outputs_without_rows[scalar]",
    ),
    "backends.torch.patches TorchEpochIterator._get_iterator": (
        "torch",
        f"{_TRAINING}::test_data_ending_early_is_reported",
    ),
    "backends.torch.patches Model.get_metrics_result": (
        "torch",
        "tests/speed/test_torch_figures.py::test_cost_per_step_of_two_processes",
    ),
    **{
        f"keras_patches.random keras.random.{name}": ("torch", f"{_NUMBERS}::{_EVERY}")
        for name in _FUNCTIONS.split()
    },
    "keras_patches.random keras.random.truncated_normal": (
        "tensorflow",
        f"{_NUMBERS}::{_EVERY}",
    ),
    "keras_patches.random keras.random.dropout": (
        "torch",
        f"{_NUMBERS}::test_keras_layers",
    ),
    "backends.tensorflow.patches Model.get_metrics_result": (
        "tensorflow",
        f"{_DERIVED}::test_unread_metrics_need_no_reduction",
    ),
    "backends.tensorflow.patches Variable._direct_assign": (
        "tensorflow",
        "tests/core/test_sync_on_read.py::test_assigned_sum_is_divided_by_replicas[plainly-int32-5-2]",
    ),
    "backends.tensorflow.patches Variable.handle": (
        "tensorflow",
        f"{_TF}::test_tape_in_cross_replica_context_is_refused",
    ),
    "backends.tensorflow.patches Variable._initialize": (
        "tensorflow",
        f"{_TF}::test_run_builds_layers_lazily",
    ),
    "backends.tensorflow.patches Variable._map_aggregation": (
        "tensorflow",
        f"{_RUN}::test_mirrored_variable_assignment[mean-int32-2.0]",
    ),
    "backends.tensorflow.patches Variable.value": (
        "tensorflow",
        "tests/distributed/test_tensorflow.py::test_variables_of_all_dtypes",
    ),
    "backends.tensorflow.patches Layer._maybe_build": (
        "tensorflow",
        f"{_TF}::test_run_builds_layers_lazily",
    ),
    "backends.tensorflow.patches Optimizer.add_variable_from_reference": (
        "tensorflow",
        f"{_OF_NOBODY}[assign]",
    ),
    "backends.tensorflow.patches Optimizer._apply_weight_decay": (
        "tensorflow",
        _OPTIMIZER,
    ),
    "backends.tensorflow.patches Optimizer._backend_update_step": (
        "tensorflow",
        _REDUCTION,
    ),
    "backends.tensorflow.patches "
    "Optimizer._overwrite_model_variables_with_average_value": (
        "tensorflow",
        _OPTIMIZER,
    ),
    "backends.tensorflow.patches Optimizer._backend_increment_gradient_accumulators": (
        "tensorflow",
        _OPTIMIZER,
    ),
    "backends.tensorflow.patches Optimizer.assign": (
        "tensorflow",
        f"{_OF_NOBODY}[assign]",
    ),
    "backends.tensorflow.patches Optimizer.assign_add": (
        "tensorflow",
        f"{_OF_NOBODY}[assign_add]",
    ),
    "backends.tensorflow.patches Optimizer.assign_sub": (
        "tensorflow",
        f"{_OF_NOBODY}[assign_sub]",
    ),
    "backends.tensorflow.patches LossScaleOptimizer._tf_apply": (
        "tensorflow",
        f"{_ROW}[LossScaleOptimizer over EMA, overwriting every 2 steps]",
    ),
    "backends.tensorflow.patches keras.src.losses.loss.scale_loss_for_distribution": (
        "tensorflow",
        f"{_ROW}[kernel and bias regularizers]",
    ),
    "backends.tensorflow.patches keras.src.losses.loss.unscale_loss_for_distribution": (
        "tensorflow",
        _REDUCTION,
    ),
    "backends.tensorflow.patches Model.distribute_strategy": (
        "tensorflow",
        f"{_ENTRY}::test_evaluate_and_predict",
    ),
    "backends.tensorflow.patches Model.make_train_function": (
        "tensorflow",
        f"{_TF}::test_jit_compile_warns[fit]",
    ),
    "backends.tensorflow.patches Model.make_test_function": (
        "tensorflow",
        f"{_TF}::test_jit_compile_warns[evaluate]",
    ),
    "backends.tensorflow.patches Model.make_predict_function": (
        "tensorflow",
        f"{_TF}::test_jit_compile_warns[predict]",
    ),
    "backends.tensorflow.patches TFEpochIterator._get_iterator": (
        "tensorflow",
        f"{_TRAINING}::test_data_ending_early_is_reported",
    ),
    "backends.tensorflow.patches Model._maybe_symbolic_build": (
        "tensorflow",
        f"{_BAD_INPUT}::test_differing_row_counts_are_refused",
    ),
    "backends.tensorflow.patches "
    "keras.src.random.seed_generator.global_seed_generator": (
        "tensorflow",
        "tests/training/test_seed_generators.py::test_assigned_seed_reaches_run[True]",
    ),
}
