export TORCH_CPP_LOG_LEVEL=ERROR # the addresses of a box have no host names, and torch warns about each
