# Copy a packed environment to the NVMe of every node of the job, unpack it there and activate it.
# Sourced before each run of a job with the path of a .tar.gz made by `conda pack` (or of a relocatable venv); copied once.
staged=/mnt/bb/$USER/lowband-env
if [ ! -e "$staged/of-job-$SLURM_JOB_ID" ]; then
  sbcast --preserve --force "$1" "/mnt/bb/$USER/lowband-env.tar.gz" || {
    echo "sbcast of $1 failed: a partial copy would be used" >&2
    exit 1
  }
  per_node=(srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1)
  "${per_node[@]}" mkdir -p "$staged"
  "${per_node[@]}" tar --use-compress-program=pigz -xf "/mnt/bb/$USER/lowband-env.tar.gz" -C "$staged"
  if [ -x "$staged/bin/conda-unpack" ]; then
    "${per_node[@]}" "$staged/bin/conda-unpack"
  fi
  "${per_node[@]}" touch "$staged/of-job-$SLURM_JOB_ID"
fi
export PATH="$staged/bin:$PATH"
