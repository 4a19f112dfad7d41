#!/bin/sh
# Prints the first Python that can hold the project's environment: CPython 3.12 or newer, a final
# release, with venv and ensurepip. Arguments are the candidates to try instead of the usual ones.
# Each candidate is run, because a pyenv shim can exist for a version that is not selected.
# Never downloads anything. Exit 1, with what was tried, when no candidate will do.

probe='
import sys
try:
    import ensurepip, venv
    complete = "complete"
except ImportError:
    complete = "incomplete"
implementation, version = sys.implementation.name, sys.version_info
print(implementation, version.major, version.minor, version.releaselevel, complete)
'
tried=''

# Prints why the candidate $1 will not do, or nothing when it will.
refusal() {
    reply=$("$1" -I -c "$probe" 2>/dev/null </dev/null) || { echo 'does not run'; return; }
    # shellcheck disable=SC2086  # the reply is five words
    set -- $reply
    if [ "${1:-}" != cpython ] || [ "${4:-}" != final ]; then
        echo "not a final release of CPython: ${reply:-no version}"
    elif [ "$2" -ne 3 ] || [ "$3" -lt 12 ]; then
        echo "is $2.$3"
    elif [ "${5:-}" != complete ]; then
        echo "is $2.$3 but lacks venv or ensurepip; on Debian: apt-get install python$2.$3-venv"
    fi
}

# Ends the script when the candidate $1 will do, otherwise records why not.
consider() {
    reason=$(refusal "$1")
    [ -n "$reason" ] || { command -v "$1"; exit 0; }
    tried="$tried
  $1: $reason"
}

if [ $# -gt 0 ]; then
    for candidate in "$@"; do consider "$candidate"; done
else
    for candidate in python3.14 python3.13 python3.12 python3 python; do
        if command -v "$candidate" >/dev/null; then
            consider "$candidate"
        else
            tried="$tried
  $candidate: not on PATH"
        fi
    done
    versions=${PYENV_ROOT:-$HOME/.pyenv}/versions
    for version in $(ls "$versions" 2>/dev/null | grep '^3\.' | sort -rV); do
        [ -x "$versions/$version/bin/python" ] && consider "$versions/$version/bin/python"
    done
fi

cat >&2 <<MESSAGE
No suitable Python: codec_jax needs CPython 3.12 or newer with its venv module. Tried:$tried
Install one, or name it: make <target> PYTHON=/path/to/python3.12
MESSAGE
exit 1
