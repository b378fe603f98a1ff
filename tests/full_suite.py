"""Tests that only `make test-full` runs: long tables, combinations and rare faults.

`make test` runs the rest: every behaviour once on each backend. Keys are the beginnings
of node ids without "tests/". The value is how many of these tests `make test` keeps,
evenly spaced, on each backend that is not left out by `ON_ONE`.
"""

KEPT = {
    # Long tables.
    "training/test_equality_table.py::": 6,
    "audit/test_first_step.py::test_non_mean_gradients_warn": 2,
    "audit/test_first_step.py::test_row_dependence_warns": 4,
    "training/test_input_kinds.py::test_fit_evaluate_and_predict": 7,
    "training/test_sharding.py::test_equality_table_with_sharding": 0,
    # Programs of other authors, of the documentation and of the examples.
    "ports/": 0,
    "launchers/": 0,
    "test_docstrings.py::test_example": 0,
    "test_examples.py::test_example_runs[": 0,
    "test_examples.py::test_example_runs_on_its_backend": 0,
    "test_examples.py::test_launch_from_a_notebook": 0,
    "test_examples.py::test_notebook_runs_in_kernel": 0,
    "test_examples.py::test_optuna_study_runs_on_two_workers": 0,
    "test_examples.py::test_program_block_runs": 0,
    "test_examples.py::test_two_workers_are_one_run_of_a_tracker": 0,
    "test_pages.py::test_page_code_runs": 0,
    "testing/test_worker_runner.py::test_docstring_examples_run": 0,
    # Costs of a step, and measurements.
    "benchmarks/test_sides.py::test_row_is_measured": 0,
    "cluster/test_scale.py::": 0,
    "speed/": 0,
    # Faults.
    "distributed/test_launcher.py::test_restarted_training": 0,
    "faults/": 3,
    "training/test_killed_process.py::": 0,
    # Combinations.
    "backends/test_coordinator_workers.py::": 1,
    "backends/test_jax_workers.py::test_replicas_of_different_shapes": 1,
    "backends/test_jax_workers.py::test_run_accepts_functions_of_all_replicas": 1,
    "backends/test_tensorflow.py::test_loss_of_ragged_global_batch": 1,
    "backends/test_torch_compiled.py::test_compiler_backend_is_respected": 0,
    "backends/test_torch_compiled.py::test_step_is_compiled": 1,
    "backends/test_torch_compiled.py::test_global_batch_statistics": 0,
    "backends/test_torch_compiled.py::test_unsupported_models": 1,
    "backends/test_torch_compiled_workers.py::": 0,
    "core/test_custom_loop.py::test_custom_loop_equals_one_device": 1,
    "distributed/test_addresses.py::test_workers_on_one_host_connect": 1,
    "distributed/test_addresses.py::test_workers_on_several_machines_connect": 1,
    "distributed/test_checkpoints.py::test_folders_that_are_not_shared": 1,
    "distributed/test_checkpoints.py::test_killed_worker_leaves_a_checkpoint": 1,
    "distributed/test_collectives.py::test_collectives_of_workers": 1,
    "distributed/test_gradient_buckets.py::test_workers_equal_one_process": 2,
    "distributed/test_elastic.py::": 0,
    "distributed/test_links.py::test_slow_lossy_links": 0,
    "distributed/test_local_rows.py::test_local_rows_give_one_devices_weights": 1,
    "distributed/test_orbax.py::": 1,
    "distributed/test_resume.py::test_resume_on_another_backend": 0,
    "distributed/test_resume.py::test_resume_with_another_number_of_workers": 1,
    "distributed/test_sharding.py::": 1,
    "distributed/test_tensorflow.py::test_fit_in_many_ways_equals_one_device": 0,
    "distributed/test_tpu.py::": 0,
    "distributed/test_training.py::test_fit_equals_one_device": 1,
    "distributed/test_user_data_kinds.py::test_fit_with_users_data_kinds": 0,
    "keras_patches/test_needed_by.py::test_named_tests_exist": 0,
    "distributed/test_virtual_replicas.py::test_killed_worker": 0,
    "distributed/test_virtual_replicas.py::test_workers_have_bits": 1,
    "commands/test_run.py::test_environment_sets_devices_by_default": 0,
    "commands/test_subcommands.py::test_doctor_of_healthy_machine": 0,
    "commands/test_worker_checks.py::test_healthy_workers": 1,
    "commands/test_worker_checks.py::test_name_of_a_machine": 1,
    "strategies/test_plan.py::test_bytes_equal_memory_report": 5,
    "strategies/test_plan.py::test_peak_is_measured_peak": 0,
    "strategies/test_tpu.py::test_custom_loop_equals_one_device": 1,
    "strategies/test_tpu.py::test_fit_equals_one_device": 1,
    "strategies/test_tpu.py::test_sharded_state_of_replicas": 1,
    "test_imports.py::test_any_public_name_can_be_first": 0,
    "training/test_keras_distribution.py::test_active_distribution_is_refused": 3,
    "training/test_keras_distribution.py::test_orbax_checkpoint_continues_training": 1,
    "training/test_keras_distribution.py::test_saved_models_load_on_the_other_side": 1,
    "audit/test_first_step.py::test_loss_using_sample_weights_warns": 1,
    "audit/test_first_step.py::test_test_step_is_checked": 2,
    "audit/test_first_step.py::test_trial_collects_no_losses": 1,
    "test_imports.py::test_model_outside_scopes_is_unaffected": 1,
    "test_imports.py::test_no_other_backend_is_imported": 1,
    "training/test_bad_input.py::test_same_result_as_one_device": 5,
    "training/test_callbacks.py::test_backup_and_restore": 1,
    "training/test_callbacks.py::test_swap_ema_weights": 1,
    "training/test_custom_train_steps.py::test_fit": 1,
    "training/test_entry_points.py::test_components_are_equal_after_training": 1,
    "training/test_entry_points.py::test_kinds_of_models": 2,
    "training/test_entry_points.py::test_predict_without_training": 2,
    "training/test_entry_points.py::test_steps_per_execution": 1,
    "training/test_entry_points.py::test_two_models_under_two_strategies": 1,
    "training/test_equality.py::test_synchronized_batch_normalization": 1,
    "training/test_equality.py::test_training_equals_one_device": 1,
    "training/test_equality.py::test_two_runs_are_bit_equal": 1,
    "training/test_input_kinds.py::test_batches_with_several_inputs": 1,
    "training/test_input_kinds.py::test_endless_data": 1,
    "training/test_models.py::test_cloned_model": 1,
    "training/test_models.py::test_deep_copied_model": 1,
    "training/test_models.py::test_distillation": 1,
    "training/test_models.py::test_lazily_built_model": 1,
    "training/test_models.py::test_wrapper_model": 1,
    "training/test_optimizers.py::test_custom_optimizer_in_run": 2,
    "training/test_optimizers.py::test_fit_with_custom_optimizer": 3,
    "training/test_optimizers.py::test_sharded_custom_optimizer": 1,
    "training/test_per_replica_state.py::test_random_layers_are_reproducible": 1,
    "training/test_random_in_run.py::test_keras_layers_in_run": 1,
    "training/test_random_numbers.py::test_one_row_per_replica": 1,
    "training/test_random_numbers.py::test_python_control_flow": 1,
    "training/test_random_numbers.py::test_static_batch_sizes": 1,
    "training/test_resume.py::test_counting_callbacks_resume": 1,
    "training/test_resume.py::test_dataset_with_state_dict_resumes": 3,
    "training/test_resume.py::test_preempted_training_resumes": 1,
    "training/test_resume.py::test_tf_data_resumes": 1,
    "training/test_resume.py::test_training_resumes": 3,
    "training/test_saving.py::test_saved_model_loads": 3,
    "training/test_sharding.py::test_backup_resumes_with_other_replica_count": 0,
    "training/test_sharding.py::test_clipping_decay": 1,
    "training/test_sharding.py::test_custom_step_with_sharding": 1,
    "training/test_sharding.py::test_fewer_shards_than_replicas": 1,
    "training/test_sharding.py::test_files_hold_full_variables": 1,
    "training/test_sharding.py::test_optimizers_that_are_not_elementwise": 1,
    "training/test_sharding.py::test_repeated_embedding_rows": 1,
    "training/test_state.py::test_differing_state_is_refused": 2,
    "training/test_state_between_fits.py::": 1,
}


# Slow tests of what all backends do: `make test` runs them on this backend alone.
ON_ONE: dict[str, list[str]] = {
    "jax": [],
    "torch": [],
    "tensorflow": [],
}


def find_full(names: list[str], backend: str) -> list[int]:
    """Return the positions of the tests that `make test` leaves out on a backend."""
    found = []
    for beginning, kept in KEPT.items():
        positions = [i for i, name in enumerate(names) if name.startswith(beginning)]
        stride = -(-len(positions) // kept) if kept else 0
        found += [p for i, p in enumerate(positions) if not stride or i % stride]
    elsewhere = {n for other in ON_ONE if other != backend for n in ON_ONE[other]}
    return found + [i for i, n in enumerate(names) if n.partition("[")[0] in elsewhere]
