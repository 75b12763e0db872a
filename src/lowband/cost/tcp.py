"""What TCP over Ethernet adds to a program's bytes, in closed form."""

# A full Ethernet frame of 1514 bytes carries 1448 of a TCP stream (20 IP, 32 TCP with time stamps, 14
# Ethernet). Queues count frames; a link's rate is what a program gets.
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
ACKNOWLEDGEMENT_BYTES = 66  # a frame of its own for every two that arrive
# What an interface sends for each byte of a long message of which as much comes back.
WIRE_BYTES_PER_BYTE = (FRAME_BYTES + ACKNOWLEDGEMENT_BYTES / 2) / PAYLOAD_BYTES
