#!/usr/bin/env bash
# ./launch.sh CONFIG TASK [task flags]      ./launch.sh multi_gpu classify --train_file train.csv
# ./launch.sh auto TASK [task flags]        the config that suits this machine
# ./launch.sh --dry-run CONFIG TASK …       print the command, start nothing
#
# CONFIG is a name from accelerate_configs/ or a yaml file, TASK a name from tasks/. Environment:
#   NPROC                                       processes on this machine (default: one a GPU; without GPUs
#                                               num_processes of the config, for a rehearsal on the CPU)
#   OMP_NUM_THREADS                             threads a process (default: cores / processes)
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT several machines; start it once on each. Under SLURM they are
#                                               read from the job: srun --ntasks-per-node=1 ./launch.sh …
#
# Exit code 75: it was told to stop (SIGTERM, Ctrl-C, SIGUSR1), and has left a checkpoint to go on from.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() { echo "error: $*" >&2; exit 2; }
names() { (cd "$root/$1" && for file in *"$2"; do [ "$file" = "*$2" ] || printf '%s ' "${file%"$2"}"; done); }

dry_run=
if [ "${1:-}" = --dry-run ]; then dry_run=1; shift; fi
if [ $# -lt 2 ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    echo "configs: auto $(names accelerate_configs .yaml)" >&2
    echo "tasks:   $(names tasks .py)" >&2
    exit 2
fi
config=$1 task=$2
shift 2
if [ "${1:-}" = --dry-run ]; then dry_run=1; shift; fi

command -v accelerate >/dev/null || fail "accelerate is not on the PATH; activate its environment."
script=$root/tasks/$task.py
[ -f "$script" ] || fail "there is no task $task. Tasks: $(names tasks .py)"
if [ "$config" = auto ]; then
    config=$(PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} python -m toolkit.cli check --recommend "$@")
fi
file=$root/accelerate_configs/$config.yaml
if [ ! -f "$file" ]; then file=$config; fi
[ -f "$file" ] || fail "there is no config $config. Configs: auto $(names accelerate_configs .yaml)"

# Processes on this machine: one a visible GPU.
count_gpus() {
    if ! command -v nvidia-smi >/dev/null; then echo 0; return; fi
    case ${CUDA_VISIBLE_DEVICES-all} in
        all) nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true ;;
        "" | -*) echo 0 ;;
        *) echo "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c . ;;
    esac
}
# The value of a key of the config, without quotes.
value() { sed -n "s/^ *$1: *['\"]\{0,1\}\([A-Za-z0-9_]*\).*/\1/p" "$file" | sed -n 1p; }
kind=$(value distributed_type)
processes=1
if [ "$kind" != NO ]; then
    gpus=$(count_gpus)
    if [ "$gpus" -eq 0 ]; then gpus=$(value num_processes); fi # a rehearsal on the CPU
    processes=${NPROC:-${gpus:-2}}
fi
cores=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
threads=$((cores > processes ? cores / processes : 1))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}

# Several machines.
nodes=${NNODES:-${SLURM_NNODES:-1}}
options=(--num_processes $((processes * nodes)))
if [ "$nodes" -gt 1 ]; then
    [ "$kind" != NO ] || fail "config $config is one process, but NNODES is $nodes; use multi_gpu."
    rank=${NODE_RANK:-${SLURM_NODEID:-}}
    address=${MASTER_ADDR:-}
    if [ -z "$address" ] && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
        address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    fi
    [ -n "$rank" ] || fail "NNODES is $nodes: set NODE_RANK, 0 on the first machine to $((nodes - 1))."
    [ -n "$address" ] || fail "NNODES is $nodes: set MASTER_ADDR to the address of the first machine."
    options+=(--num_machines "$nodes" --machine_rank "$rank")
    options+=(--main_process_ip "$address" --main_process_port "${MASTER_PORT:-29500}")
fi

# Shards take the GPUs that replicas and tensor groups leave.
shards=$(value parallelism_config_dp_shard_size)
if [ "${shards:-1}" -gt 1 ]; then
    replicas=$(value parallelism_config_dp_replicate_size) tensor=$(value parallelism_config_tp_size)
    fitting=$((processes * nodes / (${replicas:-1} * ${tensor:-1})))
    if [ "$fitting" -gt 1 ] && [ "$fitting" -ne "$shards" ]; then
        options+=(--parallelism_config_dp_shard_size "$fitting")
    fi
fi

# Flags that the config needs from the task, from its head, unless they are given.
read -r -a head <<<"$(sed -n -e '/^[^#]/q' -e 's/^# flags: *//p' "$file" | tr '\n' ' ')"
needed=() missing=
for word in ${head[@]+"${head[@]}"}; do
    if [[ $word = --* ]]; then
        missing=1
        for given in "$@"; do if [ "${given%%=*}" = "$word" ]; then missing=; fi; done
    fi
    if [ -n "$missing" ]; then needed+=("$word"); fi
done
# --quiet: accelerate adds no traceback to what one process has said (torchrun's, with several, cannot be left out).
command=(accelerate launch --quiet --config_file "$file" "${options[@]}"
    "$script" "$@" ${needed[@]+"${needed[@]}"})
if [ -n "$dry_run" ]; then
    printf 'OMP_NUM_THREADS=%s' "$OMP_NUM_THREADS"
    printf ' %q' "${command[@]}"
    echo
    exit
fi
# What asks for a stop is for the processes alone, which write a checkpoint and end: the launcher would die of it, or kill
# them after 30 s. As a job of its own it gets none from the terminal; a scheduler may send them to all processes.
told=$(mktemp)
trap 'rm -f "$told"' EXIT
set -m
(
    trap '' TERM INT USR1
    export PET_SIGNALS_TO_HANDLE=SIGHUP,SIGQUIT TOOLKIT_INTERRUPTED_FILE=$told
    exec "${command[@]}"
) </dev/null & # which could not read from the terminal
job=$!
children() { cat "/proc/$job/task/"*/children 2>/dev/null || pgrep -P "$job"; }
for signal in TERM INT USR1; do trap "kill -$signal \$(children) 2>/dev/null || true" "$signal"; done
trap 'kill -HUP -- "-$job" 2>/dev/null || true' HUP
code=0
wait "$job" || code=$?
while kill -0 "$job" 2>/dev/null; do # only a signal came
    code=0
    wait "$job" || code=$?
done
if [ -s "$told" ]; then code=75; fi # EX_TEMPFAIL: the same command with --resume_from_checkpoint auto goes on
exit "$code"
