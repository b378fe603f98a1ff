"""Programs that virtual replicas run in turns, with the same bits on any devices.

A program is traced for one replica and cut at its collectives. Each piece is compiled
for one device and called for each of its replicas, or once if its inputs are the same
on all. Between the pieces, sums follow one binary tree.
"""

import collections
import functools
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.api_util import debug_info
from jax.extend import core
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from keras_strategy.backends.jax.collectives import LocalBatches, layout_of
from keras_strategy.backends.jax.compile_cache import DifferentReplicas, NewVariables
from keras_strategy.backends.jax.distribution import (
    AXIS,
    ReplicaDistribution,
    put,
    tracing_virtual,
)
from keras_strategy.training.reduction import find_subtrees, sum_in_tree
from keras_strategy.values import PerReplica

_COLLECTIVES = "psum", "pmax", "pmin", "all_gather"
# Calls of functions, by their parameter that has the function.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}


def check_deterministic(platform: str) -> None:
    """Raise `ValueError` if XLA may choose kernels that add in any order."""
    flag = "--xla_gpu_deterministic_ops=true"
    flags = os.environ.get("XLA_FLAGS", "")
    if platform == "gpu" and flag not in flags:
        raise ValueError(
            "With `virtual_replicas` on GPUs, XLA must use deterministic kernels. Set "
            f"XLA_FLAGS={flag} before the program starts. Received: XLA_FLAGS={flags!r}"
        )


# For JAX's messages, which would name the arguments.
_DEBUG_INFO = debug_info("virtual replicas", lambda: None, (), {})._replace(
    arg_names=None, result_paths=None
)


