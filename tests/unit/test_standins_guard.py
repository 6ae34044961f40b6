"""Nothing that a program does while it is read reaches files, processes or the network."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.started import run_python
from tests.unit.test_emulator_files import HEAD, MODULES, NEEDS_PYTHON, WAYS, make_files, state

ROOT = Path(__file__).parents[2]

DRIVER = """
import json, os, sys
work = json.load(sys.stdin)
for name in work["modules"]:
    __import__(name)
from tuner.program.standins import guard
for one in work["ways"]:
    pid = os.fork()
    if not pid:
        out = os.open(one["result"], os.O_WRONLY | os.O_CREAT, 0o666)
        os.chdir(one["folder"])
        if one["owner"]:
            os.setgroups([]); os.setgid(one["owner"]); os.setuid(one["owner"])
        sys.path.insert(0, one["folder"])
        guard.watch(8, 2**40, lambda *ended: guard.leave(3))
        guard.install(one)
        ended = ""
        try:
            exec(compile(one["code"], one["folder"] + "/x.py", "exec"), {"__name__": "__main__"})
        except BaseException as error:
            ended = type(error).__name__ + ": " + str(error)
        os.write(out, json.dumps([ended, guard.DROPPED]).encode())
        guard.leave(0)
    os.waitpid(pid, 0)
"""

NOT_STARTED = {
    "os.system": "FileNotFoundError",
    **dict.fromkeys(("subprocess", "subprocess without environment", "env -i"), "AssertionError"),
    "shell tools": "AssertionError",
    **dict.fromkeys(("spawn to a file", "worker", "hard link", "sqlite", "sqlite new"), "Refused"),
    **dict.fromkeys(("dir_fd", "scandir of a descriptor"), "Refused"),
    **{name: "Refused" for name, way in WAYS.items() if "ctypes" in way},
    **dict.fromkeys(("safetensors", "tokenizers"), "ImportError"),
    "a socket": "OSError",
}
"""Ways through another program or native code: they don't happen, and the program sees that."""

