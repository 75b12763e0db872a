#!/usr/bin/env bash
# A command on a node of the small box, with the fault of that node. usage: faulty_node.sh RUN_FOLDER COMMAND...
set -euo pipefail
folder=$1
shift
case $(hostname) in
node2) # an older checkout, and a scratch folder of its own where the others share one
  export PYTHONPATH=$PWD/older
  exec unshare --mount bash -c 'cp "$0/spec.json" /tmp/spec.$$ && mount -t tmpfs none "$0" && cp /tmp/spec.$$ "$0/spec.json" && rm /tmp/spec.$$ && exec "$@"' "$folder" "$@"
  ;;
node3) # less memory for each rank
  ulimit -v 7000000
  ;;
node4) # a clock of its own
  export LD_PRELOAD=$PWD/ahead.so
  ;;
esac
exec "$@"
