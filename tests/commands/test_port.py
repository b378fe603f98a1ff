"""`keras-strategy port`."""

import pytest

from keras_strategy.commands import port
from keras_strategy.commands.cli import main
from tools import tf_distribute_page as table

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
    assert "CommunicationOptions" in notes[0]
    assert "JAX and torch raise an error" in notes[1]
    assert "gRPC" in notes[2]
    assert "tf.function: On JAX and torch, leave it out" in notes[3]
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
    return tf.distribute.get_strategy(), tf.ones(())
def second():
    import tensorflow as tf
    return tf.distribute.MirroredStrategy()
""",
        """\
def first():
    import tensorflow as tf
    import keras_strategy as ks
    return ks.get_strategy(), tf.ones(())
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
    assert "tf.compat.v1.distribute is TensorFlow 1's" in ported.notes[0]


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_notes_match_names_table():
    _, *names = table.record()
    wrong = []
    for row in names:
        if "." in row["name"] and row["kind"] not in ("class", "function"):
            continue
        words = {status.word for status in table.said_of(row["name"]).values()}
        there, note = port.look_up_name(row["name"].split("."))
        if (
            there != bool(words & {"works", "differs"})
            or "refused" in words
            and not note
        ):
            wrong.append((row["name"], words, there, note))
    assert wrong == []
