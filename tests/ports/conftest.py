"""`--ports all` runs every port on 2 and 3 replicas; without it, a sample on 2."""


def pytest_addoption(parser):
    parser.addoption("--ports", choices=("sample", "all"), default="sample")
