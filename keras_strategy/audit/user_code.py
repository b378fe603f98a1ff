"""Detection of code that may compute something else on each replica's rows.

Keras's own layers, losses, metrics and optimizers, and its operations on single
elements, keep the rows of a batch apart, or are computed from all rows by a patch.
Everything else is the user's, and is audited.
"""

import re
from typing import Any

import keras
from keras import tree

# Operations that compute each element of the result from the elements of the inputs at
# the same place, if these have one shape or broadcast to it.
_ELEMENTWISE = frozenset(
    re.findall(
        r"\w+",
        "Abs Absolute Add Arccos Arccosh Arcsin Arcsinh Arctan Arctan2 Arctanh Cast "
        "Cbrt Ceil Celu Clip Cos Cosh Divide DivideNoNan Elu Equal Erf Erfc Erfinv Exp "
        "Exp2 Expm1 Floor FloorDivide Fmax Fmin Gelu Greater GreaterEqual HardSigmoid "
        "HardSilu HardTanh Hypot Isfinite Isinf Isnan LeakyRelu Less LessEqual Log "
        "Log10 Log1p Log2 LogSigmoid Logaddexp LogicalAnd LogicalNot LogicalOr "
        "LogicalXor Maximum Minimum Mod Multiply NanToNum Negative NotEqual OnesLike "
        "Power Reciprocal Relu Relu6 Round Rsqrt SaturateCast Selu Sigmoid Sign Silu "
        "Sin Sinh Softplus Softsign Sqrt Square StopGradient Subtract Tan Tanh "
        "TrueDivide Trunc Where ZerosLike ",
    )
)
# Keras's layers that call code of the user's.
_WRAPPERS = {"Lambda", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer"}


def find_user_code(objects: list[Any]) -> Any:
    """Return the first object that is not known to keep rows apart, or None."""
    for part in objects:
        if not _is_keras(type(part)) or type(part).__name__ in _WRAPPERS:
            return part
        is_operation = isinstance(part, keras.Operation)
        if is_operation and not isinstance(part, keras.Layer) and _mixes_rows(part):
            return part
        for name, value in vars(part).items():
            if _works_along_rows(name, value) or _is_users_function(value):
                return part
        if isinstance(part, keras.Model):
            for operation in getattr(part, "operations", ()):
                if not isinstance(operation, keras.Layer) and _mixes_rows(operation):
                    return operation
    return None


def _mixes_rows(operation: Any) -> bool:
    """Return True unless an operation is known to keep rows apart."""
    tensors = tree.flatten([operation.input, operation.output])
    ranks = {len(x.shape) for x in tensors}  # (n, d) and (n, 1, d) give (n, n, d)
    is_elementwise = type(operation).__name__ in _ELEMENTWISE and len(ranks) == 1
    return not is_elementwise or any(x.shape[:1] != (None,) for x in tensors)


def _is_keras(part: Any) -> bool:
    return (getattr(part, "__module__", None) or "").startswith(
        ("keras.", "keras_strat")
    )


def _is_users_function(value: Any) -> bool:
    """Return True for a function, but not for a method or an object with state."""
    is_function = callable(value) and hasattr(value, "__code__")
    return is_function and not hasattr(value, "__self__") and not _is_keras(value)


def _works_along_rows(name: str, value: Any) -> bool:
    """Return True for a layer's axis that includes the batch dimension."""
    if name not in ("axis", "axes"):
        return False
    axes = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(axis, int) and axis == 0 for axis in axes)
