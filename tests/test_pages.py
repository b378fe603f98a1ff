"""Every block of code of the documentation runs, or is read by what it is for."""

import ast
import collections
import datetime
import importlib.util
import json
import logging
import os
import pathlib
import re
import shlex
import socket
import subprocess
import symtable
import types

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.audit import policy
from keras_strategy.cluster import process_exit, rendezvous, watchdog
from keras_strategy.commands import cli, launcher, worker_checks
from tests.pages import Block, blocks_of, sides_of
from tools import measurements, pages, pictures

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {path.stem: path for path in (ROOT / "docs").glob("*.md")}
PAGES |= {name: ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING")}
BLOCKS = {name: blocks_of(path.read_text()) for name, path in PAGES.items()}
BACKEND = keras.backend.backend()
ON_TORCH = pytest.mark.skipif(BACKEND != "torch", reason="the same on every backend")

# What a launcher tells of a cluster: pages set it.
OF_LAUNCHERS = ("TF_CONFIG", "RANK", "WORLD_SIZE", "SLURM_", "OMPI_", "TPU_", "TORCH")


def in_language(*languages: str) -> list:
    return [
        pytest.param(block, id=f"{name}-{block.line}")
        for name, blocks in BLOCKS.items()
        for block in blocks
        if block.language in languages and block.reason is None
    ]


def runs_here(block: Block) -> bool:
    return (
        block.reason is None
        and not block.alone  # tests/test_examples.py
        and (not block.backends or BACKEND in block.backends)
        and (block.peer is None or importlib.util.find_spec(block.peer) is not None)
    )


@pytest.fixture
def as_it_was(monkeypatch, tmp_path):
    """Programs write into a folder of their own; variables, modes and logs end."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith(OF_LAUNCHERS)]:
        monkeypatch.delenv(name)
    before, root = dict(os.environ), logging.root
    level, handlers = root.level, [*root.handlers]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    os.environ.clear()
    os.environ.update(before)
    ks.config.check_mirrored(False)
    ks.config.exact_random(True)


def start_as_one_process(monkeypatch):
    """Variables that torchrun sets for the only process of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}
    for name, value in {**told, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))


WITH_PYTHON = [
    name
    for name, blocks in BLOCKS.items()
    if any(b.language == "python" and not (b.reason or b.alone) for b in blocks)
]


@pytest.mark.full
@pytest.mark.parametrize("name", WITH_PYTHON)
def test_page_code_runs(name, as_it_was, monkeypatch):
    program = {"__name__": "page"}
    for block in BLOCKS[name]:
        if block.language != "python" or not runs_here(block):
            continue
        # Lines are those of the page.
        code = "\n" * (block.line - 1) + block.code
        with monkeypatch.context() as told:
            if block.peer:
                start_as_one_process(told)
            exec(compile(code, f"<{name}.md>", "exec"), program)


@pytest.mark.full
@pytest.mark.parametrize("block", in_language("diff"))
def test_changed_program_trains_as_before(block, as_it_was):
    if not runs_here(block):
        pytest.skip("for other backends, or a missing package")
    before, after = {}, {}
    for names, code in zip((before, after), sides_of(block.code), strict=True):
        exec(compile(code, f"<line {block.line}>", "exec"), names)
    assert after["strategy"].num_replicas_in_sync > 1
    one, several = (names["model"].get_weights() for names in (before, after))
    for value, other in zip(one, several, strict=True):
        np.testing.assert_allclose(other, value, atol=1e-4)


@pytest.mark.full(keep_on="torch")
def test_metric_of_custom_loop_sees_every_batch(as_it_was):
    names, end = {"counts": []}, "mean_loss.reset_state()"
    count = f"counts.append(int(mean_loss.count)); {end}"
    for block in BLOCKS["custom_loops"]:
        exec(block.code.replace(end, count), names)
        if end in block.code:
            break
    assert names["counts"] == [len(names["batches"])] * 3


@ON_TORCH
def test_quickstart_shows_first_diff_in_full():
    blocks = BLOCKS["quickstart"]
    diff = next(block for block in blocks if block.language == "diff")
    program = next(block for block in blocks if block.alone)
    without_numbers = re.sub(
        r"  # [23]$|(?<=# )1: ", "", sides_of(diff.code)[1], flags=re.M
    )
    assert program.code == without_numbers


