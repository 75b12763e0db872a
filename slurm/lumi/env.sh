# LUMI's modules and variables for RCCL over Slingshot, with the reason of each. Sourced by slurm/launch.sh in the
# batch script. Source: docs.lumi-supercomputer.eu/software/packages/pytorch (October 2024). Not tried there: `lowband
# doctor --site lumi` says what is missing.
module load LUMI partition/G
module load aws-ofi-rccl # without it RCCL uses TCP; that page shows how a user installs it by EasyBuild

# LUMI recommends containers, because many small files are slow on Lustre: docs/sites.md.
if [ -n "${LOWBAND_SIF:-}" ]; then
  module load singularity-bindings # /opt/cray and libcxi of the host, for the plugin
  export SINGULARITYENV_LD_LIBRARY_PATH="$LD_LIBRARY_PATH"
  container=(singularity exec --rocm --bind "$PWD" "$LOWBAND_SIF")
fi

export NCCL_SOCKET_IFNAME=hsn # the Slingshot cards
export NCCL_NET_GDR_LEVEL=3   # cards read GPU memory directly
export CXI_FORK_SAFE=1 CXI_FORK_SAFE_HP=1
export FI_CXI_DISABLE_CQ_HUGETLB=1
export OMP_NUM_THREADS=1
# Kernel caches in memory: nodes have no disk, and on Lustre many ranks would write the same file.
export MIOPEN_USER_DB_PATH="/tmp/$USER-miopen-$SLURM_JOB_ID"
export MIOPEN_CUSTOM_CACHE_DIR="$MIOPEN_USER_DB_PATH"
export TORCH_EXTENSIONS_DIR="/tmp/$USER-torch-extensions-$SLURM_JOB_ID"
export TRITON_CACHE_DIR="/tmp/$USER-triton-$SLURM_JOB_ID"
export TORCHINDUCTOR_CACHE_DIR="/tmp/$USER-inductor-$SLURM_JOB_ID"
srun --nodes="$nodes" --ntasks-per-node=1 mkdir -p "$MIOPEN_USER_DB_PATH" "$TORCH_EXTENSIONS_DIR" \
  "$TRITON_CACHE_DIR" "$TORCHINDUCTOR_CACHE_DIR"
# No PYTORCH_ALLOC_CONF=expandable_segments:True: on ROCm it can hang (pytorch#192259).
