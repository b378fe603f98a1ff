"""`keras-strategy port`."""

import functools
import operator
import re
import subprocess
import sys
import warnings

import keras
import pytest

import keras_strategy as ks
from keras_strategy.commands import port
from keras_strategy.commands.cli import main
from tools import pages

PROGRAM = '''\
"""Trainiert auf zwei Geräten."""

import os
import tensorflow as tf
from tensorflow import distribute as d
from tensorflow.distribute import ReduceOp, OneDeviceStrategy as One

strategy: tf.distribute.Strategy = tf.distribute.MirroredStrategy()
é = d.experimental.CollectiveHints(
    1)  # tf.distribute in words stays
servers = tf.distribute.experimental.ParameterServerStrategy(resolver)
rpc = tf.distribute.experimental.rpc.Server
n = tf.nn.compute_average_loss(x) / tf.distribute.get_strategy().num_replicas_in_sync
tf.function(strategy.unwrap)
'''
PORTED = '''\
"""Trainiert auf zwei Geräten."""

import os
import tensorflow as tf
import keras_strategy as ks
from tensorflow import distribute as d
from keras_strategy import ReduceOp, OneDeviceStrategy as One

strategy: ks.Strategy = ks.MirroredStrategy()
é = ks.experimental.CollectiveHints(
    1)  # tf.distribute in words stays
servers = ks.experimental.ParameterServerStrategy(resolver)
rpc = ks.experimental.rpc.Server
n = ks.compute_average_loss(x) / ks.get_strategy().num_replicas_in_sync
tf.function(strategy.unwrap)
'''


def test_port_prints_diff(tmp_path, capsys):
    """It makes the program what it should be, and leaves the file alone."""
    file = tmp_path / "train.py"
    file.write_text(PROGRAM, encoding="utf-8")
    assert main(["port", str(file)]) == 0
    printed = capsys.readouterr()
    assert file.read_text(encoding="utf-8") == PROGRAM
    assert port.port(PROGRAM).text == PORTED
    changed = {line for line in printed.out.splitlines() if line[:1] in "+-"}
    assert "+strategy: ks.Strategy = ks.MirroredStrategy()" in changed
    assert "-é = d.experimental.CollectiveHints(" in changed
    assert "+import keras_strategy as ks" in changed and len(changed) == 2 + 13
    notes = printed.err.splitlines()
    assert [note.split(":")[0] for note in notes] == [
        *("line 9", "line 11", "line 12", "line 14")
    ]
    assert "use `ks.experimental.CommunicationOptions`" in notes[0]
    assert "JAX and torch raise an error" in notes[1]
    assert "gRPC" in notes[2]
    assert "tf.function: On JAX and torch, remove it (TensorFlow may" in notes[3]
    # What was ported stays as it is, but for what there is no name for.
    assert port.port(PORTED).text == PORTED


def test_unneeded_tensorflow_import_is_removed():
    ported = port.port("import tensorflow as tf\ns = tf.distribute.get_strategy()\n")
    assert ported == port.Ported(
        "import keras_strategy as ks\ns = ks.get_strategy()\n", ()
    )
    taken = port.port("import tensorflow as tf\nks = tf.distribute.get_strategy()\n")
    assert "ks = keras_strategy.get_strategy()" in taken.text


OTHERS = {
    "in functions": (
        """\
def first():
    import tensorflow as tf
    return tf.distribute.get_strategy(), tf.data.Options()
def second():
    import tensorflow as tf
    return tf.distribute.MirroredStrategy()
""",
        """\
def first():
    import tensorflow as tf
    import keras_strategy as ks
    return ks.get_strategy(), tf.data.Options()
def second():
    import tensorflow as tf
    import keras_strategy as ks
    return ks.MirroredStrategy()
""",
    ),
    "imported from TensorFlow": (
        "from tensorflow import distribute as d\ns = d.get_strategy()\n",
        "import keras_strategy as ks\ns = ks.get_strategy()\n",
    ),
    "TensorFlow 2 by its name": (
        "import tensorflow.compat.v2 as tf\ns = tf.distribute.get_strategy()\n",
        "import keras_strategy as ks\ns = ks.get_strategy()\n",
    ),
    "TensorFlow 2 inside of TensorFlow": (
        "import tensorflow as tf\ns = tf.compat.v2.distribute.get_strategy()\n",
        "import keras_strategy as ks\ns = ks.get_strategy()\n",
    ),
    "functions": (
        "from tensorflow.nn import compute_average_loss as f\nf(x)\n",
        "import keras_strategy as ks\nks.compute_average_loss(x)\n",
    ),
    "several modules of TensorFlow": (
        "from tensorflow import nn, distribute\nn = nn.compute_average_loss(x)\n"
        "f(distribute)\n",
        "from tensorflow import nn, distribute\nimport keras_strategy as ks\n"
        "n = ks.compute_average_loss(x)\nf(ks)\n",
    ),
    "all of it": (
        "import tensorflow as tf\nd = tf.distribute\ns = d.get_strategy()\n",
        "import keras_strategy as ks\nd = ks\ns = d.get_strategy()\n",
    ),
}