def test_page_marks_name_known_backends():
    backends = {
        backend
        for blocks in BLOCKS.values()
        for block in blocks
        for backend in block.backends
    }
    assert backends <= {"jax", "torch", "tensorflow"}


def symbols_of(code: str) -> tuple[set[str], set[str]]:
    """Return the global names that a block binds, and those that it needs."""
    tables = [symtable.symtable(code, "page", "exec")]
    bound = {s.get_name() for s in tables[0].get_symbols() if s.is_local()}
    needed = set()
    for table in tables:
        needed |= {s.get_name() for s in table.get_symbols() if s.is_global()}
        tables += table.get_children()
    return bound, needed - bound


@ON_TORCH
@pytest.mark.parametrize("name", WITH_PYTHON)
def test_shown_code_needs_no_hidden_name(name):
    shown, hidden, missing = set(), set(), set()
    for block in BLOCKS[name]:
        if block.language == "python":
            bound, needed = symbols_of(block.code)
            if not block.is_hidden:
                missing |= needed & hidden - shown
            (hidden if block.is_hidden else shown).update(bound)
    assert not missing


@ON_TORCH
@pytest.mark.parametrize("name", WITH_PYTHON)
def test_training_steps_pass_training(name):
    """Without it, a layer such as Dropout does nothing in a custom loop."""
    differentiates = re.compile(r"value_and_grad|\bbackward\(|Tape\(")
    blocks = [block for block in BLOCKS[name] if block.language == "python"]
    models = {"model", "ddp"}
    for target, value in re.findall(r"^ *([\w, ]+) = (.*)$", text_of(blocks), re.M):
        if re.search(r"\b(?:Sequential|Dense)\(", value):
            models |= set(re.findall(r"\w+", target))
    for block in blocks:
        if differentiates.search(block.code):
            for node in ast.walk(ast.parse(block.code)):
                match node:
                    case ast.Call(func=ast.Name(id=called)) if called in models:
                        line = block.line + node.lineno - 1
                        assert "training" in [k.arg for k in node.keywords], line


def text_of(blocks: list[Block]) -> str:
    return "\n".join(block.code for block in blocks)


@ON_TORCH
def test_quoted_speeds_are_measured():
    measured = PAGES["benchmarks"].read_text().partition("<!-- end of in short -->")[0]
    for name, path in PAGES.items():
        text = path.read_text()
        for quoted in re.findall(r"\[([^]]*)\]\([^)]*benchmarks\.md#in-short", text):
            for figures in re.findall(r"[\d.]+\s+to\s+[\d.]+", quoted):
                assert f" {' '.join(figures.split())} " in measured, name


@ON_TORCH
def test_quoted_scores_are_measured():
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in PAGES["conformance"].read_text().splitlines()
        if re.match(r"\| .* of (?:79|80|81) \|", line)
    ]
    cells = {cell for row in rows for cell in row}
    scores = {row[0]: row[1:] for row in rows}
    for name, path in PAGES.items():
        for quoted in re.findall(r"\b\d+\s+of\s+(?:79|80|81)\b", path.read_text()):
            assert " ".join(quoted.split()) in cells, name
    systems = "Keras DataParallel, JAX", "Keras 3.16 DataParallel, torch"
    peers = [scores[name] for name in (*systems, "tf.distribute, TensorFlow")]
    ours = [scores[f"keras_strategy, {on}"][0] for on in ("JAX", "torch", "TensorFlow")]
    readme = PAGES["README"].read_text()
    for cells in ours, [row[0] for row in peers], [row[2] for row in peers]:
        assert f"| {' | '.join(cells)} |" in readme


@ON_TORCH
def test_quoted_faults_are_measured():
    rows = re.findall(r"^\| .* s \(\d+\) \|.*$", PAGES["faults"].read_text(), re.M)
    (killed,) = [row for row in rows if row.startswith("| SIGKILL ")]
    slowest = max(re.findall(r"([\d.]+) s \(", killed), key=float)
    count = sum(map(int, re.findall(r" s \((\d+)\) \|", "".join(rows))))
    home = " ".join(PAGES["index"].read_text().split())
    assert f"{count} faults were injected" in home
    assert f"After SIGKILL of one worker the others end within {slowest} second" in home


