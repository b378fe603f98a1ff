"""What the benchmark of memory reads of a compiled program."""

from benchmarks.memory import collectives

PROGRAM = """
  %r = (f32[4,8]{1,0}, f32[8]{0}) all-reduce(f32[4,8] %a, f32[8] %b), channel_id=1
  %g = bf16[16,8]{1,0} all-gather(bf16[4,8] %c), dimensions={0}
  %s = f32[2]{0} reduce-scatter(f32[8] %d), dimensions={0}
  %x = f32[8]{0} add(f32[8] %all-gather.1, f32[8] %b)
"""


def test_bytes_sent_per_device():
    assert collectives(PROGRAM, 4) == {
        "all-reduce": (1, 2 * 3 / 4 * 4 * (32 + 8)),
        "all-gather": (1, 3 / 4 * 2 * 128),
        "reduce-scatter": (1, 3 * 4 * 2),
    }


def test_one_device_sends_nothing():
    assert collectives("%x = f32[8]{0} add(f32[8] %a, f32[8] %b)", 1) == {}
