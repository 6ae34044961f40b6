"""The programs that a shell script starts: bash runs its lines, and skips the commands of others.

Variables, conditions, loops, functions and files that are sourced are bash's own. A trap before
each command decides: what only computes happens, a start of Python or of a launcher is noted, and
everything else is skipped. No file is written: each `> file` is `> /dev/null` before bash sees it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.core.errors import InputError, UnavailableError
from tuner.program.standins import MARK

SHELLS = ("bash", "sh", "zsh")
SUFFIX = ".sh"

_SECONDS = 10

_LINE = re.compile(r"(?:-c: )?line (\d+)")

_END = "\1"
"""Ends a list of words."""

_UNKNOWN = "tuner-does-not-run-this"
"""The output of a command that is skipped where a script takes its text; a number follows."""

_PRELUDE = r"""
__writes='>>?[[:space:]]*([^&/>=[:space:]]|/[^d])'
__at_start=$'\2'
for __name in $(compgen -e); do __at_start+="$__name=${!__name}"$'\2'; done
__record() {
  { printf '%s\0' start "$PWD" "$@" $'\1'; local n
    for n in $(compgen -e); do
      [[ $__at_start == *$'\2'"$n=${!n}"$'\2'* ]] || printf '%s\0' "$n=${!n}"
    done; printf '%s\0' $'\1'; } >&3
}
__skipped() { printf '%s\0' skipped "$((BASH_LINENO[$1] - __head))" "${*:2}" '' >&3; }
__external() {  # in place of a command that is no builtin
  local at before=''
  for ((at = 1; at <= $# && at < 12; at++)); do
    case $before in
      --with*|--extra|--group|-p|--python|-n|--name|--project|--directory) before=''; continue;;
    esac
    before=${!at}
    case ${!at##*/} in
      python|python[0-9]*|pypy*|torchrun|accelerate|deepspeed|trl|axolotl|llamafactory-cli|tune)
        __record "${@:at}"; echo "$__unknown"; return 0;;
      bash|sh|zsh) local next=$((at + 1))
        [[ -f ${!next-} ]] && { __record "${@:at}"; return 0; };;
    esac
    case ${1##*/} in
      exec|nohup|time|env|sudo|uv|poetry|pipenv|conda|srun|mpirun|timeout|numactl|stdbuf|setsid) ;;
      *) break;;
    esac
  done
  case "$*" in
    "nvidia-smi -L"*|"nvidia-smi --list-gpus"*|"nvidia-smi --query-gpu"*)
      echo "GPU 0";;
    *) __skipped 2 "$@"; echo "$__unknown";;
  esac
}
__bare() {  # __rest: the text of a command behind the assignments at its beginning
  local i c quote depth
  __rest=$1
  while [[ $__rest =~ ^[A-Za-z_][A-Za-z0-9_]*(\[[^]]*\])?\+?= ]]; do
    __rest=${__rest:${#BASH_REMATCH}} quote='' depth=0
    for ((i = 0; i < ${#__rest}; i++)); do
      c=${__rest:i:1}
      case $quote$c in
        \'\'|\"\") quote='';;
        \'*) ;;
        *\\) ((i++));;
        \'|\") quote=$c;;
        *\() [[ ${__rest:i-1:1} == [\$\<=\(] || $i == 0 ]] && ((depth++));;
        *\)) ((depth)) && ((depth--));;
        [[:space:]]) ((depth)) || break;;
      esac
    done
    __rest=${__rest:i} __rest=${__rest#"${__rest%%[![:space:]]*}"}
  done
}
__substitutes() { [[ $1 == *[\$\<\>]\(* || $1 == *\`* ]]; }  # what a trap would really run
__words() {  # __said: the words of a command without its redirections, expanded; or the first word
  local text=$1
  while [[ $text =~ ^(.*)[[:space:]][0-9]*(\&?\>\>?|\<|\>\&)[[:space:]]?(\&?[^[:space:]]+)(.*)$ ]]
  do text="${BASH_REMATCH[1]}${BASH_REMATCH[4]}"; done
  __said=()
  if __substitutes "$text"; then
    text=${text%%[[:space:]]*}; __substitutes "$text" && return 1
  fi
  eval "__said=($text)" 2>/dev/null
}
__before() {  # 1 for a command that is skipped
  local command=$BASH_COMMAND first=${BASH_COMMAND%%[[:space:]]*} name
  case $first in
    __*|for|case|select|while|until|if|function|\[|\[\[|\(\(*) return 0;;
    :|test|echo|printf|true|false|cd|pwd|pushd|popd|break|continue|return|exit|shift|export|local\
    |declare|typeset|readonly|unset|read|mapfile|readarray|let|getopts|wait|type|eval)
      [[ $command =~ $__writes ]] || return 0
      __said=()
      [[ $first == eval ]] && ! __substitutes "$command" && eval "__said=($command)" 2>/dev/null
      if [[ $first == eval && ${__said[*]-} != *[\;\&\|\(\)\`]* ]] && __words "${__said[*]:1}"
      then __external "${__said[@]}" >/dev/null; else __skipped 2 "$command"; fi
      return 1;;
    set) [[ $command =~ [+]T|functrace ]] || return 0;;
    command) [[ $command =~ ^command[[:space:]]+-[vV] ]] && return 0;;
    .|source) __words "$command"
      [[ -f ${__said[1]-} ]] && ! [[ $(<"${__said[1]}") == *\>* ]] && return 0;;
    seq|date|basename|dirname|realpath|readlink|hostname|nproc|uname|whoami|id|wc|tr|cut|head\
    |tail|cat|expr|grep|printenv|sort|uniq) return 0;;
  esac
  __bare "$command"
  [[ $__rest ]] || return 0
  case ${__rest%%[[:space:]]*} in
    builtin|enable|trap|kill|shopt|alias|ulimit|umask|.|source|coproc|command|set)
      __skipped 2 "$command"; return 1;;
  esac
  __words "$__rest" && ((${#__said[@]})) || { __skipped 2 "$command"; return 1; }
  if [[ ${__said[0]} == exec ]] && __substitutes "$command"; then
    exec() { __external "$@"; exit 0; }; return 0
  fi
  if [[ ${__said[0]} == exec || $__rest =~ $__writes ]]; then
    __substitutes "$command" && { __skipped 2 "$command"; return 1; }
    ( eval "export ${command%"$__rest"}"; __external "${__said[@]}" ) >/dev/null 2>&1
    return 1
  fi
  name=${__said[0]}
  declare -F -- "$name" >/dev/null || [[ $(type -t -- "$name") == builtin ]] && return 0
  printf -v name %q "$name"
  eval "$name() { __external $name \"\$@\"; }" 2>/dev/null || { __skipped 2 "$command"; return 1; }
}
__skips() { ! __before; }
shopt -s extdebug
trap '! __skips' DEBUG  # a failure that `set -e` does not end with
"""


@dataclass(frozen=True, slots=True)
class Started:
    """A program that a script starts: its words, its folder and the variables that are set."""

    words: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ShellRun:
    """The starts of a script in order, and the commands that it wanted to run and that are skipped.

    A word of a start that follows from a skipped command is one that is unknown.
    """

    starts: tuple[Started, ...]
    skipped: tuple[str, ...]


def is_shell(words: Sequence[str]) -> bool:
    """True for `train.sh` and `bash train.sh`."""
    return words[0].endswith(SUFFIX) or (
        len(words) > 1 and Path(words[0]).name in SHELLS and not words[1].startswith("-")
    )


def run_shell(
    words: Sequence[str],
    folder: Path,
    text: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> ShellRun:
    """The starts of the script in `words`, whose text may be given, as may more variables.

    Raises `InputError` for a script that fails or never ends, `UnavailableError` without bash.
    """
    script, *arguments = words if words[0].endswith(SUFFIX) else words[1:]
    bash = shutil.which("bash")
    if bash is None:
        raise UnavailableError(
            f"{script} is a shell script, and bash is not installed",
            hint="name the Python program that it starts, with its words",
        )
    text = (folder / script).read_text(encoding="utf-8") if text is None else text
    given = {**os.environ, **(environment or {})}

    def once(seed: int) -> tuple[list[Started], list[str]]:
        return _once([bash, script, *arguments], folder, text, given, seed)

    starts, skipped = once(1)
    for seed in (2, 3) if skipped else ():
        others: list[Started] = []
        with contextlib.suppress(InputError):  # no arithmetic takes what is unknown
            others, _ = once(seed)
        if len(others) == len(starts):
            pairs = zip(starts, others, strict=True)
            starts = [replace(one, words=_known(one.words, other.words)) for one, other in pairs]
    return ShellRun(tuple(starts), tuple(skipped))


def _known(words: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """The words that are the same in both runs; those that differ say that they are unknown."""
    found = []
    for word, other in itertools.zip_longest(words, others[: len(words)]):
        option = word[: word.find("=") + 1] if word.startswith("-") else ""
        unknown = f"{option}{MARK} {word[len(option) :]} follows from a command that isn't run>"
        found.append(word if word == other or MARK in word else unknown)
    return tuple(found)


def _once(
    words: Sequence[str], folder: Path, text: str, given: Mapping[str, str], seed: int
) -> tuple[list[Started], list[str]]:
    bash, script, *arguments = words
    ours = re.sub(r"\$\{BASH_SOURCE(\[0\])?\}|\$BASH_SOURCE\b", "$0", without_files(text))
    lines = _PRELUDE.count("\n") + 2
    lines_of = 2 if seed > 2 else 1  # which `wc -l` counts
    said_then = "$'" + "\\n".join([f"{_UNKNOWN}-{seed}"] * lines_of) + "'"
    head = f"RANDOM=1; __unknown={said_then}; __head={lines}\n{_PRELUDE}"
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as said:
        code = f"exec 3>&{told.fileno()}\n{head}{ours}\n"
        process = subprocess.Popen(  # noqa: S603
            [bash, "--noprofile", "--norc", "-c", code, script, *arguments],
            cwd=folder,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            pass_fds=(told.fileno(),),
            start_new_session=True,
        )
        try:
            process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            raise InputError(
                f"{script} doesn't end within {_SECONDS} s with its commands skipped",
                hint="name the Python program that it starts, with its words",
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        told.seek(0)
        starts, skipped = _parsed(told.read().decode(errors="replace"))
        if not starts:
            said.seek(0)
            last = said.read().decode(errors="replace").strip().splitlines()[:1]
            last = [_LINE.sub(lambda n: f"line {int(n[1]) - lines}", text) for text in last]
            raise InputError(
                f"{script} starts no Python program" + "".join(f": {line}" for line in last),
                hint="name the Python program, with its words",
            )
    return starts, skipped


def _parsed(text: str) -> tuple[list[Started], list[str]]:
    starts, skipped = [], []
    items = iter(text.split("\0"))
    for kind in items:
        if kind == "skipped":
            line, command, _ = (next(items, "") for _ in range(3))
            skipped.append(f"line {line}: {command}")
        elif kind == "start":
            folder, *words = itertools.takewhile(_END.__ne__, items)
            pairs = (item.partition("=") for item in itertools.takewhile(_END.__ne__, items))
            environment = {name: value for name, _, value in pairs}
            starts.append(Started(tuple(words), Path(folder), environment))
    return starts, skipped


_TOKEN = re.compile(
    r"""(?P<escape>\\.)|(?P<single>\$?'[^']*')|(?P<comment>(?<![^\s;(])\#[^\n]*)"""
    r"""|(?P<open>\$\(\(|\$\(|\(\(|\[\[|\()|(?P<close>\)\)|\)|\]\])|(?P<quote>")"""
    r"""|(?P<here><<-?\s*(?P<mark>['"]?\w+['"]?))"""
    r"""|(?P<write>(?:\d*|&)>>?\|?(?![&(>])[ \t]*"""
    r"""(?P<target>(?:"[^"]*"|'[^']*'|\$\([^)]*\)|[^\s;&|<>()])+))""",
    re.DOTALL,
)


def without_files(text: str) -> str:
    """The text of a script whose output goes to no file: each target of `>` is /dev/null.

    `>` compares within `[[ ]]` and `(( ))`, and is a character within quotes and the texts of
    `<<`; in `"$(command > file)"` it writes again.
    """
    out: list[str] = []
    inside: list[str] = []  # the openings around the place
    place = 0
    marks: list[str] = []  # texts of `<<` that begin with the next line
    while place < len(text):
        if marks and text[place] == "\n":
            mark = marks.pop(0)
            end = re.compile(rf"\n\s*{re.escape(mark)}(?=\n|$)").search(text, place)
            stop = end.end() if end else len(text)
            out.append(text[place:stop])
            place = stop
            continue
        quoted = bool(inside) and inside[-1] == '"'
        found = _TOKEN.match(text, place)
        kind = found.lastgroup if found else None
        if (
            quoted
            and kind not in ("escape", "quote")
            and not (kind == "open" and text.startswith("$(", place))
        ):
            kind = None
        if found is None or kind is None:
            out.append(text[place])
            place += 1
            continue
        part = found[0]
        if kind == "open":
            inside.append(part)
        elif kind == "close" and inside and inside[-1] != '"':
            opened = inside.pop()
            if part == "))" and not opened.endswith("(("):
                part = ")"
        elif kind == "quote":
            inside.pop() if quoted else inside.append('"')
        elif kind == "here":
            marks.append(found["mark"].strip("'\""))
        elif kind == "write" and not (inside and inside[-1] in ("[[", "((", "$((")):
            part = text[place : found.start("target")] + "/dev/null"
            place = found.end() - len(part)
        out.append(part)
        place += len(part)
    return "".join(out)
