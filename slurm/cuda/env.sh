# Sourced by slurm/launch.sh in the batch script: load your site's modules and set its variables here.
export OMP_NUM_THREADS=1
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-^lo,docker}" # which card the ranks find each other on
