"""The recipes of Open MPI's mpirun and MPICH's mpiexec."""

import pytest

from tests.launchers import recipes

# The launcher, its line in the recipe, and the changes for 2 workers on this machine.
CASES = {
    "Open MPI": (
        "mpirun -np",
        {"mpirun": "mpirun.openmpi", "-np 8": "-np 2", "node1:4,node2:4": "localhost"},
    ),
    "MPICH": (
        "mpiexec -n",
        {"mpiexec": "mpiexec.hydra", "-n 8": "-n 2", "node1,node2": "localhost"},
    ),
}
LAUNCHERS = pytest.mark.parametrize("launcher", CASES)


def read_command(launcher: str) -> str:
    line, changes = CASES[launcher]
    return recipes.read_recipe(line, {**changes, "node1": "localhost"})


@LAUNCHERS
def test_mpi(launcher, needs, tmp_path, compare):
    needs(launcher)
    recipes.write_program(tmp_path)
    (output,) = recipes.run_all([read_command(launcher)], [tmp_path])
    assert "replicas: 2" in output
    compare(recipes.read_weights(tmp_path))


@LAUNCHERS
def test_two_jobs_on_one_machine_do_not_meet(launcher, needs, tmp_path, compare):
    needs(launcher)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        recipes.write_program(folder)
    for output in recipes.run_all([read_command(launcher)] * 2, folders):
        assert "replicas: 2" in output
    for folder in folders:
        compare(recipes.read_weights(folder))


def test_mpich_on_two_hosts(needs, tmp_path, compare):
    """Hydra starts the workers of both hosts on this machine."""
    needs("MPICH")
    recipes.write_program(tmp_path)
    changes = {
        "mpiexec -n 8": "mpiexec.hydra -launcher fork -n 2",
        "-ppn 4": "-ppn 1",
        "node1": "localhost",
        "node2": "$HOSTNAME",
    }
    command = recipes.read_recipe("mpiexec -n", changes)
    (output,) = recipes.run_all([command], [tmp_path])
    assert "replicas: 2" in output
    compare(recipes.read_weights(tmp_path))
