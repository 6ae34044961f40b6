# Decides before each command of a script: it happens, is noted as a start, or is skipped.
readonly __made __unknown
for __name in JOB_ID JOBID PROCID NODEID LOCALID; do eval ": \${SLURM_$__name:=0}"; done
__writes='>>?[[:space:]]*([^&/>=[:space:]]|/[^d])'
__at_start=$'\2'
for __name in $(compgen -e); do __at_start+="$__name=${!__name}"$'\2'; done
__record() {
  { printf '%s\0' start "$PWD" "$@" $'\1'; local n
    for n in $(compgen -e); do
      [[ $__at_start == *$'\2'"$n=${!n}"$'\2'* ]] || printf '%s\0' "$n=${!n}"
    done; printf '%s\0' $'\1'
    for n in "$__made"/*; do [[ -f $n ]] && printf '%s\0' "${n##*/}" "$(<"$n")"; done
    printf '%s\0' $'\1'; } > "$__made/.$BASHPID"
  cat "$__made/.$BASHPID" >&3  # at once, whatever jobs tell meanwhile
}
__to() {  # the file that takes the place of one that is written; with a second word, of its end
  local at=$1 to
  case $at in *.log|*.out) printf /dev/null; return;; esac
  [[ $at == /* ]] || at=$PWD/$at
  at=${at//\/.\//\/} to=$__made/
  to+=${at//\//%}
  [[ ${2-} && -f $at && ! -f $to ]] && { printf '%s\n' "$(<"$at")"; } > "$to"
  printf '%s' "$to"
}
__is_unknown() {  # true for a condition on what a skipped command would have said
  local text=$1 name
  while [[ $text =~ ([A-Za-z_][A-Za-z0-9_]*)(.*) ]]; do
    name=${BASH_REMATCH[1]} text=${BASH_REMATCH[2]}
    [[ ${!name-} == *"${__unknown%%-[0-9]*}"* ]] && return 0
  done
  return 1
}
__skipped() { printf 'skipped\0' >&3; }
__external() {  # in place of a command that is no builtin
  local at before=''
  for ((at = 1; at <= $# && at < 12; at++)); do
    case $before in
      --with*|--extra|--group|-p|--python|-n|--name|--project|--directory) before=''; continue;;
    esac
    before=${!at}
    local next=$((at + 1)) text=$((at + 2))
    if [[ ${!at##*/} == python* && ${!next--} == - ]] && text=$(cat) && [[ $text ]]; then
      printf '%s' "$text" > "$(__to stdin.py)"
      set -- "${@:1:at}" stdin.py "${@:at + 2}"
    fi
    case ${!at##*/} in
      python|python[0-9]*|pypy*|torchrun|accelerate|deepspeed|trl|axolotl|llamafactory-cli|tune)
        __record "${@:at}"; echo "$__unknown"; return 0;;
      bash|sh|zsh)
        [[ -f ${!next-} ]] && { __record "${@:at}"; return 0; }
        [[ ${!next-} == -*c && ${!text-} != *[\;\&\|\(\)\`]* ]] && __words "${!text}" &&
          { __external "${__said[@]}"; return 0; };;
    esac
    case ${1##*/} in
      exec|nohup|time|env|sudo|uv|poetry|pipenv|conda|srun|mpirun|timeout|numactl|stdbuf|setsid) ;;
      *) break;;
    esac
  done
  case "$*" in
    "nvidia-smi -L"*|"nvidia-smi --list-gpus"*) echo "GPU 0";;
    "nvidia-smi --query-gpu"*) __skipped; echo "${__unknown%%$'\n'*}";;
    *) __skipped; echo "$__unknown";;
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
  if [[ ${command%%$'\n'*} =~ ^(.*)\<\<-?[[:space:]]*[\"\']?[A-Za-z_]+[\"\']?(.*)$ ]]; then
    command=${BASH_REMATCH[1]}${BASH_REMATCH[2]}  # without the text that it reads
  fi
  case $first in
    \[|\[\[|test|\(\(*)  # in one of three runs it is true, in the others mostly false
      __is_unknown "$command" && __skipped && [[ $__unknown == *-2 ]] && ((__met++ < 9)) && return 1
      return 0;;
    __*|for|case|select|while|until|if|function) return 0;;
    :|echo|printf|true|false|cd|pwd|pushd|popd|break|continue|return|exit|shift|export|local\
    |declare|typeset|readonly|unset|read|mapfile|readarray|let|getopts|wait|type|eval)
      name=${command//>> \"\$(__to /}
      [[ ${name//> \"\$(__to /} =~ $__writes ]] || return 0
      __said=()
      [[ $first == eval ]] && ! __substitutes "$command" && eval "__said=($command)" 2>/dev/null
      if [[ $first == eval && ${__said[*]-} != *[\;\&\|\(\)\`]* ]] && __words "${__said[*]:1}"
      then __external "${__said[@]}" >/dev/null; else __skipped; fi
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
      __skipped; return 1;;
  esac
  __words "$__rest" && ((${#__said[@]})) || { __skipped; return 1; }
  if [[ ${__said[0]} == exec ]] && __substitutes "$command"; then
    exec() { __external "$@"; exit 0; }; return 0
  fi
  if [[ ${__said[0]} == exec || $__rest =~ $__writes ]]; then
    __substitutes "$command" && { __skipped; return 1; }
    ( eval "export ${command%"$__rest"}"; __external "${__said[@]}" ) >/dev/null 2>&1
    return 1
  fi
  name=${__said[0]}
  declare -F -- "$name" >/dev/null || [[ $(type -t -- "$name") == builtin ]] && return 0
  printf -v name %q "$name"
  eval "$name() { __external $name \"\$@\"; }" 2>/dev/null || { __skipped; return 1; }
}
__skips() { ! __before; }
shopt -s extdebug
trap '! __skips' DEBUG  # a failure that `set -e` does not end with
