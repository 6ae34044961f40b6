"""Nothing that an emulated program does to files reaches the person's: tuner/emulator/device/files.c."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from started import run_python

from tuner.emulator.build import SOURCES, find_compiler

WAYS = {
    "open w": "open('file', 'w').write('x'); assert open('file').read() == 'x'",
    "open new": "open('new', 'w').write('x'); assert 'new' in os.listdir() and os.path.exists('new')",
    "open a": "open('file', 'a').write('x'); assert open('file').read() == 'MINEx'",
    "open r+": "f = open('file', 'r+'); f.write('YO'); f.close(); assert open('file').read() == 'YONE'",
    "open x": "open('new', 'x').write('x')",
    "open x there": "import contextlib\nwith contextlib.suppress(FileExistsError): open('file', 'x'); assert 0",
    "FileIO": "io.FileIO('file', 'w').write(b'x'); assert open('file').read() == 'x'",
    "os.open": "fd = os.open('file', os.O_WRONLY | os.O_TRUNC); os.write(fd, b'x'); os.close(fd)",
    "os.open creat": "os.close(os.open('new', os.O_CREAT | os.O_RDWR)); assert os.stat('new').st_size == 0",
    "dir_fd": "d = os.open('.', os.O_RDONLY); fd = os.open('file', os.O_WRONLY, dir_fd=d); os.write(fd, b'x'); os.unlink('out/a', dir_fd=d)",
    "write_text": "Path('file').write_text('x'); assert Path('file').read_text() == 'x'",
    "touch": "Path('file').touch(); Path('new').touch()",
    "pathlib unlink": "Path('file').unlink(); assert not Path('file').exists()",
    "remove": "os.remove('file'); assert 'file' not in os.listdir(); assert not os.path.exists('file')",
    "removed and made": "os.remove('file'); open('file', 'w').write('x'); assert open('file').read() == 'x'",
    "from os import": "from os import remove, rename, replace; remove('file'); rename('link', 'other'); replace('out/a', 'out/b')",
    "rmtree": "from shutil import rmtree; rmtree('out'); assert not os.path.isdir('out')",
    "rmtree and made": "shutil.rmtree('out'); os.mkdir('out'); assert os.listdir('out') == []",
    "rmtree link": "os.unlink('link'); assert not os.path.lexists('link')",
    "rmdir": "os.rmdir('empty'); assert 'empty' not in os.listdir()",
    "rmdir full": "import contextlib\nwith contextlib.suppress(OSError): os.rmdir('out'); assert 0",
    "removedirs": "os.removedirs('empty')",
    "rename": "os.rename('file', 'new'); assert open('new').read() == 'MINE'; assert not os.path.exists('file')",
    "rename over": "os.rename('out/a', 'file'); assert open('file').read() == 'A'",
    "replace": "open('t', 'w').write('x'); os.replace('t', 'file'); assert open('file').read() == 'x'",
    "rename folder": "os.rename('out', 'moved'); assert sorted(os.listdir('moved')) == ['a', 'deep']; assert open('moved/deep/b').read() == 'B'; assert not os.path.exists('out')",
    "rename of changed": "os.remove('out/a'); os.rename('out', 'moved'); assert os.listdir('moved') == ['deep']",
    "shutil.move": "shutil.move('out', 'moved'); assert open('moved/a').read() == 'A'",
    "copyfile": "shutil.copyfile('out/a', 'file'); assert open('file').read() == 'A'",
    "copy2": "shutil.copy2('out/a', 'new'); assert open('new').read() == 'A'",
    "copytree": "shutil.copytree('out', 'again'); assert open('again/deep/b').read() == 'B'",
    "mkdir": "os.mkdir('made'); assert os.path.isdir('made'); open('made/x', 'w').write('x')",
    "makedirs": "os.makedirs('made/in/it'); assert os.listdir('made') == ['in']",
    "mkdir there": "import contextlib\nwith contextlib.suppress(FileExistsError): os.mkdir('out'); assert 0",
    "symlink": "os.symlink('file', 'new'); assert os.readlink('new') == 'file'; assert open('new').read() == 'MINE'",
    "hard link": "os.link('file', 'new'); open('new', 'w').write('x'); assert open('file').read() == 'x'",
    "through a link": "open('link', 'w').write('x'); assert open('file').read() == 'x'; assert os.path.islink('link')",
    "through a linked folder": "open('linked/a', 'w').write('x'); assert open('out/a').read() == 'x'",
    "chmod": "os.chmod('file', 0o600); assert os.stat('file').st_mode & 0o777 == 0o600",
    "fchmod": "fd = os.open('file', os.O_RDONLY); os.fchmod(fd, 0o600)",
    "chown": "os.chown('file', os.getuid(), os.getgid())",
    "utime": "os.utime('file', (1, 1)); assert os.stat('file').st_mtime == 1",
    "utime of a descriptor": "fd = os.open('file', os.O_RDONLY); os.utime(fd, (1, 1))",
    "truncate": "os.truncate('file', 1); assert open('file').read() == 'M'",
    "ftruncate": "f = open('file', 'r+'); f.truncate(0)",
    "mkfifo": "os.mkfifo('pipe')",
    "xattr": "import contextlib\nwith contextlib.suppress(OSError): os.setxattr('file', 'user.x', b'1')",
    "mmap": "import mmap\nf = open('file', 'r+b'); m = mmap.mmap(f.fileno(), 4); m[:] = b'MMAP'; m.flush(); assert open('file').read() == 'MMAP'",
    "memmap": "import numpy\nm = numpy.memmap('file', mode='r+'); m[0] = 0; m.flush()",
    "savetxt": "import numpy\nnumpy.savetxt('file', [1.0])",
    "np.save": "import numpy\nnumpy.save('file.npy', numpy.ones(3)); assert numpy.load('file.npy').sum() == 3",
    "np.tofile": "import numpy\nnumpy.ones(3).tofile('file')",
    "sqlite": "import sqlite3\nc = sqlite3.connect('base.db'); c.execute('insert into t values (2)'); c.commit(); assert c.execute('select count(*) from t').fetchone() == (2,)",
    "sqlite new": "import sqlite3\nc = sqlite3.connect('other.db'); c.execute('create table t (x)'); c.commit()",
    "tarfile": "import tarfile\nwith tarfile.open('t.tar', 'w') as t: t.add('out')\nshutil.rmtree('out')\nwith tarfile.open('t.tar') as t: t.extractall(filter='data')\nassert open('out/a').read() == 'A'",
    "zipfile": "import zipfile\nwith zipfile.ZipFile('z.zip', 'w') as z: z.write('file')\nzipfile.ZipFile('z.zip').extractall('.')",
    "logging": "import logging\nlogging.basicConfig(filename='file'); logging.warning('x')",
    "dbm": "import dbm.dumb\ndbm.dumb.open('d')['x'] = 'y'",
    "pickle": "import pickle\npickle.dump(1, open('file', 'wb'))",
    "safe save": "import tempfile\nf = tempfile.NamedTemporaryFile(dir='.', delete=False); f.write(b'x'); f.close(); os.replace(f.name, 'file'); assert open('file').read() == 'x'",
    "os.system": "assert os.system('rm -rf out; echo x > file; mkdir s; mv link l2; cp file s/') == 0; assert open('s/file').read() == 'x\\n'; assert not os.path.exists('out')",
    "subprocess": "subprocess.run(['rm', 'file'], check=True); assert not os.path.exists('file')",
    "subprocess without environment": "subprocess.run(['/bin/rm', 'file'], check=True, env={}); assert not os.path.exists('file')",
    "env -i": "subprocess.run(['env', '-i', '/bin/rm', 'file'], check=True); assert not os.path.exists('file')",
    "output to a file": "subprocess.run(['echo', 'x'], stdout=open('file', 'w'), check=True)",
    "spawn to a file": "pid = os.posix_spawn('/bin/echo', ['echo', 'x'], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, 'file', os.O_WRONLY | os.O_TRUNC, 0o644)]); os.waitpid(pid, 0); assert open('file').read() == 'x\\n'",
    "shell tools": "subprocess.run('sed -i s/MINE/x/ file; touch new; ln -s file n2; chmod 600 out/a; truncate -s 1 out/deep/b; find out -name a -delete; install file inst; dd if=file of=dd status=none; tee t <file >/dev/null; split file', shell=True, check=True); assert open('file').read() == 'x'; assert sorted(os.listdir('out')) == ['deep']",
    "tar": "subprocess.run('tar cf t.tar out && rm -r out && tar xf t.tar', shell=True, check=True); assert open('out/deep/b').read() == 'B'",
    "git": "subprocess.run('git init -q . && git add file', shell=True, check=True)",
    "worker": "pid = os.fork()\nif not pid: open('file', 'w').write('w'); shutil.rmtree('out'); os._exit(0)\nos.waitpid(pid, 0)\nassert open('file').read() == 'w'; assert not os.path.exists('out')",
    "spawned worker": "import multiprocessing as m\np = m.get_context('spawn').Process(target=os.remove, args=('file',)); p.start(); p.join(); assert p.exitcode == 0; assert not os.path.exists('file')",
    "thread": "import threading\nt = threading.Thread(target=os.remove, args=('file',)); t.start(); t.join()",
    "libc": "import ctypes\nc = ctypes.CDLL(None); c.unlink(b'file'); c.rename(b'out/a', b'out/c'); f = c.fopen; f.restype = ctypes.c_void_p; assert f(b'new', b'w')",
    "raw": "import ctypes, platform\nn = 263 if platform.machine() == 'x86_64' else 35\nassert ctypes.CDLL(None).syscall(n, -100, b'file', 0) == 0; assert not os.path.exists('file')",
    "raw, its signal taken": "import ctypes, platform, signal\nsignal.signal(signal.SIGSYS, signal.SIG_DFL)\nn = 263 if platform.machine() == 'x86_64' else 35\nassert ctypes.CDLL(None).syscall(n, -100, b'file', 0) == 0; assert not os.path.exists('file')",
    "raw open": "import ctypes, platform\nn = 257 if platform.machine() == 'x86_64' else 56\nfd = ctypes.CDLL(None).syscall(n, -100, b'file', os.O_WRONLY | os.O_TRUNC, 0)\nos.write(fd, b'x'); assert open('file').read() == 'x'",
    "raw descriptor": "import ctypes, platform\nn = {'fchmod': (91, 52), 'fchown': (93, 55)}\nfd = os.open('file', os.O_RDONLY); c = ctypes.CDLL(None)\nchmod, chown = (each[platform.machine() != 'x86_64'] for each in n.values())\nassert c.syscall(chmod, fd, 0o600) == 0 and os.stat('file').st_mode & 0o777 == 0o600\nassert c.syscall(chown, fd, os.getuid(), os.getgid()) == 0",
    "raw chmod": "import ctypes, errno\nc = ctypes.CDLL(None, use_errno=True)\nassert c.syscall(452, -100, b'file', 0o600, 0) == 0 or ctypes.get_errno() == errno.ENOSYS",
    "io_uring": "import ctypes, errno\nc = ctypes.CDLL(None, use_errno=True)\nassert c.syscall(425, 4, ctypes.create_string_buffer(120)) == -1 and ctypes.get_errno() == errno.ENOSYS",
    "safetensors": "import numpy\nfrom safetensors.numpy import load_file, save_file\nos.mkdir('ck'); save_file({'a': numpy.ones(3)}, 'ck/model.safetensors'); assert load_file('ck/model.safetensors')['a'].sum() == 3",
    "tokenizers": "import tokenizers\ntokenizers.Tokenizer(tokenizers.models.BPE()).save('tokenizer.json'); tokenizers.Tokenizer.from_file('tokenizer.json')",
    "parquet": "import importlib.util\nif importlib.util.find_spec('pyarrow'): import pyarrow as pa, pyarrow.parquet as pq; pq.write_table(pa.table({'a': [1]}), 'a.parquet'); assert pq.read_table('a.parquet').num_rows == 1",
    "chdir": "os.chdir('out'); open('a', 'w').write('x'); os.makedirs('../made/it'); os.chdir('../made/it'); open('x', 'w').write('x'); os.chdir('..'); assert os.getcwd() == start + '/made'; os.remove('../file'); assert os.path.realpath('it/x') == start + '/made/it/x'",
    "absolute": "open(start + '/file', 'w').write('x'); shutil.rmtree(start + '/out')",
    "dots": "open('out/../file', 'w').write('x'); assert open('file').read() == 'x'; os.remove('./out/deep/../a'); assert not os.path.exists('out/a')",
    "walk": "os.remove('out/a'); open('out/deep/n', 'w').write(''); assert [(d, sorted(f)) for d, _, f in os.walk('out')] == [('out', []), ('out/deep', ['b', 'n'])]",
    "glob": "import glob\nopen('out/c', 'w').write(''); os.remove('out/a'); assert glob.glob('out/*') and sorted(glob.glob('out/*')) == ['out/c', 'out/deep']",
    "scandir": "open('out/c', 'w').write(''); assert sorted(e.name for e in os.scandir('out') if e.is_file()) == ['a', 'c']",
    "scandir of a descriptor": "open('out/c', 'w').write(''); d = os.open('out', os.O_RDONLY); assert sorted(os.listdir(d)) == ['a', 'c', 'deep']",
    "keep the last": "[os.makedirs(f'ck-{i}') or open(f'ck-{i}/w', 'w').write('x') for i in range(3)]\nfor p in sorted(Path('.').glob('ck-*'))[:-1]: shutil.rmtree(p)\nassert [str(p) for p in Path('.').glob('ck-*')] == ['ck-2']",
    "old checkpoints": "for p in sorted(Path('out').iterdir()): shutil.rmtree(p) if p.is_dir() else p.unlink()\nassert os.listdir('out') == []; os.rmdir('out')",
    "parent is missing": "import contextlib\nwith contextlib.suppress(FileNotFoundError): open('none/x', 'w'); assert 0",
    "file as folder": "import contextlib\nwith contextlib.suppress(NotADirectoryError): open('file/x', 'w'); assert 0",
    "opened before": "f = open('log', 'w'); f.write('1'); f.flush(); open('file', 'w').write('x'); f.write('2'); f.close(); assert open('log').read() == '12'",
    "a socket": "import socket\ns = socket.socket(socket.AF_UNIX); s.bind('sock'); s.listen(); c = socket.socket(socket.AF_UNIX); c.connect('sock'); assert s.getsockname() == 'sock' or s.getsockname() == start + '/sock'; os.remove('sock')",
    "a lock": "import fcntl\nf = open('file.lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX)",
    "csv append": "import csv\ncsv.writer(open('file', 'a')).writerow([1])",
    "fileinput": "import fileinput\nfor line in fileinput.input('file', inplace=True): print('x')",
}  # fmt: skip

HEAD = "import io, os, shutil, subprocess, sys\nfrom pathlib import Path\nstart = os.getcwd()\n"


@pytest.fixture(scope="session")
def library() -> Iterator[Path]:
    """The library, where an ordinary user may read it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "libtuner_start.so"
        sources = [str(SOURCES / name) for name in ("start.c", "files.c")]
        flags = ["-O1", "-fPIC", "-fvisibility=hidden", "-w", "-shared", f"-I{SOURCES}"]
        subprocess.run([find_compiler(), *flags, *sources, "-o", path, "-ldl"], check=True)
        path.parent.chmod(0o755)
        yield path