class VirtualProgram:
    """A function of one replica, called for all of them on their devices in turns."""

    # Of inputs, the flags tell which are split over the replicas. Outputs are either
    # joined (True), the same on all replicas (False), or returned as `PerReplica`
    # values (None).

    def __init__(
        self,
        body: Callable[..., Any],
        in_splits: Any,
        out_splits: Any,
        distribution: ReplicaDistribution,
        written: Sequence[Any],
    ):
        self._body, self._written = body, written
        self._in_flags, self._out_flags = in_splits, out_splits
        self._distribution, count = distribution, distribution.per_device
        assert count is not None
        self._count, self._devices = count, distribution.devices[::count]
        self._indices = [
            jax.device_put(jnp.int32(replica), device)
            for replica, device in zip(
                distribution.topology.local_replicas, distribution.devices, strict=True
            )
        ]
        # By the layout of local batches. The first replica's is the first one: every
        # device computes what the replicas share by that, so that the bits are equal.
        self._variants: dict[Any, Variant] = {}
        self._exchanges: list[Exchange] = []

    def __call__(self, *inputs: Any) -> Any:
        self.trace(*inputs)
        leaves = jax.tree.leaves(inputs)
        arrays = [leaf for leaf, is_split in self._flagged(leaves) if not is_split]
        replicas = self._replicas(leaves)
        first = next(iter(self._variants.values()))
        devices = []
        for i in range(len(self._devices)):
            own = replicas[i * self._count : (i + 1) * self._count]
            shards = [_shard(array, i) for array in arrays]
            variants = dict.fromkeys([first, *(replica.variant for replica in own)])
            devices.append(
                Device({v: v.shared_values(i, shards) for v in variants}, own)
            )
        for stage, exchange in enumerate(self._exchanges):
            for device in devices:
                device.compute(stage)
            if exchange.operands:
                results = exchange([device.operands(stage) for device in devices])
                for i, device in enumerate(devices):
                    device.receive(stage, [_shard(array, i) for array in results])
        return self._join(first, devices)

    def trace(self, *inputs: Any) -> None:
        """Trace the function for each layout of the replicas' batches."""
        if self._variants:
            return
        leaves, structure = jax.tree.flatten(inputs)
        self._in_flags = _flags_of_leaves(self._in_flags, inputs)
        batches = next((x for x in leaves if isinstance(x, LocalBatches)), None)
        if batches is None:
            self._variants = {None: self._trace_variant(structure, leaves, None)}
        else:
            self._variants = self._trace_variants(structure, leaves, batches)
        first = next(iter(self._variants.values()))
        self._exchanges = [
            Exchange(of_stage, self._distribution) for of_stage in first.operands
        ]

    def _trace_variants(
        self, structure: Any, leaves: Sequence[Any], batches: LocalBatches
    ) -> dict[Any, "Variant"]:
        """Return the programs by the layout of a batch, the first replica's first."""
        # Raise `DifferentReplicas` if they do not communicate in the same way.
        by_layout = {layout_of(x): x for x in [batches.first, *batches.values]}
        variants = {}
        try:
            for layout, batch in by_layout.items():
                is_first = not variants
                variants[layout] = self._trace_variant(
                    structure, leaves, batch, is_first
                )
        except NewVariables:
            raise
        except Exception:  # raised again when replicas run without a program
            operands = []
        else:
            operands = [variant.operands for variant in variants.values()]
        is_same = bool(operands) and all(other == operands[0] for other in operands)
        workers = self._distribution.workers
        if workers is not None:
            local = is_same and repr(operands[0])
            received = workers.cluster.exchange("the sums of a program", local)
            is_same = is_same and all(other == local for other in received)
        if not is_same:
            raise DifferentReplicas
        return variants

    def _trace_variant(
        self, structure: Any, leaves: Sequence[Any], batch: Any, is_first: bool = True
    ) -> "Variant":
        replicas = self._distribution.replicas

        def local_shapes(leaf: Any, is_split: bool) -> Any:
            if isinstance(leaf, LocalBatches):
                return jax.tree.map(_shape_of, batch)
            shape = _shape_of(leaf)
            if not is_split:
                return shape
            rows, *others = shape.shape
            return shape.update(shape=(rows // replicas, *others))

        shapes = list(itertools.starmap(local_shapes, self._flagged(leaves)))
        environment = [(AXIS, replicas)]
        token = tracing_virtual.set(True)
        try:
            traced, outputs = jax.make_jaxpr(
                self._body, axis_env=environment, return_shape=True
            )(*structure.unflatten(shapes))
        finally:
            tracing_virtual.reset(token)

        def inlined(index, *args):
            return list(_inline(traced, args, index))

        program = jax.make_jaxpr(inlined, axis_env=environment)(
            jnp.int32(0), *traced.in_avals
        )
        consts = list(map(self._on_one_device, program.consts))
        in_flags = [
            is_split
            for shape, is_split in zip(shapes, self._in_flags, strict=True)
            for _ in jax.tree.leaves(shape)
        ]
        paths, self._structure = jax.tree_util.tree_flatten_with_path(outputs)
        self._flags_of_outputs = _flags_of_leaves(self._out_flags, outputs)
        is_read = [is_first or flag is not False for flag in self._flags_of_outputs]
        # Programs of other batches may still read what one does not need any more.
        donated = len(self._written) if batch is None else 0
        variant = Variant(
            _open(program), consts, in_flags, is_read, donated, self._devices
        )
        for (path, _), flag, atom in zip(
            paths, self._flags_of_outputs, variant.outputs, strict=True
        ):
            is_variable = not isinstance(atom, Literal)
            if flag is False and is_variable and atom in variant.varying:
                variable = self._written[path[1].idx]
                raise ValueError(
                    f"The variable '{variable.path}' is stored once for the replicas "
                    "of a device, but its value at the end of the step differs between "
                    "replicas. Apply gradients with `optimizer.apply`, which sums "
                    "them, or create the variable with an aggregation."
                )
        return variant

    def _on_one_device(self, const: Any) -> Any:
        if isinstance(const, jax.Array) and const.sharding.num_devices > 1:
            return put(const, self._distribution.everywhere).addressable_data(0)
        return const

    def _flagged(self, leaves: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        return zip(leaves, self._in_flags, strict=True)

    def _replicas(self, leaves: Sequence[Any]) -> list["LocalReplica"]:
        """Return the local replicas with their inputs."""
        split = [leaf for leaf, is_split in self._flagged(leaves) if is_split]
        local: Iterator[Any] = itertools.repeat((None, ()))
        place = 0
        for place, leaf in enumerate(split):
            if isinstance(leaf, LocalBatches):
                local = zip(
                    leaf.layouts, map(jax.tree.leaves, leaf.values), strict=True
                )
                del split[place]
                break
        replicas = []
        for i in range(len(self._devices)):
            shards = [_shard(array, i) for array in split]
            for arrays in _split_rows(shards, self._count):
                layout, batch = next(local)
                variant, index = self._variants[layout], self._indices[len(replicas)]
                arrays[place:place] = batch
                values = dict(zip(variant.split, arrays, strict=True))
                replicas.append(LocalReplica(variant, {variant.index: index, **values}))
        return replicas

    def _join(self, first: "Variant", devices: Sequence["Device"]) -> Any:
        """Return the outputs, arrays of all devices or `PerReplica` values."""
        flags = self._flags_of_outputs
        joined = [i for i, flag in enumerate(flags) if flag]
        by_device: list[dict[int, Any]] = []
        for device in devices:
            rows = _join_rows([device.outputs(r, joined) for r in device.replicas])
            by_device.append(dict(zip(joined, rows, strict=True)))
        same = [i for i, flag in enumerate(flags) if flag is False]
        for of_device, device in zip(by_device, devices, strict=True):
            values = device.shared[first]
            of_device.update((i, _read(first.outputs[i], values, values)) for i in same)

        def output(i: int, flag: bool | None) -> Any:
            if flag is None:
                return PerReplica(
                    [x for d in devices for r in d.replicas for x in d.outputs(r, [i])]
                )
            arrays = [of_device[i] for of_device in by_device]
            return self._globally(
                flag, list(map(jax.device_put, arrays, self._devices))
            )

        return self._structure.unflatten(itertools.starmap(output, enumerate(flags)))

    def _globally(self, is_split: bool, arrays: Sequence[jax.Array]) -> jax.Array:
        shape, distribution = list(arrays[0].shape), self._distribution
        if is_split:
            shape[0] *= distribution.mesh.size
        sharding = distribution.split if is_split else distribution.everywhere
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, arrays)


def _shard(array: jax.Array, device: int) -> jax.Array:
    """Return the shard on a local device, without the type of the whole array."""
    if array.sharding.num_devices == 1:  # then JAX's `Shard` may return the array
        return array.addressable_data(0)
    return array.addressable_shards[device].data


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    weak_type = getattr(array, "weak_type", False)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=weak_type)


def _flags_of_leaves(flags: Any, of: Any) -> list[bool | None]:
    """Return a flag for each leaf, given those of a structure's upper part."""
    is_none = lambda x: x is None  # noqa: E731
    return jax.tree.leaves(jax.tree.broadcast(flags, of, is_none), is_leaf=is_none)


@functools.partial(jax.jit, static_argnums=1)
def _split_rows(arrays: Sequence[jax.Array], count: int) -> list[list[jax.Array]]:
    pieces = [jnp.split(array, count) for array in arrays]
    return [[piece[i] for piece in pieces] for i in range(count)]


@jax.jit
def _join_rows(by_replica: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    return list(map(jnp.concatenate, zip(*by_replica, strict=True)))


class Variant:
    """The program of replicas whose batches have the same layout, in stages."""

    def __init__(
        self,
        program: Jaxpr,
        consts: Sequence[Any],
        in_flags: Sequence[bool | None],
        is_read: Sequence[bool],  # of the outputs
        donated: int,  # how many of the inputs may be overwritten, from the first one
        devices: Sequence[Any],
    ):
        self.index, *inputs = program.invars
        self._same = [v for v, flag in zip(inputs, in_flags, strict=True) if not flag]
        self.split = [v for v, flag in zip(inputs, in_flags, strict=True) if flag]
        self.outputs = program.outvars
        self._consts = [
            dict(zip(program.constvars, jax.device_put(consts, device), strict=True))
            for device in devices
        ]
        self.varying = {self.index, *self.split}
        self.stages = _cut(
            program,
            self.varying,
            [atom for atom, flag in zip(self.outputs, is_read, strict=True) if flag],
            inputs[:donated],
        )
        self.operands = [_describe_operands(stage.collectives) for stage in self.stages]

    def shared_values(self, device: int, arrays: Sequence[Any]) -> dict[Var, Any]:
        """Return the values that all replicas of a device have at first."""
        return {**self._consts[device], **dict(zip(self._same, arrays, strict=True))}


class LocalReplica(NamedTuple):
    variant: Variant
    values: dict[Var, Any]  # its own


class Device(NamedTuple):
    """The values on a device: those that replicas share, by variant, and their own."""

    shared: dict[Variant, dict[Var, Any]]
    replicas: Sequence[LocalReplica]

    def compute(self, stage: int) -> None:
        """Compute what a stage needs no communication for."""
        for variant, values in self.shared.items():
            variant.stages[stage].shared.run(values, values)
        for variant, values in self.replicas:
            variant.stages[stage].own.run(values, self.shared[variant])

    def operands(self, stage: int) -> list[list[Any]]:
        """Return each replica's operands of a stage's collectives."""
        return [
            [
                _read(atom, values, self.shared[variant])
                for equation in variant.stages[stage].collectives
                for atom in equation.invars
            ]
            for variant, values in self.replicas
        ]

    def receive(self, stage: int, results: Sequence[Any]) -> None:
        """Store the results of a stage's collectives."""
        for variant, values in self.shared.items():
            collectives = variant.stages[stage].collectives
            outputs = [v for equation in collectives for v in equation.outvars]
            values.update(zip(outputs, results, strict=True))

    def outputs(self, replica: LocalReplica, indices: Sequence[int]) -> list[Any]:
        variant, values = replica
        atoms = (variant.outputs[i] for i in indices)
        return [jnp.asarray(_read(a, values, self.shared[variant])) for a in atoms]


class Operand(NamedTuple):
    """An operand of a collective."""

    name: str  # of the collective
    shape: tuple[int, ...]
    dtype: Any
    axis: int | None  # of a gather
    is_tiled: bool | None


def _describe_operands(collectives: Sequence[JaxprEqn]) -> list[Operand]:
    described = []
    for equation in collectives:
        name, layout = equation.primitive.name, [None, None]
        if name == "all_gather":
            layout = _params(equation, "all_gather_dimension", "tiled")
        described += [
            Operand(name, *_shape_and_dtype(x), *layout) for x in equation.invars
        ]
    return described


def _shape_and_dtype(atom: Any) -> tuple[Any, Any]:
    return atom.aval.shape, atom.aval.dtype


class Exchange:
    """The collectives at the end of a stage."""

    def __init__(self, operands: Sequence[Operand], distribution: ReplicaDistribution):
        self.operands, self._distribution = operands, distribution
        count, self._replicas = distribution.per_device, range(distribution.replicas)
        assert count is not None
        by_device = [self._replicas[i : i + count] for i in self._replicas[::count]]
        self._subtrees = [find_subtrees(part, self._replicas) for part in by_device]
        first = distribution.topology.local_replicas.start // count
        self._local = list(map(tuple, self._subtrees[first:]))
        everywhere = distribution.everywhere
        self._receive = jax.jit(self._combine, out_shardings=everywhere)
        self._send = jax.jit(self._pack, static_argnums=1)

    def __call__(self, by_device: Sequence[Any]) -> list[jax.Array]:
        """Return the results, given the operands of each device's replicas."""
        packed = [
            self._send(values, subtrees)
            for values, subtrees in zip(by_device, self._local, strict=False)
        ]
        structure = jax.tree.structure(packed[0])
        arrays = [
            jax.make_array_from_single_device_arrays(
                (len(self._subtrees), *parts[0].shape[1:]),
                self._distribution.split,
                parts,
            )
            for parts in zip(*map(jax.tree.leaves, packed), strict=True)
        ]
        return self._receive(structure.unflatten(arrays))

    def _pack(self, values: Any, subtrees: tuple[range, ...]) -> Any:
        """Return what a device sends: sums of subtrees by dtype, and other values."""
        replicas = range(subtrees[0].start, subtrees[-1].stop)
        most = max(map(len, self._subtrees))
        sums = {}
        for dtype, indices in self._summed().items():
            leaves = {
                range(replica, replica + 1): jnp.concatenate(
                    [jnp.ravel(of_replica[i]).astype(dtype) for i in indices]
                )
                for replica, of_replica in zip(replicas, values, strict=True)
            }
            nodes = [sum_in_tree(subtree, leaves, jnp.add) for subtree in subtrees]
            sums[dtype] = jnp.stack(nodes + nodes[:1] * (most - len(nodes)))[None]
        gathered = {
            i: jnp.stack([jnp.asarray(of_replica[i]) for of_replica in values])[None]
            for i, operand in enumerate(self.operands)
            if operand.name != "psum"
        }
        return sums, gathered

    def _combine(self, received: Any) -> list[jax.Array]:
        """Return the results of the collectives."""
        sums, gathered = jax.lax.with_sharding_constraint(
            received, self._distribution.everywhere
        )
        results: dict[int, jax.Array] = {}
        for dtype, indices in self._summed().items():
            nodes = {
                subtree: sums[dtype][device, i]
                for device, subtrees in enumerate(self._subtrees)
                for i, subtree in enumerate(subtrees)
            }
            total = sum_in_tree(self._replicas, nodes, jnp.add)
            sizes = [math.prod(self.operands[i].shape) for i in indices]
            ends = list(itertools.accumulate(sizes[:-1]))
            for i, part in zip(indices, jnp.split(total, ends), strict=True):
                operand = self.operands[i]
                results[i] = part.reshape(operand.shape).astype(operand.dtype)
        for i, array in gathered.items():
            operand = self.operands[i]
            parts = array.reshape(len(self._replicas), *operand.shape)
            if operand.name == "pmax":
                results[i] = jnp.max(parts, 0)
            elif operand.name == "pmin":
                results[i] = jnp.min(parts, 0)
            else:
                join = jnp.concatenate if operand.is_tiled else jnp.stack
                results[i] = join(list(parts), operand.axis)
        return [results[i] for i in range(len(self.operands))]

    def _summed(self) -> dict[Any, list[int]]:
        """Return the indices of operands that are added, by the dtype of sums."""
        indices: dict[Any, list[int]] = {}
        for i, operand in enumerate(self.operands):
            if operand.name == "psum":
                # XLA may keep more digits of half floats within a program.
                dtype = operand.dtype
                is_half = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
                indices.setdefault("float32" if is_half else str(dtype), []).append(i)
        return indices


class Stage(NamedTuple):
    """Equations that need no communication, and the collectives that follow."""

    shared: "Piece"  # whose inputs all replicas have in common
    own: "Piece"
    collectives: Sequence[JaxprEqn]


class Piece:
    """Equations without collectives, compiled for one device."""

    # The arrays of `unused`, which nothing reads later, may become results.

    def __init__(
        self,
        equations: Sequence[JaxprEqn],
        needed: Collection[Var],
        unused: Collection[Var],
    ):
        made = {v for equation in equations for v in equation.outvars}
        read = [a for e in equations for a in e.invars if not isinstance(a, Literal)]
        self._inputs = list(dict.fromkeys(v for v in read if v not in made))
        self._outputs = [v for e in equations for v in e.outvars if v in needed]
        results = list(map(_shape_and_dtype, self._outputs))
        donated = []
        for i, variable in enumerate(self._inputs):
            layout = _shape_and_dtype(variable)
            if variable in unused and layout in results:
                results.remove(layout)
                donated.append(i)
        self._call = jax.jit(
            _function(equations, self._inputs, self._outputs), donate_argnums=donated
        )

    def run(self, values: dict[Var, Any], of_device: dict[Var, Any]) -> None:
        """Compute a replica's or a device's values."""
        if self._outputs:
            inputs = [_read(variable, values, of_device) for variable in self._inputs]
            values.update(zip(self._outputs, self._call(*inputs), strict=True))


def _cut(
    jaxpr: Jaxpr, varying: set[Var], outputs: Sequence[Any], donatable: Collection[Var]
) -> list[Stage]:
    """Cut a program at its collectives; add what differs on replicas to `varying`."""
    stage_of: dict[Var, int] = {}
    pieces: dict[tuple[int, str], list[JaxprEqn]] = {}
    communication: dict[int, list[JaxprEqn]] = {}
    # The stages and kinds of equations that read a variable.
    users: dict[Var, set[tuple[int, str]]] = collections.defaultdict(set)
    for equation in jaxpr.eqns:
        read = [atom for atom in equation.invars if not isinstance(atom, Literal)]
        stage = max([stage_of.get(variable, 0) for variable in read], default=0)
        if equation.primitive.name in _COLLECTIVES:
            user = stage, "collectives"
            communication.setdefault(stage, []).append(equation)
            stage += 1
        else:
            varies = not varying.isdisjoint(read) or bool(equation.effects)
            user = stage, "own" if varies else "shared"
            pieces.setdefault(user, []).append(equation)
            if varies:
                varying.update(equation.outvars)
        for variable in read:
            users[variable].add(user)
        stage_of.update(dict.fromkeys(equation.outvars, stage))
    last = max([*stage_of.values(), 0])
    for atom in outputs:
        if not isinstance(atom, Literal):
            users[atom].add((last + 1, "outputs"))

    def piece(stage, kind):
        key = stage, kind
        needed = {v for v, keys in users.items() if keys - {key}}
        earlier = {v for v in donatable if all(s < stage for s, _ in users[v] - {key})}
        unused = earlier if kind == "shared" else set()
        return Piece(pieces.get(key, []), needed, unused)

    return [
        Stage(piece(i, "shared"), piece(i, "own"), communication.get(i, []))
        for i in range(last + 1)
    ]


def _open(program: Any) -> Jaxpr:
    """Return a program without constants, which newer versions of JAX keep in it."""
    return getattr(program, "jaxpr", program)


def _inline(program: Any, args: Sequence[Any], index: Any) -> Iterator[Any]:
    """Evaluate a program; inline its calls of functions that have collectives."""
    jaxpr = _open(program)
    values = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    for equation in jaxpr.eqns:
        operands = [_read(atom, values, values) for atom in equation.invars]
        results = _inline_equation(equation, operands, index)
        values.update(zip(equation.outvars, results, strict=True))
    return (_read(atom, values, values) for atom in jaxpr.outvars)


def _inline_equation(
    equation: JaxprEqn, operands: Sequence[Any], index: Any
) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    if name == "axis_index":
        return [index]
    if name == "reduce_scatter":  # the gradient of a gather
        total = jax.lax.psum(operands[0], AXIS)
        dim, size, is_tiled = _params(
            equation, "scatter_dimension", "axis_size", "tiled"
        )
        rows = total.shape[dim] // size
        part = jax.lax.dynamic_slice_in_dim(total, index * rows, rows, dim)
        return [part if is_tiled else jnp.squeeze(part, dim)]
    if name == "new_ref":
        raise ValueError(
            "`virtual_replicas` does not support JAX's mutable arrays (`new_ref`). "
            "Remove them; if a scan makes them, set JAX's `jax_scan3` to False."
        )
    functions = list(_functions_of(equation))
    if name == "call_hi_primitive":
        return list(_inline(functions[0], operands, index))
    if any(map(_communicates, functions)):
        if name == "scan" and _params(equation, "length")[0]:
            return _unroll(equation, operands, index)
        function = params.get(_CALLS.get(name, ""))
        if function is None:
            raise ValueError(
                "With `virtual_replicas`, replicas cannot communicate inside of "
                f"`{name}`, such as by an `all_reduce` in a condition or a loop of "
                "unknown length. Move it out of them."
            )
        return list(_inline(function, operands, index))
    if name not in _COLLECTIVES and _uses_axis(equation):
        raise ValueError(
            f"`virtual_replicas` does not support JAX's `{name}`. Use `all_reduce` or "
            "`all_gather` of `ks.get_replica_context()`."
        )
    pairs = zip(equation.invars, operands, strict=True)
    values = {atom: x for atom, x in pairs if not isinstance(atom, Literal)}
    return _function([equation], list(values), equation.outvars)(*values.values())


def _unroll(equation: JaxprEqn, operands: Sequence[Any], index: Any) -> Sequence[Any]:
    """Inline each iteration of a scan."""
    length, body, is_reverse = _params(equation, "length", "jaxpr", "reverse")

    def count_whole(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        """Return the number of values that an iteration does not slice."""
        pairs = zip(outer, inner, strict=True)
        return sum(a.aval.shape == b.aval.shape for a, b in pairs)

    # The names of the parameters with these counts differ between versions of JAX.
    stop = count_whole(equation.invars, _open(body).invars)
    first = stop - count_whole(equation.outvars, _open(body).outvars)
    consts, carry, arrays = operands[:first], operands[first:stop], operands[stop:]
    outputs: list[Sequence[Any]] = [()] * length
    for i in reversed(range(length)) if is_reverse else range(length):
        slices = [array[i] for array in arrays]
        args = [*consts, *carry, *slices]
        results = list(_inline(body, args, index))
        carry, outputs[i] = results[: len(carry)], results[len(carry) :]
    return [*carry, *map(jnp.stack, zip(*outputs, strict=True))]


def _params(equation: JaxprEqn, *names: str) -> list[Any]:
    """Return parameters of a primitive, which other versions of JAX may rename."""
    name, params = equation.primitive.name, equation.params
    missing = [key for key in names if key not in params]
    if missing:
        raise ValueError(
            f"`virtual_replicas` expected the parameters {missing} of JAX's `{name}`. "
            f"Received: {sorted(params)}. Install a version of JAX that keras_strategy "
            f"supports, not {jax.__version__}."
        )
    return [params[key] for key in names]


def _function(
    equations: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Var]
) -> Callable[..., Sequence[Any]]:
    effects = frozenset().union(*[equation.effects for equation in equations])
    program = Jaxpr((), inputs, outputs, equations, effects, _DEBUG_INFO)
    if not hasattr(program, "consts"):
        program = core.ClosedJaxpr(program, ())
    return core.jaxpr_as_fun(program)


def _functions_of(equation: JaxprEqn) -> Iterable[Any]:
    if equation.primitive.name != "call_hi_primitive":
        return jaxprs_in_params(equation.params)
    # With JAX's `jax_remat3` and `jax_custom_vjp3`.
    (primitive,) = _params(equation, "_prim")
    shapes = [_shape_of(atom.aval) for atom in equation.invars]
    args = jax.tree.unflatten(primitive.in_tree, shapes)
    return [jax.make_jaxpr(primitive.expand)(*args)]


def _communicates(jaxpr: Jaxpr) -> bool:
    return any(
        _uses_axis(equation) or any(map(_communicates, _functions_of(equation)))
        for equation in jaxpr.eqns
    )


def _uses_axis(equation: JaxprEqn) -> bool:
    names = [equation.params.get(key, ()) for key in ("axes", "axis_name")]
    return any(AXIS in (name if isinstance(name, tuple) else (name,)) for name in names)


def _read(atom: Any, values: dict[Var, Any], of_device: dict[Var, Any]) -> Any:
    if isinstance(atom, Literal):
        return atom.val
    return values[atom] if atom in values else of_device[atom]