PROCESSES = {
    "run": ("assert subprocess.run(['touch', 'ran'], check=True).returncode == 0", ""),
    "check_output": ("assert subprocess.check_output('touch ran', shell=True) == b''", ""),
    "Popen": (
        "p = subprocess.Popen(['touch', 'ran'], stdout=-1, stderr=-1)\n"
        "assert p.communicate() == (b'', b'') and p.wait() == 0 and p.poll() == 0",
        "",
    ),
    "popen": ("assert os.popen('touch ran').read() == ''", ""),
    "getoutput": ("assert subprocess.getoutput('touch ran') == ''", ""),
    "os.system": ("assert os.system('touch ran') == 0", ""),
    "execv": ("os.execv('/bin/touch', ['touch', 'ran'])", "SystemExit: 0"),
    "execlp": ("os.execlp('touch', 'touch', 'ran')", "SystemExit: 0"),
    "spawnl": ("os.spawnl(os.P_WAIT, '/bin/touch', 'touch', 'ran')", "Refused"),
    "spawnvp": ("os.waitpid(os.spawnvp(os.P_NOWAIT, 'touch', ['touch', 'ran']), 0)", "Refused"),
    "posix_spawn": ("os.posix_spawn('/bin/touch', ['touch', 'ran'], {})", "Refused"),
    "fork": ("if not os.fork(): open('ran', 'w')", "Refused"),
    "forkpty": ("os.forkpty()", "Refused"),
    "pty": ("import pty; pty.spawn(['touch', 'ran'])", "Refused"),
    "fork_exec": (
        "import _posixsubprocess as p\n"
        "p.fork_exec([b'touch', b'ran'], [b'/bin/touch'], True, (), None, None,"
        " -1, -1, -1, -1, -1, -1, -1, -1, True, False, 0, None, None, None, -1, None)",
        "Refused",
    ),
    "asyncio": (
        "import asyncio\n"
        "async def f(): await asyncio.sleep(0); return 7\n"
        "assert asyncio.run(f()) == 7",
        "",
    ),
    "Process": (
        "import multiprocessing as m\n"
        "p = m.Process(target=open, args=('ran', 'w')); p.start(); p.join()\n"
        "assert p.exitcode == 0 and os.path.exists('ran')",
        "",
    ),
    "Pool": (
        "import multiprocessing as m\n"
        "with m.get_context('spawn').Pool(2) as p: assert p.map(abs, [-1, 2]) == [1, 2]",
        "",
    ),
    "Queue": (
        "import multiprocessing as m\n"
        "q = m.Queue(); p = m.get_context('fork').Process(target=lambda: q.put(3))\n"
        "p.start(); assert q.get() == 3",
        "",
    ),
    "ProcessPoolExecutor": (
        "from concurrent.futures import ProcessPoolExecutor\n"
        "with ProcessPoolExecutor(2) as e: assert list(e.map(lambda x: x + 1, [1, 2])) == [2, 3]",
        "",
    ),
    "kill": ("os.kill(VICTIM, 9)", ""),
    "killpg": ("os.killpg(VICTIM, 9)", ""),
    "pidfd": ("import signal; signal.pidfd_send_signal(os.pidfd_open(VICTIM), 9)", "OSError"),
    "setpriority": ("os.setpriority(os.PRIO_PROCESS, VICTIM, 19)", ""),
    "prlimit": ("import resource; resource.prlimit(VICTIM, 7, (9, 9))", "Refused"),
    "kill itself": ("import signal; os.kill(os.getpid(), signal.SIGTERM)", "SystemExit: 143"),
    "_exit": ("os._exit(5)", "SystemExit: 5"),
    "abort": ("os.abort()", "SystemExit: 134"),
    "connect": ("import socket; socket.socket().connect(('127.0.0.1', PORT))", "OSError"),
    "connect_ex": ("import socket; socket.socket().connect_ex(('127.0.0.1', PORT))", "OSError"),
    "create_connection": ("import socket; socket.create_connection(('', PORT))", "OSError"),
    "_socket": ("import _socket; _socket.socket().connect(('127.0.0.1', PORT))", "OSError"),
    "urlopen": ("import urllib.request as u; u.urlopen('http://127.0.0.1:PORT')", "URLError"),
    "getaddrinfo": ("import socket; socket.getaddrinfo('huggingface.co', 443)", "OSError"),
    "gethostbyname": ("import socket; socket.gethostbyname('localhost')", "OSError"),
    "sendto": ("import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', PORT))", "OSError"),
    "a free port": (
        "import socket\n"
        "s = socket.socket(); s.bind(('', 0)); s.listen(); assert s.getsockname()[1] == 0",
        "",
    ),
    "syslog": ("import syslog; syslog.syslog('x')", "Refused"),
    "browser": ("import webbrowser; webbrowser.open('http://127.0.0.1:PORT')", ""),
    "input": ("input()", "EOFError"),
    "getpass": ("import getpass; getpass.getpass()", "EOFError"),
    "posix": ("import posix; posix.unlink('file'); assert not os.path.exists('file')", ""),
    "extension": (
        "import importlib, sysconfig\n"
        "name = [n for n in os.listdir(FOLDER) if n.startswith('_bisect')][0]\n"
        "shutil.copy(os.path.join(FOLDER, name), name)\n"
        "import importlib.machinery as m, importlib.util as u\n"
        "s = u.spec_from_file_location('own', os.path.abspath(name))\n"
        "u.module_from_spec(s)",
        "Refused",
    ),
    "a link that is changed": (
        "os.symlink('file', 'l'); os.utime('l', (1, 1), follow_symlinks=False); os.chmod('l', 0)",
        "",
    ),
    "a folder by its descriptor": ("os.chdir(os.open('out', os.O_RDONLY))", "Refused"),
    "a module of its own": (
        "open('written.py', 'w').write('x = 3'); import written; assert written.x == 3",
        "",
    ),
    "shelve": (
        "import shelve\nwith shelve.open('s') as s: s['a'] = 1\n"
        "with shelve.open('s') as s: assert s['a'] == 1",
        "",
    ),
    "attach": (
        "import sqlite3; sqlite3.connect(':memory:').execute(\"attach 'other.db' as o\")",
        "Refused",
    ),
    "token": ("assert os.environ['HF_TOKEN'] and 'WANDB_API_KEY' not in os.environ", ""),
    "no token": ("os.environ['RANK']", "KeyError"),
    "given": ("assert open('given.yaml').read() == 'a: 2'; import given; assert given.x == 2", ""),
    "given listed": ("assert 'given.py' in os.listdir() and os.path.getsize('given.py') == 5", ""),
}  # fmt: skip
"""A program, and how it ends."""


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        Path(made, "mine").mkdir()
        make_files(Path(made, "mine"))
        yield Path(made, "mine")


