# Frontier's modules and variables for RCCL over Slingshot, with the reason of each. Sourced by
# slurm/launch.sh in the batch script. Sources: OLCF software page "PyTorch on Frontier" (July 2026) and HPE's
# shs-ccl-docs.
module load PrgEnv-gnu/8.7.0 cpe/26.03 rocm/7.1.1 craype-accel-amd-gfx90a
module load rccl-net-plugin # without it RCCL uses TCP; sets NCCL_NET_PLUGIN
export LD_LIBRARY_PATH="$CRAY_LD_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

# The environment staged on each node's NVMe (slurm/frontier/stage.sh); from NFS, importing torch takes
# minutes.
if [ -n "${LOWBAND_ENV_TAR:-}" ]; then
  source slurm/frontier/stage.sh "$LOWBAND_ENV_TAR"
fi
# Or a container (docs/sites.md), with the host's libraries for the plugin.
if [ -n "${LOWBAND_SIF:-}" ]; then
  export APPTAINERENV_LD_LIBRARY_PATH="$LD_LIBRARY_PATH"
  container=(apptainer exec --rocm --bind "$PWD,/opt/cray" "$LOWBAND_SIF")
fi

export MASTER_PORT=3442
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 # the Slingshot cards; only hsn0 if a job hangs at its start
if [ "${SLURM_JOB_NUM_NODES:-$nodes}" -gt 1 ]; then
  export NCCL_NET=OFI # RCCL fails if the plugin does not load, instead of falling back to TCP
fi
export NCCL_CROSS_NIC=1           # rings may change cards between nodes
export NCCL_NET_GDR_LEVEL=PHB     # cards read GPU memory directly
export HSA_FORCE_FINE_GRAIN_PCIE=1
export FI_MR_CACHE_MONITOR=kdreg2 # never memhooks, which dead-locks with RCCL
export FI_CXI_DISABLE_HOST_REGISTER=1 # avoids a dead-lock in memory registration
export FI_CXI_DEFAULT_CQ_SIZE=131072  # large jobs overflow the default queues
export FI_CXI_DEFAULT_TX_SIZE=2048
export FI_CXI_RDZV_PROTO=alt_read # needs --network=disable_rdzv_get on the job (job.yaml)
export FI_CXI_RDZV_EAGER_SIZE=0
export FI_CXI_RDZV_THRESHOLD=0
export FI_CXI_RDZV_GET_MIN=0
export FI_CXI_RX_MATCH_MODE=hybrid # matching falls back to software when the card's table is full
export OMP_NUM_THREADS=1
# Kernel caches on local disk: on a shared one many ranks would write the same file.
export MIOPEN_USER_DB_PATH="/tmp/$USER-miopen-$SLURM_JOB_ID"
export MIOPEN_CUSTOM_CACHE_DIR="$MIOPEN_USER_DB_PATH"
export TORCH_EXTENSIONS_DIR="/tmp/$USER-torch-extensions-$SLURM_JOB_ID"
export TRITON_CACHE_DIR="/tmp/$USER-triton-$SLURM_JOB_ID" # else in $HOME, which is NFS
export TORCHINDUCTOR_CACHE_DIR="/tmp/$USER-inductor-$SLURM_JOB_ID"
srun --nodes="$nodes" --ntasks-per-node=1 mkdir -p "$MIOPEN_USER_DB_PATH" "$TORCH_EXTENSIONS_DIR" \
  "$TRITON_CACHE_DIR" "$TORCHINDUCTOR_CACHE_DIR"
# No PYTORCH_ALLOC_CONF=expandable_segments:True: on ROCm it can hang (pytorch#192259).
# ROCR_VISIBLE_DEVICES is Slurm's: --gpu-bind shows each rank one GCD, which torch calls device 0.