# Pages that a program writes, and the record of whole runs of the tests.
GENERATED = {"benchmarks", "benchmarks_history", "conformance", "equality", "errors"}
GENERATED |= {"errors_without_a_fix", "faults", "gallery", "patches", "ports"}
GENERATED |= {"tf_distribute", "versions"}
FIGURE = re.compile(
    r"(?<![\w.])\d[\d.,]*(?: to \d[\d.,]*)?\s"
    r"(?:s|ms|us|min|hours?|seconds?|minutes?|[kMG]i?B|%|times)(?![\w/])"
    r"|(?<![\w.])[01]\.\d\d(?![\w.]*\d)|\de-\d\d|\b\d,\d{3}\b"
)
NOT_MEASURED = re.compile(
    r"^ *```.*?^ *```$|`[^`]*`|\[[^]]*\]\([^)]*\)|<!--.*?-->"  # code, links
    r"|(?:Keras|Python|JAX|torch|TensorFlow|[Ww]andb|Ray|mlflow|\]) \(?\d\S*"
    r"(?:(?:, | to | and )\d\S*)*",
    re.MULTILINE | re.DOTALL,
)


@ON_TORCH
@pytest.mark.parametrize("name", sorted({*PAGES} - GENERATED - {"CONTRIBUTING"}))
def test_measured_figures_have_a_source(name, monkeypatch):
    """Figures stand in measured tables, link to generated pages, or are constants."""
    from keras_strategy.backends.torch import compilation, sharding

    page = PAGES[name].read_text()
    monkeypatch.delenv(rendezvous.TIMEOUT_VARIABLE, raising=False)
    slow, left = watchdog.SLOW_OPERATION_SECONDS, watchdog.LEFT_SECONDS
    set_by_code = {
        f"{rendezvous.default_timeout_seconds():.0f} seconds",
        *(f"{slow:.0f} s", f"{slow:.0f} seconds", f"{left:.0f} seconds"),
        f"{policy.MAX_SHARDED_BYTES / 1e6:.0f} MB",
        f"{sharding.UNIT_BYTES >> 20} MiB",
        f"{compilation.MAX_GRAPHS} times",
        f"{launcher.FIRST_WAIT_SECONDS:.0f} second",
        f"{worker_checks.TIMEOUT_SECONDS:.0f} seconds",
    }
    # Shared memory of a container, of Docker; a time limit that the page itself sets.
    given = {"64 MiB", *(f"{n} seconds" for n in re.findall(r"TERM@(\d+)", page))}
    quoted = {"index": {"0.2 seconds"}}.get(
        name, set()
    )  # test_quoted_faults_are_measured
    text = NOT_MEASURED.sub("", measurements.MEASURED.sub("", page))
    found = [" ".join(figure.split()) for figure in FIGURE.findall(text)]
    assert not set(found) - set_by_code - given - quoted


@ON_TORCH
def test_measured_tables_are_repeated(tmp_path):
    mark = "*Measured by `{}` on {}, commit {}.*"
    program = "python -c 'print(\"a log\\n| a |\\n| --- |\\n| {} |\")'"
    old = [
        f"| old |\n\n{mark.format(program.format(n), '2026-01-01', '0' * 8)}"
        for n in "12"
    ]
    page = tmp_path / "page.md"
    page.write_text("\n\n".join(["Text.", *old]))
    measurements.repeat(page, "1 |", "1" * 8)
    again = mark.format(program.format(1), datetime.date.today(), "1" * 8)
    table = "| a |\n| --- |\n| 1 |"
    assert page.read_text() == "\n\n".join(["Text.", table, again, old[1]])


@ON_TORCH
def test_quoted_scaling_follows_from_its_table():
    text = PAGES["scaling"].read_text().partition("## Checked on this machine")[2]
    found = re.findall(r"\| 1 \| ([\d.]+) \|.*\n\|.*\| 2 \| ([\d.]+)", text)
    rates = [f"{2 * float(one) / float(two):.2f}" for one, two in found]
    for name, path in PAGES.items():
        for quoted in re.findall(
            r"\[([^]]*)\]\([^)]*#checked-on-this-m", path.read_text()
        ):
            assert re.findall(r"\d\.\d+", quoted) == rates, name


@ON_TORCH
@pytest.mark.parametrize("block", in_language("bash", "shell"))
def test_shell_block_runs(block, capsys):
    """It is of the shell's grammar; our command, make and torchrun know its words."""
    read = subprocess.run(["bash", "-n"], input=block.code, text=True, check=False)
    assert read.returncode == 0
    for line in commands_of(block.code):
        words = collections.deque(line)
        while words and "=" in words[0]:
            words.popleft()  # variables
        match words.popleft() if words else None:
            case "keras-strategy":
                cli._parser().parse_args(list(words))
            case "make":
                (target, *_) = [word for word in words if "=" not in word]
                assert f"\n{target}:" in (ROOT / "Makefile").read_text()
            case "torchrun":
                from torch.distributed.run import get_args_parser

                get_args_parser().parse_args(list(words))
            case "python":
                of_python(list(words))