def make_files(folder: Path) -> None:
    (folder / "out/deep").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "file").write_text("MINE")
    (folder / "out/a").write_text("A")
    (folder / "out/deep/b").write_text("B")
    (folder / "link").symlink_to("file")
    (folder / "linked").symlink_to("out")
    subprocess.run(
        [sys.executable, "-c", "import sqlite3; c = sqlite3.connect('base.db');"
         " c.execute('create table t (x)'); c.execute('insert into t values (1)'); c.commit()"],
        cwd=folder, check=True,
    )  # fmt: skip


def state(folder: Path) -> dict[str, tuple[object, ...]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (stat.st_ino, stat.st_mode, stat.st_mtime_ns, stat.st_uid, content)
    return found


def run(
    library: Path, way: str, *, before: str = "", held: bool = True, owner: int = 0
) -> subprocess.CompletedProcess[str]:
    """Go one way in a folder of `owner`, and see that nothing happened to the files there."""
    with tempfile.TemporaryDirectory() as made:
        folder, scratch = Path(made, "mine"), Path(made, "scratch")
        for one in (folder, scratch, *(scratch / tree for tree in ("new", "gone", "tmp"))):
            one.mkdir()
        (scratch / "changed").write_bytes(bytes(8))
        make_files(folder)
        if owner:
            for path in (Path(made), *Path(made).rglob("*")):
                os.chown(path, owner, owner, follow_symlinks=False)
        there = state(folder)
        environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "TUNER_FILES": str(scratch),
            "TUNER_FILES_KEPT": "/dev\n/proc\n/sys",
            "TMPDIR": str(scratch / "tmp"),
            "HOME": str(folder),
        } | ({} if held else {"TUNER_FILES_HELD": "0"})
        done = run_python("-c", HEAD + before + WAYS.get(way, way), cwd=folder, env=environment)
        assert state(folder) == there
        assert done.returncode == 0, done.stderr
        return done


