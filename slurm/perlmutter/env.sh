# Perlmutter's modules and variables for NCCL over Slingshot, with the reason of each. Sourced by slurm/launch.sh in
# the batch script. Source: NERSC's own file for NCCL with the plugin, github.com/NERSC/nccl-ofi-plugin, env_nccl.sh at
# be098716 (January 2025). Not tried there: `lowband doctor --site perlmutter` says what is missing.
module load nccl # with NERSC's plugin for libfabric, without which NCCL uses TCP

# A container in place of the shell's Python: docs/sites.md.
if [ -n "${LOWBAND_SIF:-}" ]; then
  container=(apptainer exec --nv --bind "$PWD" "$LOWBAND_SIF")
fi

export NCCL_SOCKET_IFNAME=hsn # the Slingshot cards
if [ "${SLURM_JOB_NUM_NODES:-$nodes}" -gt 1 ]; then
  export NCCL_NET="AWS Libfabric" # NCCL fails if the plugin does not load, instead of falling back to TCP
fi
export NCCL_CROSS_NIC=1       # rings may change cards between nodes
export NCCL_NET_GDR_LEVEL=PHB # cards read GPU memory directly
export FI_CXI_DISABLE_HOST_REGISTER=1 # avoids a dead-lock in memory registration
export OMP_NUM_THREADS=1
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}" # as on slurm/cuda
# Compiled kernels on local disk: on a shared one all ranks would write the same files.
export TRITON_CACHE_DIR="/tmp/$USER-triton-$SLURM_JOB_ID"
export TORCHINDUCTOR_CACHE_DIR="/tmp/$USER-inductor-$SLURM_JOB_ID"