def commands_of(code: str):
    """The words of each command; quotes may go over several lines."""
    lines = ""
    for line in code.replace("\\\n", " ").splitlines(keepends=True):
        lines += line
        try:
            yield shlex.split(lines, comments=True)
        except ValueError:  # a quote is open
            continue
        lines = ""
    assert not lines


def of_python(words):
    """The file or the module is there."""
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None
    elif words[0] != "train.py":
        assert (ROOT / words[0]).exists()


@ON_TORCH
@pytest.mark.parametrize("block", in_language("json"))
def test_json_block_is_valid(block):
    json.loads(block.code)


@ON_TORCH
@pytest.mark.parametrize("block", in_language("yaml"))
def test_yaml_block_is_valid(block):
    yaml = pytest.importorskip("yaml")
    for document in yaml.safe_load_all(block.code):
        assert {"apiVersion", "kind", "metadata"} <= set(document)


@ON_TORCH
def test_page_of_evidence_has_the_measured_score():
    lines = (ROOT / "docs" / "conformance.tsv").read_text().splitlines()[1:]
    cells = [line.split("\t")[:5] for line in lines]
    columns = []
    for backend in ("jax", "torch", "tensorflow"):
        system = f"keras_strategy-{backend}"
        counts = collections.Counter(
            outcome
            for name, _, replicas, rows, outcome in cells
            if (name, replicas, rows) == (system, "2", "uneven") and outcome != "–"
        )
        equal = sum(counts[outcome] for outcome in ("equal", "gathered", "whole"))
        columns.append((f"{equal} of {counts.total()}", str(counts["equal"])))
    page = PAGES["evidence"].read_text()
    for name, *found in zip(("equal one device", "of these"), *columns, strict=True):
        cells = " | ".join(found)
        assert re.search(rf"^\| {name}.* {re.escape(f'| {cells} |')}$", page, re.M)


@ON_TORCH
def test_page_of_workers_lists_all_variables_and_exit_codes():
    page = PAGES["workers"].read_text()
    sources = (path.read_text() for path in (ROOT / "keras_strategy").rglob("*.py"))
    variable = r"KERAS_STRATEGY_[A-Z_]*[A-Z]\b"
    read = {name for source in sources for name in re.findall(variable, source)}
    assert set(re.findall(rf"^\| `({variable})` \|", page, re.MULTILINE)) == read
    codes = {c for n, c in vars(process_exit).items() if n.startswith("EXIT_")}
    assert codes <= set(map(int, re.findall(r"^\| (\d+) \|", page, re.MULTILINE)))


@ON_TORCH
def test_drawings_are_current():
    for name, draw in pictures.DRAWINGS.items():
        assert (ROOT / "docs" / "images" / f"{name}.svg").read_text() == draw(), (
            "run `make pictures`"
        )


@ON_TORCH
def test_table_lines_break_between_words():
    cell = "<td>1e-07 <code>test_inputs.py::test_pandas</code> <code>short</code></td>"
    assert pages.on_page_content(f"<p>1e-07</p>{cell}") == (
        '<p>1e-07</p><td><span class="number">1e-07</span> <code>test_<wbr>inputs.<wbr>'
        "py::<wbr>test_<wbr>pandas</code> <code>short</code></td>"
    )


@ON_TORCH
def test_gallery_shows_its_programs():
    here = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="gallery.md"))
    shown = pages.on_page_markdown(PAGES["gallery"].read_text(), page=here)
    programs = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert {p for p in programs if f'??? example "examples/{p}"' in shown} == programs


@ON_TORCH
def test_reference_begins_with_a_summary():
    pytest.importorskip("griffe")
    here = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="api.md"))
    shown = pages.on_page_markdown(PAGES["api"].read_text(), page=here)
    rows = re.findall(r"^\| \[`(.+)`\]\(#keras_strategy\.\1\) \| (.+) \|$", shown, re.M)
    assert dict(rows)["launch"] == pages.first_paragraph(ks.launch.__doc__)
    assert len(rows) == shown.count("\n::: ")