@pytest.mark.parametrize("way", WAYS)
def test_no_way_reaches_real_files_and_all_are_read_back(library, way):
    run(library, way)


NEEDS_PYTHON = {"spawned worker", "tokenizers", "parquet"}
"""Ways that start Python or import more, which lie where an ordinary user may not look."""

MODULES = (
    "csv ctypes dbm.dumb encodings.cp437 encodings.latin_1 fcntl fileinput glob importlib.util logging"
    " mmap numpy pickle platform safetensors.numpy socket sqlite3 tarfile tempfile zipfile"
)


@pytest.mark.proof
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
@pytest.mark.parametrize("way", sorted(WAYS.keys() - NEEDS_PYTHON))
def test_the_same_as_an_ordinary_user(library, way):
    drop = "".join(f"import {name}\n" for name in MODULES.split())
    drop += "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    run(library, way, before=drop, owner=65534)


RAW = {"raw", "raw open", "raw descriptor", "raw chmod", "io_uring", "safetensors"}
"""Ways that need the trap of raw system calls."""


@pytest.mark.proof
@pytest.mark.parametrize("way", sorted(WAYS.keys() - RAW))
def test_the_same_where_the_kernel_holds_nothing(library, way):
    run(library, way, held=False)


STATIC = {
    "linked statically": 'int file = open("file", 1 | 512); write(file, "x", 1);',
    "of 32 bits": 'long a = 5; __asm__ volatile("int $0x80" : "+a"(a) : "b"("/nowhere"), "c"(0));',
}


@pytest.mark.parametrize("code", STATIC.values(), ids=STATIC)
@pytest.mark.parametrize("wait", ["subprocess.run('./static')", "os.system('./static; true')"])
def test_a_program_that_cannot_be_kept_apart_is_ended_in_words(library, code, wait, tmp_path):
    if "int $0x80" in code and platform.machine() != "x86_64":
        pytest.skip("calls of 32 bits are those of x86")
    (tmp_path / "static.c").write_text(
        f"#include <fcntl.h>\n#include <unistd.h>\nint main(void) {{ {code} return 7; }}\n"
    )
    flags = ["-static", "-fno-pie", "-no-pie", "-w"]
    built = subprocess.run(
        [find_compiler(), *flags, "static.c", "-o", "static"], cwd=tmp_path, check=False
    )
    if built.returncode:
        pytest.skip("there is no static C library")
    done = run(library, "", before=f"shutil.copy({str(tmp_path / 'static')!r}, '.'); {wait}\n")
    assert "before it changed your files" in done.stderr
