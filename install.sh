#!/usr/bin/env bash
# Sets up TreeEagle Edge in .venv beside this file, once, then runs what was asked for:
#
#   ./install.sh                     set up only, the demo model included
#   ./install.sh chat -p "Hello"     any words but "test" go to the treeeagle command
#   ./install.sh test [ARGUMENTS]    run the tests; without arguments the whole suite, with its coverage report
#
# Set-up talks on stderr only. Arguments, stdin and exit codes pass through.
#   PYTHON=/path/to/python3   the Python to build on (3.11, 3.12 or 3.13)
#   TREEEAGLE_TORCH=torch==X  another build of PyTorch than the one chosen here
# Both count when the environment is made; to choose again, delete .venv.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
venv="$here/.venv"
log="$venv/setup.log"
installing="$venv/installing" # there while pip writes: a set-up that was killed then is built anew
cpu_torch="torch==2.13.0+cpu"
any_torch="torch>=2.11"
cpu_index="https://download.pytorch.org/whl/cpu" # PyTorch's public index of CPU builds

say() { printf 'treeeagle: %s\n' "$*" >&2; }

fail() { # sentence, hint
  printf 'error: %s\n hint: %s\n' "$1" "$2" >&2
  exit 3
}

# --- what is set up already ------------------------------------------------------------------------------------

# Changes with this file, with pyproject.toml, and when the folder moves (an environment holds absolute paths).
key="$({ printf '%s\n' "$here" && cat "$here/pyproject.toml" "$here/install.sh"; } | cksum)"

is_ready() { # run | test
  [ -x "$venv/bin/python" ] && [ -x "$venv/bin/treeeagle" ] && [ "$(cat "$venv/ready-$1" 2>/dev/null)" = "$key" ]
}

# --- Python ----------------------------------------------------------------------------------------------------

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null; }

is_supported() {
  case "$1" in 3.11 | 3.12 | 3.13) return 0 ;; *) return 1 ;; esac
}

find_python() { # sets $python
  local candidate version seen="" without_venv=""
  set -- python3.11 python3.12 python3.13 python3 # 3.11 first: it is the one tested most
  [ -z "${PYTHON:-}" ] || set -- "$PYTHON"
  for candidate; do
    version="$(version_of "$candidate")" || version=""
    [ -z "$version" ] || seen="$version"
    is_supported "$version" || continue
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null </dev/null; then
      python="$candidate"
      return
    fi
    without_venv="${without_venv:-$version}"
  done
  if [ -n "$without_venv" ]; then
    fail "Python $without_venv is here, but it cannot make virtual environments" \
      "on Debian and Ubuntu: sudo apt install python$without_venv-venv"
  elif [ -n "${PYTHON:-}" ]; then
    fail "PYTHON is $PYTHON, which is ${seen:+Python $seen and }not a Python 3.11, 3.12 or 3.13" \
      "unset PYTHON, or point it to such a Python"
  fi
  fail "no Python 3.11, 3.12 or 3.13 was found${seen:+ (python3 is $seen)}" \
    "install one (Debian, Ubuntu: sudo apt install python3 python3-venv; macOS: brew install python@3.12), or set PYTHON to it"
}

# --- set-up ----------------------------------------------------------------------------------------------------

