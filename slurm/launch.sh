#!/usr/bin/env bash
# Run a command as the ranks of a job.
# usage: slurm/launch.sh CLUSTER NODES TASKS_PER_NODE SRUN_OPTIONS COMMAND...
# In a Slurm job: by srun, in the environment of slurm/CLUSTER/env.sh. Elsewhere: directly; the command then
# starts its own ranks.
set -euo pipefail
cluster=$1 nodes=$2 tasks_per_node=$3 options=$4
shift 4
if [ -z "${SLURM_JOB_ID:-}" ]; then
  exec "$@"
fi
# The batch script runs on the job's first node, where rank 0 will be. Some systems resolve a host's own name
# to loopback. The port is the job's own, below those that the system gives away: jobs may share a node.
MASTER_ADDR=$(hostname -i | tr ' ' '\n' | grep -v '^127\.' | head -1 || true)
export MASTER_ADDR=${MASTER_ADDR:-$(hostname)} MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
unset SLURM_EXPORT_ENV # of `sbatch --export=NONE`: tasks would not get this script's variables either
container=()           # a site's file may name one, and how to start in it
if [ -f "slurm/$cluster/env.sh" ]; then
  set +u # a site's file may use unset variables
  # shellcheck source=/dev/null
  source "slurm/$cluster/env.sh"
  set -u
fi
# A failed task ends the step; otherwise the others would wait for it. Ranks must fill node after node,
# because levels are groups of consecutive ranks (spec/machine.py), and a site's default may distribute tasks
# cyclically.
# shellcheck disable=SC2086 # the options are several words
exec srun --kill-on-bad-exit=1 --distribution=block --nodes="$nodes" --ntasks-per-node="$tasks_per_node" $options "${container[@]}" "$@"
