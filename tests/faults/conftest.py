"""`--faults N` plants N faults at random, of `--seed S`; without it, a sample."""

import random


def pytest_addoption(parser):
    parser.addoption("--faults", type=int, default=0, help="how many, at random")
    seed = random.SystemRandom().randrange(1_000_000)
    parser.addoption("--seed", type=int, default=seed, help="what they are drawn by")


def pytest_report_header(config):
    return f"faults: --seed {config.getoption('seed')}"
