#!/bin/bash
# Runs a rank of an elastic run, and starts it again if it dies (docs/elastic.md). For launchers that start no process
# again. The launcher sees only this shell, so the death of a rank does not end the others:
#
#   mpirun -np 4 examples/elastic_rank.sh build/release/examples/train_gpt --elastic --rendezvous out/elastic ...
#
# RESTARTS (3) limits the restarts of each rank. 0, 2 (wrong options) and the codes of Ctrl-C, SIGTERM and SIGUSR1, after
# which the program has saved its state, end the rank.
restarts=${RESTARTS:-3}
trap : INT TERM USR1  # launchers send signals to the shell, too, which must live until the program has saved
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}  # c10d prints a stack trace of each lost connection
while true; do
  "$@"
  code=$?
  case $code in 0 | 2 | 130 | 138 | 143) exit $code ;; esac
  ((restarts-- > 0)) || exit $code
  export TESSERA_ELASTIC_JOIN=1
done
