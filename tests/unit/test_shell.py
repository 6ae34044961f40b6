"""Shell scripts: bash runs their lines, and nothing but that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.core.errors import InputError
from tuner.program.shell import run_shell, without_files

PYTHON = "python train.py"
STARTS = {
    "python train.py --lr $LR": ["python train.py --lr 1e-4"],
    "LR=2e-4; python train.py --lr $LR": ["python train.py --lr 2e-4"],
    "N=4 exec nohup python3 train.py > log.txt 2>&1 &": ["python3 train.py"],
    'ARGS=(--a "b c"); /usr/bin/python3.11 train.py "${ARGS[@]}"': [
        "/usr/bin/python3.11 train.py --a b c"
    ],
    'PY=python; "$PY" train.py': [PYTHON],
    "if [[ b > a ]]; then python train.py; else python other.py; fi": [PYTHON],
    "for b in 1 2; do python train.py --b $((b * 2)) >> log; done > all": [
        "python train.py --b 2",
        "python train.py --b 4",
    ],
    'f() { python train.py "$@" | tee log; }\nf --x 1': ["python train.py --x 1"],
    "set -euo pipefail\nrm -rf out\nmkdir out && cd . && python train.py": [PYTHON],
    "N=$(nvidia-smi -L | wc -l)\ntorchrun --nproc-per-node $N train.py": [
        "torchrun --nproc-per-node 1 train.py"
    ],
    "source vars.sh\npython train.py --x $X": ["python train.py --x 7"],
    "uv run --with trl accelerate launch train.py": ["accelerate launch train.py"],
    "case $1 in 7b) B=2;; *) B=8;; esac; python train.py --b $B": ["python train.py --b 2"],
    'eval "python train.py > log"': [PYTHON],
    "cat > conf.yaml <<EOF\nx: 1 > 2\nEOF\npython train.py": [PYTHON],
    "command -v python && export PATH=/bin:$PATH && touch x; python train.py": [PYTHON],
    "for b in 1 2; do python train.py --b $b 2>&1 & done\nwait": [
        "python train.py --b 1",
        "python train.py --b 2",
    ],
    "(while true; do nvidia-smi; sleep 9; done) & python train.py & [[ a && b ]]; kill $!": [
        PYTHON
    ],
    'R="torchrun --node_rank"; srun -n 1 bash -c "$R \\$SLURM_PROCID train.py" | tee log': [
        "torchrun --node_rank 0 train.py"
    ],
    "python - --x 1 <<EOF\nf(1) > 2\nEOF\n": ["python stdin.py --x 1"],
    'HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd); python "$HERE/train.py" > "$(date)"': [
        "python HERE/train.py"
    ],
}


@pytest.mark.parametrize("text", STARTS)
def test_starts_are_those_of_the_shell_and_nothing_is_written(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LR", "1e-4")
    (tmp_path / "vars.sh").write_text("X=7\n")
    (tmp_path / "out").mkdir()
    before = sorted(tmp_path.iterdir())
    starts = run_shell(["bash", "train.sh", "7b"], tmp_path, text)
    wanted = [words.replace("HERE", str(tmp_path)) for words in STARTS[text]]
    assert [" ".join(start.words) for start in starts] == wanted
    assert sorted(tmp_path.iterdir()) == before


WAYS = (
    "rm -f kept", "/bin/rm -f kept", "> kept", ": > kept", "echo x > kept", "echo x >> new",
    "{ echo x; } > kept", "( echo x ) &> kept", "for i in 1; do :; done > kept",
    "command rm kept", "builtin printf x > kept", "exec > kept", 'x="$(echo y > kept)"',
    "eval 'echo x > kept'", "eval 'touch new'", "cp kept new", "find . -delete",
    "sed -i s/a/b/ kept", "rm(){ /bin/rm kept; }; rm", "trap - DEBUG; /bin/rm kept",
    "set +T; (/bin/rm kept)", "shopt -u extdebug; /bin/rm kept", "cat kept | tee new",
    "bash -c 'rm kept'", "x=1 rm kept",
    "PATH=/bin; rm kept", "env rm kept", "unset -f rm; rm kept", "$(echo rm) kept", "r=rm; $r kept",
    "if true; then rm kept; fi", "true && rm kept", "cat <(rm kept)", "coproc rm kept",
    "python -c 'open(\"new\", \"w\")'", "enable -n echo; echo > kept", "\\rm kept", "'rm' kept",
    "python a.py $(touch new)", "rm $(touch new)", "eval 'python a.py $(touch new)'",
    "exec python a.py `touch new`", ". $(touch new)", "bash -c x <(touch new)",
    "x=$(touch new) exec python a.py > log",
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_nothing_happens_to_files(way: str, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("as it was")
    run_shell(["train.sh"], tmp_path, f"{way}\npython train.py\n")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "as it was"


def test_a_word_that_a_skipped_command_decides_is_unknown(tmp_path: Path) -> None:
    text = "x=$(ask)\npython train.py --x=$x $((x * 2)) $(ask) --y 1 $(pwd)"
    starts = run_shell(["train.sh"], tmp_path, text)
    *words, y, one, folder = starts[0].words[2:]
    assert [word.partition("<unknown: ")[1] for word in words] == ["<unknown: "] * 3
    assert words[0].startswith("--x=<unknown: ")
    assert (y, one, folder) == ("--y", "1", str(tmp_path))
    starts = run_shell(["train.sh"], tmp_path, "python train.py $(ask | wc -l)")
    assert starts[0].words[2].startswith("<unknown: 1 follows from a command")


KEPT = """
cat > a.yaml <<EOF
a: $HOME
EOF
mkdir -p sub; if true; then echo "b; $(ask)" > "sub/b c.yaml"; fi
for x in 1 2; do echo $x; done > /tmp/loop
python train.py a.yaml
printf 'c: %s\\n' 1 >> ./a.yaml; echo y: 2 >> kept.yaml
python train.py a.yaml 2>&1 > log
"""


def test_a_program_sees_the_files_that_are_written_before_it(tmp_path: Path) -> None:
    (tmp_path / "kept.yaml").write_text("x: 1\n")
    first, second = run_shell(["train.sh"], tmp_path, KEPT, environment={"HOME": "/x"})
    place = f"{tmp_path.resolve()}/"
    assert first.files == {
        f"{place}a.yaml": "a: /x",
        f"{place}sub/b c.yaml": "b; <unknown:a-skipped-command>",
        "/tmp/loop": "1\n2",
    }
    assert second.files[f"{place}a.yaml"] == "a: /x\nc: 1"
    assert second.files[f"{place}kept.yaml"] == "x: 1\ny: 2"
    assert (tmp_path / "kept.yaml").read_text() == "x: 1\n"


@pytest.mark.parametrize(
    "condition", ['[ "${M:-0}" -gt 20 ]', "((M > 20))", "[[ $M -gt 20 ]]", 'test "$M" = A100']
)
def test_both_branches_of_a_skipped_command_are_seen(condition: str, tmp_path: Path) -> None:
    text = f"M=$(nvidia-smi --query-gpu=memory.total)\nB=1; if {condition}; then B=8; fi\n"
    starts = run_shell(["train.sh"], tmp_path, f"{text}python train.py --b $B")
    assert starts[0].words[-1] == "<unknown: 1 follows from a command that isn't run>"
    text = 'if [ "$B" = 4 ] && [[ $B -gt 2 ]]; then python train.py --b $B; else python b.py; fi'
    assert run_shell(["a.sh"], tmp_path, f"ask; B=4\n{text}")[0].words[-1] == "4"


def test_a_line_of_a_file_that_a_skipped_command_decides_is_unknown(tmp_path: Path) -> None:
    text = "M=$(ask)\nB=1; if [ $M -gt 2 ]; then B=8; fi\n{ echo a: 1; echo b: $B; } > n\n"
    (start,) = run_shell(["train.sh"], tmp_path, f"{text}python train.py")
    assert [*start.files.values()] == ["a: 1\nb: <unknown:a-skipped-command>"]


def test_a_script_that_starts_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"starts no Python program: .*line 2"):
        run_shell(["train.sh"], tmp_path, "echo\nif then")


def test_only_targets_of_output_change() -> None:
    kept = "a 2>&1; [[ $a > b ]]; ((1 > 2)); echo 'x > y' \"x > y\" # > z\ncat <<E\n> q\nE\n"
    assert without_files(kept) == kept
    assert without_files('a > "b c"; d &>> $(e) ; "$(f >g)"') == (
        'a > /dev/null; d &>> /dev/null ; "$(f >/dev/null)"'
    )