@pytest.mark.parametrize("how", OTHERS)
def test_import_styles_are_rewritten(how):
    before, after = OTHERS[how]
    assert port.port(before) == port.Ported(after, ())


def test_other_tensorflow_names_are_noted():
    ported = port.port(
        "import tensorflow as tf\n"
        "tf.tpu.experimental.initialize_tpu_system()\n"
        "v = tf.Variable(0, aggregation=tf.VariableAggregation.SUM)\n"
    )
    assert "\nks.tpu.experimental.initialize_tpu_system()\nv = tf." in ported.text
    notes = [note.split(": ")[1] for note in ported.notes]
    assert notes == ["tf.Variable", "tf.VariableAggregation"]


def test_tensorflow_1_names_are_noted():
    program = "import tensorflow.compat.v1 as tf\ns = tf.distribute.get_strategy()\n"
    ported = port.port(program)
    assert ported.text == program
    assert "port the program from TensorFlow 1" in ported.notes[0]


def test_unreadable_file_is_reported(tmp_path, capsys):
    file = tmp_path / "train.py"
    for text in (None, "if", "x = 1"):
        if text:
            file.write_text(text)
        assert main(["port", str(file)]) == (0 if text == "x = 1" else 1)
        printed = capsys.readouterr()
        assert printed.out == ""
        expected = "No name of" if text == "x = 1" else "cannot be read as a Python pr"
        assert expected in printed.err


def test_names_match_package_and_names_table():
    """The sources give the names that the package has, and their deprecation."""
    _, *names = pages.read_names()
    wrong = []
    for row in names:
        if "." in row["name"] and row["kind"] not in ("class", "function"):
            continue
        path = row["name"].split(".")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exists = operator.attrgetter(row["name"])(ks) is not None
        words = {status.word for status in pages.statuses_of(row["name"]).values()}
        found, note = port.look_up_name(path)
        is_deprecated = any(w.category is DeprecationWarning for w in caught)
        if (
            found != exists
            or found != bool(words & {"works", "differs"})
            or ("refused" in words and not note)
            or is_deprecated != ("deprecated" in note)
        ):
            wrong.append((row["name"], words, found, note))
    assert wrong == []
    for name in ("Missing", "experimental.Missing", "experimental.rpc.Missing"):
        expected = False, f"keras_strategy has no `{name}`."
        assert port.look_up_name(name.split(".")) == expected


USES = """\
import tensorflow as tf
from tensorflow import reduce_mean as mean, keras as k

@tf.function
def step(x):
    tf.print(tf.reduce_mean(x), mean(x), tf.math.reduce_sum(x, tf.float32))
    gradients, _ = tf.clip_by_global_norm(x, 1.0)
    y = tf.add_n([tf.nn.relu(x), tf.image.resize(x), tf.random.normal(x)])
    return k.layers.Dense(1)(y), tf.raw_ops.Copy(input=tf.math.log(x).numpy())

data = tf.data.Dataset.range(3)
tf.train.CheckpointManager(tf.train.Checkpoint())
"""
NOTES = {
    "tf.function": "remove it",
    "tf.print": "use `print`",
    "tf.reduce_mean": "use `keras.ops.mean`",
    "tf.math.reduce_sum": "use `keras.ops.sum`",
    "tf.float32": "use 'float32'",
    "tf.clip_by_global_norm": "`global_clipnorm`",
    "tf.add_n": "`sum`",
    "tf.nn.relu": "use `keras.ops.nn.relu`",
    "tf.image.resize": "use `keras.ops.image.resize`",
    "tf.random.normal": "use `keras.random.normal`",
    "tf.keras": "use `import keras`",
    "tf.raw_ops.Copy": "in steps use `keras.ops` or layers",
    "tf.math.log": "use `keras.ops.log`",
    "tf.train.Checkpoint": "`ks.CheckpointManager`",
    "tf.train.CheckpointManager": "`ks.CheckpointManager`",
}


def test_each_remaining_symbol_has_one_note():
    notes = {}
    for note in port.port(USES).notes:
        _, name, text = note.split(": ", 2)
        assert name not in notes
        notes[name] = text
    assert notes.keys() == NOTES.keys()
    assert [name for name, text in NOTES.items() if text not in notes[name]] == []


def test_note_has_all_lines():
    program = "import tensorflow as tf\nf(tf.ones(1),\n  tf.ones(2))\nf(tf.ones(3))\n"
    (note,) = port.port(program).notes
    assert note == "lines 2, 3, 4: tf.ones: On JAX and torch, use `keras.ops.ones`."


def test_replacements_exist():
    texts = [*port._INSTEAD.values(), *port._NOTES.values()]
    names = re.findall(r"`((?:keras|ks)\.[\w.]+)[`(]", " ".join(texts))
    assert len(names) > 20
    for root, *path in (name.split(".") for name in names):
        functools.reduce(getattr, path, {"keras": keras, "ks": ks}[root])
    assert set(port._public_names("keras.ops") or ()) <= set(dir(keras.ops))


def test_port_imports_no_backend(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    code = (
        "import sys; from keras_strategy.commands.cli import main; "
        f"main(['port', {str(tmp_path / 'train.py')!r}]); "
        "print({'keras', 'numpy', 'tensorflow'} & sys.modules.keys())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == "set()"
