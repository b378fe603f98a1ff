"""`Topology` and `DeviceAssignment` are TensorFlow's, in every case tried."""

import itertools
import pickle

import keras
import numpy as np
import pytest

import keras_strategy as ks

ours = ks.tpu.experimental
MESHES = [
    (1, 1, 1, 1),
    (2, 1, 1, 2),
    (2, 2, 1, 2),
    (4, 2, 1, 1),
    (2, 2, 2, 1),
    (4, 4, 1, 2),
    (1, 4, 2, 2),
    (3, 2, 1, 2),
    (4, 4, 4, 1),
    (4, 2, 2, 2),
]
compared = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="compared where TensorFlow is"
)


def coordinates(mesh, tasks=1):
    """All of a mesh, dealt to tasks in order."""
    every = np.array(list(np.ndindex(*mesh)), np.int32)
    return every.reshape(tasks, -1, 4)


def topology_of(library, mesh, tasks=1, missing=0):
    """A topology, without the last few devices."""
    devices = coordinates(mesh, tasks)
    return library.Topology(
        mesh_shape=mesh, device_coordinates=devices[:, : devices.shape[1] - missing]
    )


def outcome(fn):
    """Return the result of a call, or its error."""
    try:
        return fn()
    except Exception as error:
        return type(error), str(error).strip()


def theirs():
    import tensorflow as tf

    return tf.tpu.experimental


def told_of(topology):
    """Everything that a topology tells."""
    at = topology.device_coordinates.reshape(-1, 4)
    return [
        topology.mesh_shape.tolist(),
        topology.mesh_rank,
        topology.device_coordinates.tolist(),
        topology.missing_devices.tolist(),
        topology.num_tasks,
        topology.num_tpus_per_task,
        topology.serialized(),
        [int(topology.task_ordinal_at_coordinates(c)) for c in at],
        [int(topology.tpu_device_ordinal_at_coordinates(c)) for c in at],
    ]


@compared
@pytest.mark.parametrize("tasks, missing", [(1, 0), (2, 0), (1, 1), (2, 1)])
def test_topology_matches_native(tasks, missing):
    for mesh in MESHES[2:]:
        own = topology_of(ours, mesh, tasks, missing)
        other = topology_of(theirs(), mesh, tasks, missing)
        assert told_of(own) == told_of(other)
        # What one of them writes the other reads.
        assert told_of(ours.Topology(other.serialized())) == told_of(other)
        assert told_of(theirs().Topology(own.serialized())) == told_of(own)


def build(library, mesh, tasks=1, missing=0, **arguments):
    """Everything that an assignment tells."""
    topology = topology_of(library, mesh, tasks, missing)
    built = library.DeviceAssignment.build(topology, **arguments)
    pairs = list(np.ndindex(built.num_replicas, built.num_cores_per_replica))
    return [
        built.num_replicas,
        built.num_cores_per_replica,
        built.core_assignment.tolist(),
        [int(built.tpu_ordinal(*pair)) for pair in pairs],
        [
            outcome(lambda t=t, c=c: list(built.lookup_replicas(t, c)))
            for t in range(tasks)
            for c in range(built.num_cores_per_replica)
        ],
    ]


def same(mesh, **arguments):
    """Return True if results are equal, or errors have the same kind and reason."""
    mine, native = LIBRARIES
    own = outcome(lambda: build(mine, mesh, **arguments))
    other = outcome(lambda: build(native, mesh, **arguments))
    if isinstance(other, tuple) and other[0] is AssertionError:
        assert own[0] is ValueError  # theirs says nothing
    elif isinstance(other, tuple):
        assert own[0] is other[0]
        core = other[1].split(";")[0].split("  ")[0][:60]
        assert core.split(" is not compatible")[0] in own[1], (own, other)
    else:
        assert own == other, (mesh, arguments)
    return not isinstance(other, tuple)


LIBRARIES = []


