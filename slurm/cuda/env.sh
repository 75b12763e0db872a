# Sourced by slurm/launch.sh in the batch script: load your site's modules and set its variables here.
export OMP_NUM_THREADS=1
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-^lo,docker}" # the card over which ranks find each other
# Gathered units of several 100 MB are allocated and freed between activations: growing segments leave fewer
# gaps.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
# Compiled kernels on local disk: on a shared one all ranks would write the same files.
export TRITON_CACHE_DIR="/tmp/$USER-triton-$SLURM_JOB_ID"
export TORCHINDUCTOR_CACHE_DIR="/tmp/$USER-inductor-$SLURM_JOB_ID"
