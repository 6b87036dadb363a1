#!/usr/bin/env bash
# Names what is missing to build gflow, and what to do about it. Changes nothing.
set -u
python=${1:-python3}
missing=0

need() { # need WHAT HOW
  echo "gflow: missing: $1" >&2
  echo "       $2" >&2
  missing=1
}

if ! command -v "$python" >/dev/null; then
  need "Python ($python)" "install Python 3.10 or newer, or name it: make PYTHON=/path/to/python3"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  need "Python 3.10 or newer ($python is $("$python" -V 2>&1))" \
    "install a newer one and name it: make PYTHON=python3.11"
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  need "Python's venv module" "on Debian or Ubuntu: apt-get install python3-venv"
elif ! "$python" -c 'import os, sysconfig
open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null; then
  need "Python's headers" "on Debian or Ubuntu: apt-get install python3-dev"
fi

if ! command -v cargo >/dev/null; then
  need "cargo, Rust's build tool (1.89 or newer)" "install Rust with rustup, or your system's packages"
elif ! cargo_version=$(cargo --version) || ! printf '1.89\n%s\n' "$(cut -d' ' -f2 <<<"$cargo_version")" | sort -C -V; then
  need "cargo 1.89 or newer (this is ${cargo_version:-unknown})" "rustup update stable"
fi

compiler=${CXX:-g++}
if ! command -v "$compiler" >/dev/null; then
  need "a C++20 compiler ($compiler)" "on Debian or Ubuntu: apt-get install g++ (11 or newer), or set CXX"
elif ! echo '#include <concepts>
template <class T> concept C = requires(T t) { t + t; }; int main() {}' |
  "$compiler" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null; then
  need "a compiler that knows C++20 ($compiler does not)" "install g++ 11 or newer, or set CXX"
fi
exit $missing
