#!/bin/sh
# The quickstart: prints and runs the commands of a real run, and stops that run once on purpose.
#   prepare -> train on two ranks, stopped by SIGTERM (exit code 75) -> the same command continues -> generate
# Safe to repeat: each command continues what it finds. `make quickstart` calls it with .venv/bin on the PATH.
# A script beside its config, not Makefile lines: whoever installed the wheel can run it too.
set -eu

run=runs/quickstart
stop_at=100 # checkpoint.every_steps of quickstart.yaml: the run is stopped once this step is committed
last=700    # train.steps of quickstart.yaml
train="pretrain launch local configs/run/quickstart.yaml --ranks 2"

show() { printf '\n$ %s\n' "$1"; }
note() { printf '\n-- %s\n' "$1"; }
clear_bar() { [ ! -t 2 ] || printf '\r\033[K' >&2; } # a running command draws its bar again, below the next line
fail() { printf '\nquickstart failed: %s\n' "$1" >&2; exit 1; }

pid= # of the run that is stopped on purpose

interrupted() { # Ctrl-C: without a trap the shell would leave at once, and a run that saves talk over the prompt
    trap '' INT TERM
    [ -z "$pid" ] || { kill "$pid" 2>/dev/null || :; wait "$pid" || :; }
    note "interrupted; make quickstart continues"
    exit 130
}
trap interrupted INT TERM

committed_step() { # the step of the newest checkpoint, 0 without one
    name=$(ls "$run/checkpoints" 2>/dev/null | grep -E '^step-[0-9]+$' | tail -n 1)
    printf '%s\n' "$name" | sed 's/^step-0*//; s/^$/0/'
}

prepare="pretrain prepare --output data/stdlib --vocab-size 2048"
show "$prepare"
$prepare || fail "prepare ended with exit code $?"

if [ "$(committed_step)" -lt "$stop_at" ]; then
    show "$train"
    $train &
    pid=$!
    # What is committed never goes back, unlike the metrics of a run that was killed: no clock, no stale row.
    while [ "$(committed_step)" -lt "$stop_at" ]; do
        kill -0 "$pid" 2>/dev/null || { wait "$pid" || fail "the run ended with exit code $?"; break; }
        sleep 1
    done
    clear_bar
    note "kill -TERM $pid: stopping the run in the middle, as a preemption would"
    code=0
    kill -TERM "$pid" 2>/dev/null || :
    wait "$pid" || code=$?
    pid=
    [ "$code" -eq 75 ] || fail "the stopped run ended with exit code $code, not 75"
    [ "$(committed_step)" -gt "$stop_at" ] || fail "the stop left no checkpoint of its own"
    note "exit code 75, \"resume me\": step $(committed_step) is committed, the same command continues"
fi

if [ "$(committed_step)" -lt "$last" ]; then
    show "$train"
    $train || fail "the continued run ended with exit code $?"
    [ "$(committed_step)" -eq "$last" ] || fail "the run ended at step $(committed_step), not $last"
else
    note "$run is finished; remove the folder to train it again"
fi

show "pretrain generate $run --prompt 'def '"
pretrain generate "$run" --prompt 'def ' || fail "generate ended with exit code $?"
