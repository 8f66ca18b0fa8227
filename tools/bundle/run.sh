#!/bin/sh
# Runs this folder's trainer under its ddprun, on one node or, once on each, on many:
#
#   ./run [ddprun's flags] [-- the trainer's flags]
#
# This folder is all that it needs besides a C library and /bin/sh. Without LibTorch in it,
# TORCH_PATH names a folder with torch @TORCH@.
set -eu
here=$(dirname -- "$(readlink -f -- "$0")")

fail() {
  printf '%s/run: %s\n' "$here" "$*" >&2
  exit 2
}

if [ ! -e "$here/lib/libtorch_cpu.so" ]; then
  torch=${TORCH_PATH:-}
  wanted='set TORCH_PATH to the folder of torch @TORCH@ that holds lib/libtorch_cpu.so'
  [ -n "$torch" ] || fail "this bundle carries no LibTorch: $wanted"
  [ -e "$torch/lib/libtorch_cpu.so" ] ||
    fail "TORCH_PATH=$torch has no lib/libtorch_cpu.so: $wanted"
  found=$(cat "$torch/version.py" "$torch/build-version" 2>/dev/null |
    sed -n "s/^__version__ = '//; s/^\([0-9][0-9.]*\).*/\1/p" | head -n 1)
  [ "$found" = @TORCH@ ] ||
    fail "TORCH_PATH=$torch holds torch ${found:-of no known version};" \
      "this trainer needs @TORCH@, which it was built with"
  LD_LIBRARY_PATH=$(readlink -f -- "$torch/lib")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export LD_LIBRARY_PATH
fi

# The trainer, with the flags that it always gets, stands where the first -- stood, or at the end.
trainer_follows=yes
for word; do
  shift
  if [ "$trainer_follows" = yes ] && [ "$word" = -- ]; then
    trainer_follows=no
    set -- "$@" "$here/"@TRAINER@ @ARGUMENTS@
  else
    set -- "$@" "$word"
  fi
done
[ "$trainer_follows" = no ] || set -- "$@" "$here/"@TRAINER@ @ARGUMENTS@
exec "$here/ddprun" "$@"
