"""What holds for every test: it has a home of its own, nothing is timed, signals do what they do in
a terminal, and tables lose nothing."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import chromium
from distribution import LongestFirst, in_order
from hypothesis import HealthCheck, settings
from installed import python_with_wheel
from job_server import TOKEN
from started import end_all
from whole_tables import checked

from tuner.emulator.build import unavailable
from tuner.report.terminal.tables import _Sheet
from tuner.searches.joining import AT_IMPORT_OF_RAY

settings.register_profile(
    "tuner",
    # How long an example takes depends on what else the machine does.
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    # The same examples each time where a failure stops everybody; new ones everywhere else.
    derandomize="CI" in os.environ,
)
settings.load_profile("tuner")

# Your own GPU types, profiles and caches decide no test, and no test changes them.
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have that of the process that starts them
    _home = tempfile.TemporaryDirectory(prefix="tuner-home-", ignore_cleanup_errors=True)
    _index = Path("~/.config/pip/pip.conf").expanduser()
    if _index.is_file():  # says where packages come from
        os.environ.setdefault("PIP_CONFIG_FILE", str(_index))
    for _name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME", "TUNER_GPUS"):
        os.environ.pop(_name, None)
    os.environ["HOME"] = _home.name

# Under nohup, or in the background of a script, these are ignored; what is started inherits that.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# More processes than processors train at once: threads of one that wait for each other must sleep.
# Spinning, twenty steps of a tiny model took more than a minute in place of a third of a second.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Ray's clusters ask for a token, which a process reads once: some tests have another home folder.
os.environ["RAY_AUTH_TOKEN"] = TOKEN


# Ray reads this while it is imported: a cluster of its own listens on loopback alone.
os.environ.update(AT_IMPORT_OF_RAY)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are processors: tests wait for Ray, for processes and for disks."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = in_order(items)
    if reason := unavailable():
        for item in items:
            if item.get_closest_marker("emulator"):
                item.add_marker(pytest.mark.skip(reason=str(reason)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LongestFirst | None:
    """What `--dist loadfile` does here."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # by the number of tests, which says little
    return LongestFirst(config, log)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers of this run."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def installed_python(shared_folder: Path) -> Path:
    """A Python that has tuner as people install it."""
    return python_with_wheel(shared_folder)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(shared_folder: Path) -> Iterator[None]:
    """What the tests compile and measure is kept for the tests, in folders that workers share.

    Several runs share the folder that TUNER_TEST_CACHE names.
    """
    shared = Path(os.environ.get("TUNER_TEST_CACHE") or shared_folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNER_CACHE", str(shared / "timelines"))
        # What a processor computes is measured once, for the tests too.
        patch.setenv("TUNER_PROFILES", str(shared / "profiles"))
        # Where there is a CUDA build of PyTorch, each search would train once more.
        patch.setenv("TUNER_VERIFY", "no")
        yield


@pytest.fixture(autouse=True, scope="session")
def _tables_are_whole() -> Iterator[None]:
    """Every table that a test prints is looked at in a narrow, a usual and a wide terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Sheet, "__rich_console__", checked)
        yield


@pytest.fixture(autouse=True)
def _nothing_outlives_its_test() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for one another on a busy machine turn milliseconds into seconds."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    with chromium() as opened:
        yield opened