# One set-up at a time: the lock is on this file and belongs to descriptor 9, which outlives the Python that takes it.
take_lock() {
  exec 9<"$here/install.sh"
  "$python" - <<'PYTHON'
import contextlib, fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("treeeagle: another set-up is running; waiting for it", file=sys.stderr, flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError:  # a file system without locks: nothing to wait for
    pass
PYTHON
}

make_environment() {
  local words
  if [ -e "$installing" ]; then
    say "the last set-up was interrupted; building the environment anew"
  elif [ "$(cat "$venv/place" 2>/dev/null || printf '%s' "$here")" = "$here" ] && # a moved one has wrong paths inside
    is_supported "$(version_of "$venv/bin/python")" && "$venv/bin/python" -m pip --version >/dev/null 2>&1 </dev/null; then
    printf '%s\n' "$here" >"$venv/place"
    return
  fi
  say "making an environment with Python $(version_of "$python") in $venv"
  words="$("$python" -m venv --clear "$venv" 2>&1 </dev/null)" ||
    fail "the environment in $venv cannot be made: $(printf '%s' "$words" | tail -n 1)" "check the disk and the permissions of $here"
  printf '%s\n' "$here" >"$venv/place"
}

# pip's lines and bars go to stderr, its complaints to the log, where `explain` looks for their cause.
pip_install() {
  : >"$installing"
  : >"$log"
  local status=0 pip=(env PIP_USER=0 "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --retries 3 --log "$log")
  if [ -t 2 ]; then
    "${pip[@]}" "$@" >&2 2>>"$log" 9<&- </dev/null || status=$?
  else # no bar without a terminal: a line for each large download will do
    "${pip[@]}" "$@" 2>>"$log" 9<&- </dev/null |
      awk '/ (Downloading|Using cached) .* [MG]B\)/ { print; fflush() } /^Installing/ { print "  Installing"; fflush() }' >&2 || status=$?
  fi
  # nothing was touched unless pip came as far as installing
  if [ "$status" -eq 0 ] || ! grep -q 'Installing collected packages' "$log"; then rm -f "$installing"; fi
  return "$status"
}

has_no_network() {
  grep -qE 'NewConnectionError|Failed to establish|ConnectTimeout|Read timed out|NameResolution|name resolution|ConnectionReset|Connection broken|ProxyError|ProtocolError|SSLError' "$log"
}

explain() { # what could not be installed
  local reason
  if grep -q 'No space left on device' "$log"; then
    fail "the disk is full: $1 cannot be installed" "free 4 GB for $venv and pip's cache, then run the same command again"
  elif has_no_network; then
    fail "the package index does not answer: $1 cannot be installed" \
      "check the network and pip's proxy and index settings, then run the same command again (log: $log)"
  fi
  reason="$(sed -n 's/.*ERROR: //p' "$log" | tail -n 1)"
  fail "$1 cannot be installed: ${reason:-pip stopped without a reason}" "the whole log is $log"
}

has_nvidia_gpu() { # WSL keeps the tool in a folder of its own
  local smi
  smi="$(command -v nvidia-smi || printf '/usr/lib/wsl/lib/nvidia-smi')"
  "$smi" -L >/dev/null 2>&1 </dev/null
}

# Without an NVIDIA GPU the plain PyTorch wheel for Linux on x86-64 brings gigabytes of CUDA along. A "+cpu" version can
# only be a CPU build, so asking for it first is safe: it is there, or pip says at once that it is not.
install_torch() {
  local tools="setuptools>=77"
  if [ -n "${TREEEAGLE_TORCH:-}" ]; then
    say "installing $TREEEAGLE_TORCH, as TREEEAGLE_TORCH asks"
    pip_install "$TREEEAGLE_TORCH" "$tools" || explain "$TREEEAGLE_TORCH"
  elif [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
    say "installing PyTorch"
    pip_install "$any_torch" "$tools" || explain PyTorch
  elif has_nvidia_gpu; then
    say "installing PyTorch with CUDA, for the NVIDIA GPU (some 3 GB)"
    pip_install "$any_torch" "$tools" || explain PyTorch
  else
    say "installing PyTorch for the CPU (some 200 MB)"
    pip_install "$cpu_torch" "$tools" && return
    if has_no_network; then explain PyTorch; fi
    say "the index has no CPU build; asking PyTorch's own index"
    pip_install --extra-index-url "$cpu_index" "$cpu_torch" "$tools" || explain "the CPU build of PyTorch"
  fi
}

set_up() { # run | test
  local extra="" start=$SECONDS
  [ "$1" = run ] || extra="[test]"
  find_python
  take_lock
  if is_ready "$1"; then # by the set-up that was waited for
    exec 9<&-
    return
  fi
  trap 'say "interrupted; the same command goes on with the set-up"; exit 130' INT
  say "setting up, once"
  make_environment
  install_torch
  say "installing treeeagle and what it needs (some 400 MB)"
  pip_install --no-build-isolation --editable "$here$extra" || explain treeeagle
  say "looking for the demo model"
  "$venv/bin/python" -P -m treeeagle_edge.sources.demo_model </dev/null 9<&- || exit $?
  say "building the native kernels" # without a compiler PyTorch's own operations serve
  "$venv/bin/python" -P -m treeeagle_edge.kernels.native.loader >&2 </dev/null 9<&- || true
  printf '%s\n' "$key" >"$venv/ready-run"
  [ "$1" = run ] || printf '%s\n' "$key" >"$venv/ready-test"
  trap - INT
  exec 9<&-
  say "set up in $((SECONDS - start)) s"
}

# --- what was asked for ----------------------------------------------------------------------------------------

kind=run
[ "${1-}" != test ] || kind=test
is_ready "$kind" || set_up "$kind"

case "${1-}" in
  "") say "ready: start with ./install.sh chat" ;;
  test)
    shift
    cd "$here" # -P: or Python would take the folder kernels for a package of that name
    if [ "$#" -gt 0 ]; then exec "$venv/bin/python" -P -m pytest "$@"; fi
    # files are shared out in the order of their names: those that take longest are not among the last
    exec "$venv/bin/python" -P -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=10 \
      --cov --cov-report=term:skip-covered --cov-fail-under=85
    ;;
  *) exec "$venv/bin/treeeagle" "$@" ;;
esac