@pytest.fixture(scope="module")
def goes(template: Path) -> Iterator[Callable[..., Any]]:
    """Goes many ways from one process; each in a folder of its own, which must stay as it is."""
    victim = subprocess.Popen(["sleep", "600"], start_new_session=True)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0)
    modules = [*MODULES.split(), "pathlib", "shutil", "subprocess"]
    names = {
        "VICTIM": str(victim.pid),
        "PORT": str(listener.getsockname()[1]),
        "FOLDER": repr(str(Path(os.__file__).with_name("lib-dynload"))),
    }

    def go(ways: dict[str, str], owner: int = 0) -> dict[str, tuple[str, list[Any]]]:
        with tempfile.TemporaryDirectory() as made:
            Path(made).chmod(0o755)
            work, before = [], {}
            for number, (name, code) in enumerate(ways.items()):
                way = re.sub("VICTIM|PORT|FOLDER", lambda word: names[word[0]], code)
                folder, scratch = Path(made, f"{number}/mine"), Path(made, f"{number}/scratch")
                shutil.copytree(template, folder, symlinks=True)
                scratch.mkdir()
                for path in (folder.parent, *folder.parent.rglob("*")):
                    os.chown(path, owner or os.getuid(), -1, follow_symlinks=False)
                before[name] = state(folder)
                work.append(
                    {
                        "code": HEAD + way,
                        "folder": str(folder),
                        "scratch": str(scratch),
                        "result": str(folder.parent / "result"),
                        "owner": owner,
                        "memory_bytes": 2**34,
                        "files": {
                            str(folder / "given.yaml"): "a: 2",
                            str(folder / "given.py"): "x = 2",
                        },
                    }
                )
            environment = {
                **{k: v for k, v in os.environ.items() if "TOKEN" not in k and "KEY" not in k},
                "PYTHONPATH": str(ROOT),
                "TMPDIR": made,
            }
            done = run_python(
                "-P",
                "-c",
                DRIVER,
                input=json.dumps({"ways": work, "modules": modules if owner else []}),
                env=environment,
            )
            assert done.returncode == 0, done.stderr
            found = {}
            for (name, there), one in zip(before.items(), work, strict=True):
                assert state(Path(one["folder"])) == there, name
                result = Path(one["result"]).read_text()
                found[name] = json.loads(result or '["no end", []]')
            return found

    yield go
    assert victim.poll() is None
    with pytest.raises(BlockingIOError):  # nobody has called
        listener.accept()
    victim.send_signal(signal.SIGKILL)
    victim.wait()


def assert_ends(found: dict[str, Any], expected: dict[str, str]) -> None:
    wrong = {
        name: (ended, expected[name])
        for name, (ended, _) in found.items()
        if (not ended.startswith(expected[name]) if expected[name] else ended)
    }
    assert not wrong


FILES = {name: way for name, way in WAYS.items() if name != "parquet"}  # needs a library
"""Ways to change files."""


def test_no_way_reaches_real_files_and_all_are_read_back(goes):
    assert_ends(goes(FILES), {name: NOT_STARTED.get(name, "") for name in FILES})


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_the_same_as_an_ordinary_user(goes):
    # numpy, which is imported before here, keeps the real `open` for savetxt: that is refused.
    without = NEEDS_PYTHON | {"safetensors", "savetxt"}
    ways = {name: way for name, way in FILES.items() if name not in without}
    assert_ends(goes(ways, 65534), {name: NOT_STARTED.get(name, "") for name in ways})


def test_no_other_process_and_no_network_is_reached(goes):
    found = goes({name: way for name, (way, _) in PROCESSES.items()})
    assert_ends(found, {name: ended for name, (_, ended) in PROCESSES.items()})
    assert [found[name][1][0]["what"] for name in ("run", "os.system", "kill")] == [
        "subprocess: ['touch', 'ran']",
        "os.system('touch ran')",
        found["kill"][1][0]["what"],
    ]
    assert found["run"][1][0]["where"]["line"] == HEAD.count("\n") + 1


def test_what_the_user_may_not_change_is_no_exception(goes):
    """A file without permission to write can't be written here either."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody else")
    ways = {
        "content": "os.chmod('file', 0o400); open('file', 'w')",
        "system": "open('/etc/hostname', 'a')",
        "new": "open('/usr/new', 'w')",
        "removed": "os.remove('/etc/hostname')",
        "moved": "os.rename('/etc/hostname', 'mine')",
    }
    found = goes(ways, 65534)
    assert_ends(found, dict.fromkeys(ways, "PermissionError"))


def test_time_and_memory_are_limited(tmp_path):
    code = (
        "import json, os, sys, time; from tuner.program.standins import guard\n"
        "guard.watch(float(sys.argv[2]), 2**40, lambda *ended: (print(json.dumps(ended),"
        " flush=True), guard.leave(0)))\n"
        "guard.install({'scratch': sys.argv[1], 'memory_bytes': 2**26})\n"
        "exec(compile(sys.argv[3], '/x/train.py', 'exec'))"
    )

    def run(seconds: float, way: str) -> subprocess.CompletedProcess[str]:
        return run_python("-c", code, str(tmp_path), str(seconds), way, cwd=ROOT)

    began = time.monotonic()
    kind, where = json.loads(run(0.3, "\nwhile True:\n    pass").stdout)
    assert kind == "time"
    assert where["file"] == "/x/train.py"
    assert where["line"] in (2, 3)
    assert time.monotonic() - began < 10
    if sys.platform == "linux":
        assert "MemoryError" in run(20, "x = bytearray(2**29)").stderr
