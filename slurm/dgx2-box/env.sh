export TORCH_CPP_LOG_LEVEL=ERROR # the addresses of a box have no names to look up, and torch warns of each
