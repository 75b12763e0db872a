# Sourced by slurm/launch.sh in the batch script: load your site's modules and set its variables here.
export OMP_NUM_THREADS=1
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-^lo,docker}" # which card the ranks find each other on
# Gathered units of several 100 MB come and go between activations: segments that grow leave fewer gaps.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
# Compiled kernels on local disk: on a shared one every rank writes the same files.
export TRITON_CACHE_DIR="/tmp/$USER-triton-$SLURM_JOB_ID"
export TORCHINDUCTOR_CACHE_DIR="/tmp/$USER-inductor-$SLURM_JOB_ID"
