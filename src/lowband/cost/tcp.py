"""Overhead of TCP over Ethernet on a program's bytes, in closed form."""

# A full Ethernet frame of 1514 bytes carries 1448 of a TCP stream (20 IP, 32 TCP with time stamps, 14
# Ethernet). Queues count whole frames; a link's rate counts a program's bytes.
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
ACKNOWLEDGEMENT_BYTES = 66  # one such frame for every two that arrive
# Bytes that an interface sends per byte of a long message, when a message of equal size arrives meanwhile.
WIRE_BYTES_PER_BYTE = (FRAME_BYTES + ACKNOWLEDGEMENT_BYTES / 2) / PAYLOAD_BYTES
