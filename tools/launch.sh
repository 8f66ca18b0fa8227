#!/usr/bin/env bash
# What `bazel run //some:trainer.launch -- [ddprun's flags] -- [the trainer's flags]` runs.
#
# Usage: launch.sh DDPRUN TRAINER N [N flags that the trainer always gets] [ddprun's flags]
#                  [-- the trainer's flags]
set -eu
ddprun=$PWD/$1
trainer=$PWD/$2
fixed=("${@:4:$3}")
shift $((3 + $3))
launcher_flags=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  launcher_flags+=("$1")
  shift
done
[ $# -eq 0 ] || shift
# Relative paths in the flags mean the folder where the user stands.
cd "${BUILD_WORKING_DIRECTORY:-$PWD}"
exec "$ddprun" ${launcher_flags[@]+"${launcher_flags[@]}"} "$trainer" ${fixed[@]+"${fixed[@]}"} "$@"
