"""Phases of messages on a machine's links, simulated by SimGrid 3.32. usage: simgrid_job.py GIVEN FOUND

Runs in the Python that SimGrid was built for (Debian's own, not this package's): only the standard library
and simgrid. validation/contention.py starts it. Both files are JSON.

A group of level i - 1 has one outgoing and one incoming link at level i, each at its ranks' combined rate; a
message between two groups takes the sender's outgoing and the receiver's incoming link, shared with others.
"""

import json
import sys
from itertools import permutations
from pathlib import Path

# Plain max-min sharing of the stated bandwidths: no model of TCP on top.
PLAIN = ["bandwidth-factor:1", "latency-factor:1", "weight-S:0", "TCP-gamma:0", "crosstraffic:0"]


def main(given_path: str, found_path: str) -> None:
    from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone

    given = json.loads(Path(given_path).read_text())
    sizes, rates = given["sizes"], given["bytes_per_s"]
    engine = Engine(["simgrid", "--log=root.thres:error", *(f"--cfg=network/{item}" for item in PLAIN)])
    zone = NetZone.create_full_zone("machine")
    hosts = [zone.create_host(str(rank), 1e9) for rank in range(sizes[-1])]
    links = {}
    for level in range(1, len(sizes)):
        for group in range(sizes[-1] // sizes[level - 1]):
            for way in ("out", "in"):
                name = f"{way}.{level}.{group}"
                links[name] = zone.create_link(name, rates[level] * sizes[level - 1])
                links[name].set_latency(0).seal()

    def names(a: int, b: int) -> list[str]:
        level = next(i for i, size in enumerate(sizes) if a // size == b // size)
        return [f"out.{level}.{a // sizes[level - 1]}", f"in.{level}.{b // sizes[level - 1]}"]

    for a, b in permutations(range(len(hosts)), 2):
        route = [LinkInRoute(links[name]) for name in names(a, b)]
        zone.add_route(hosts[a].netpoint, hosts[b].netpoint, None, None, route, False)
    zone.seal()
    # SimGrid 3.32 has silently taken wrong routes (nested star zones), so every route is checked.
    for a, b in permutations(range(len(hosts)), 2):
        taken = [link.name for link in hosts[a].route_to(hosts[b])[0]]
        if taken != names(a, b):
            sys.exit(f"SimGrid routes {a} -> {b} over {taken}, not {names(a, b)}")
    found = []

    def simulate() -> None:
        for phases in given["cases"]:
            start = Engine.clock
            for messages in phases:
                Comm.wait_all([Comm.sendto_async(hosts[a], hosts[b], size) for a, b, size in messages])
            found.append(Engine.clock - start)

    Actor.create("all ranks", hosts[0], simulate)
    engine.run()
    Path(found_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