@compared
def test_device_assignment_matches_native():
    LIBRARIES[:] = [ours, theirs()]
    built = 0
    for mesh in MESHES:
        sizes = [sorted({1, 2, n}) for n in mesh]
        for shape in itertools.product(*sizes):
            most = int(np.prod([m // s for m, s in zip(mesh, shape, strict=True)]))
            for replicas in {0, 1, most // 2, most, most + 1}:
                given = {"computation_shape": shape, "num_replicas": replicas}
                for mode in range(3):
                    built += same(mesh, device_order_mode=mode, **given)
                built += same(mesh, computation_stride=[2, 1, 1, 1], **given)
    assert built > 1000


@compared
def test_missing_devices_of_mesh():
    LIBRARIES[:] = [ours, theirs()]
    built = [
        same(mesh, tasks=tasks, missing=1, num_replicas=replicas, **stride)
        for mesh in MESHES[2:]
        for tasks in (1, 2)
        for replicas in (1, 3, 8)
        for stride in ({}, {"computation_stride": [2, 1, 1, 1]})
    ]
    assert any(built) and not all(built)


BAD = [
    ("Topology", {"mesh_shape": [2, 2, 1], "device_coordinates": [[[0, 0, 0]]]}),
    ("Topology", {"mesh_shape": [2, 0, 1, 1], "device_coordinates": [[[0, 0, 0, 0]]]}),
    ("Topology", {"mesh_shape": [1] * 4, "device_coordinates": [[[0, 0, 0]]]}),
    ("DeviceAssignment", {"topology": None, "core_assignment": [[[0] * 4]]}),
    ("DeviceAssignment", {"topology": ..., "core_assignment": [[0] * 4]}),
    ("DeviceAssignment", {"topology": ..., "core_assignment": [[[0] * 3]]}),
    ("DeviceAssignment.build", {"topology": "tpu"}),
    ("DeviceAssignment.build", {"topology": ..., "computation_shape": [1, 2]}),
    ("DeviceAssignment.build", {"topology": ..., "computation_shape": [1, 1, 1, 0]}),
    ("DeviceAssignment.build", {"topology": ..., "computation_stride": [2]}),
    ("DeviceAssignment.build", {"topology": ..., "computation_stride": [0, 1, 1, 1]}),
    ("DeviceAssignment.build", {"topology": ..., "computation_shape": [1, 1, 1, 4]}),
    ("DeviceAssignment.build", {"topology": ..., "num_replicas": 9}),
]


def call(library, name, given):
    given = dict(given)
    if given.get("topology") is ...:
        given["topology"] = topology_of(library, (2, 2, 1, 2))
    for part in name.split("."):
        library = getattr(library, part)
    return library(**given)


@pytest.mark.parametrize("name, given", BAD)
def test_bad_topologies_are_refused(name, given):
    with pytest.raises(ValueError) as raised:
        call(ours, name, given)
    if keras.backend.backend() == "tensorflow":
        _, told = outcome(lambda: call(theirs(), name, given))
        core = told.split(";")[0].split(", got")[0].split("rankgot")[0]
        assert core.rstrip() in str(raised.value)


def test_bad_serialized_topology_is_refused():
    whole = topology_of(ours, (2, 1, 1, 2)).serialized()
    for broken in (b"\xff", whole[:-1], whole + b"\x0d"):
        with pytest.raises(ValueError, match="serialized|device_coordinates"):
            ours.Topology(broken)


def test_device_assignment_pickles():
    topology = topology_of(ours, (2, 1, 1, 2))
    built = ours.DeviceAssignment.build(topology, [1, 1, 1, 2], num_replicas=2)
    again = pickle.loads(pickle.dumps(built))
    np.testing.assert_array_equal(again.core_assignment, built.core_assignment)
    with pytest.raises(ValueError, match="task: 3"):
        built.lookup_replicas(3, 0)
