"""A Slurm box: up, down, after a crash, for a plain user. Everything runs in namespaces of the test's own."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from commands import lowband

from lowband.box.network import private_command
from tests.checkout import ROOT
from tests.waiting import HANG_S, wait_for

pytestmark = [pytest.mark.usefixtures("with_slurm"), pytest.mark.waits]


def isolated(script: str) -> subprocess.CompletedProcess[str]:
    """A Python script in network, mount and process namespaces of its own, with an empty /etc/slurm."""
    command = private_command([sys.executable, "-c", textwrap.dedent(script)])
    command[1:1] = ["--pid", "--fork", "--mount-proc", "--kill-child"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT, env=env)


PRELUDE = """
    import os, subprocess, sys
    from pathlib import Path
    import psutil
    from tests.waiting import wait_for
    from lowband.box import cluster, links
    from lowband.box.layout import HEAD_ADDRESS
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/etc/slurm"], check=True)
    def nothing_is_left():
        assert links.namespaces() == []
        assert not Path("/run/lowband-box").exists()
        assert list(Path("/etc/slurm").iterdir()) == []
        names = subprocess.run(["ps", "-eo", "stat,comm"], capture_output=True, text=True).stdout.splitlines()
        alive = {line.split()[1] for line in names if not line.startswith("Z")}  # nobody here reaps
        assert not {"slurmctld", "slurmd", "munged"} & alive, alive
        assert "lowband-head" not in subprocess.run(["ip", "link"], capture_output=True, text=True).stdout
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a box that stays needs root")
def test_up_twice_status_down_twice() -> None:
    done = isolated(
        PRELUDE
        + """
    assert cluster.status() == "no box is up"
    print(cluster.up(Path(), "frontier-box"))
    assert "is already up" in cluster.up(Path(), "frontier-box")
    assert cluster.status() == "the box of frontier-box is up: 4 idle"
    controllers = [p for p in psutil.process_iter() if p.name() == "slurmctld"]
    connections = [c for p in controllers for c in p.net_connections()]
    heard = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    assert heard == {HEAD_ADDRESS}, heard
    files = [path for path in Path("/run/lowband-box").rglob("*") if path.is_file()]
    assert {"munge.key", "slurm.conf", "slurmctld.log"} <= {path.name for path in files}
    each = 'for file; do if test -r "$file"; then echo "$file"; fi; done'
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", each, "-"]
    asked = [*nobody, *map(str, files)]
    readable = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    public = {Path(path).name for path in readable if not path.endswith(".pid")}
    assert public <= {"slurm.conf", "hosts", "machine.json"}, public
    srun = ["srun", "-N2", "-n4", "hostname"]
    hosts = subprocess.run(srun, capture_output=True, text=True, timeout=300).stdout.split()
    assert sorted(hosts) == ["node1", "node1", "node2", "node2"], hosts
    try:
        cluster.up(Path(), "dgx2-box")
    except Exception as error:
        assert "the box of frontier-box is up (allowed: lowband box down first)" == str(error)
    else:
        raise AssertionError("a second box came up")
    print(cluster.down())
    nothing_is_left()
    assert cluster.down() == "no box is up"
    """
    )
    assert done.returncode == 0, done.stderr
    assert "4 nodes x 8 ranks, idle after" in done.stdout
    assert "33 namespaces removed" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="a box that stays needs root")
def test_down_and_up_after_a_killed_up() -> None:
    """Killed when the first file, the first namespace and the first daemon is seen, or a little later: `down`
    and `up` must bear it wherever the kill falls."""
    done = isolated(
        PRELUDE
        + """
    def is_started(name):
        return any(process.info["name"] == name for process in psutil.process_iter(["name"]))
    def goes_on(process):
        try:
            is_one = "up" in process.cmdline() or process.name() in ("ip", "tc")
            return is_one and process.status() != psutil.STATUS_ZOMBIE  # nobody here reaps
        except psutil.Error:
            return False
    def killed_up(begun):
        up = subprocess.Popen([sys.executable, "-m", "lowband", "box", "up"])
        wait_for(lambda: begun() or up.poll() is not None)
        up.kill()
        up.wait()
        # Of its children one may not yet be the program that it is about to become, or not yet be dead.
        wait_for(lambda: not any(map(goes_on, psutil.process_iter())))
    for begun in (
        Path("/run/lowband-box").exists, links.namespaces, lambda: is_started("munged"),
        lambda: is_started("slurmctld"),
    ):
        killed_up(begun)
        cluster.down()
        nothing_is_left()
    killed_up(lambda: is_started("slurmctld"))
    assert "4 nodes x 8 ranks" in cluster.up(Path(), "frontier-box") or cluster.status().endswith("4 idle")
    cluster.down()
    nothing_is_left()
    """
    )
    assert done.returncode == 0, done.stderr


def test_run_gives_the_commands_exit_code_and_leaves_nothing() -> None:
    """Looked for in namespaces of the test's own: the host may have another box."""
    done = isolated(
        PRELUDE
        + """
    command = ["sh", "-c", "srun -N4 -n4 hostname; exit 7"]
    box = subprocess.run([sys.executable, "-m", "lowband", "box", "run", "--", *command])
    nothing_is_left()
    sys.exit(box.returncode)
    """
    )
    assert done.returncode == 7, done.stderr
    assert sorted(done.stdout.split()[-4:]) == ["node1", "node2", "node3", "node4"]


@pytest.mark.skipif(os.geteuid() != 0, reason="this user is a plain one: the other tests show it")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
def test_run_as_a_plain_user() -> None:
    """In a user namespace. Needs a Python that user nobody may read; the system's, with our packages."""
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ROOT / 'src'}:{packages}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    probe = [*nobody, f"/usr/bin/{version}", "-c", "import lowband, psutil, pydantic_core"]
    if subprocess.run(probe, env=env, capture_output=True, cwd=ROOT).returncode:
        pytest.skip(f"user nobody cannot use /usr/bin/{version} with these packages")
    if subprocess.run([*nobody, "unshare", "--user", "--map-root-user", "true"]).returncode:
        pytest.skip("no user namespaces for plain users")
    command = [
        *nobody,
        f"/usr/bin/{version}",
        "-m",
        "lowband",
        "box",
        "run",
        "--",
        "srun",
        "-N2",
        "-n2",
        "hostname",
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()[-2:]) == ["node1", "node2"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_run_takes_its_box_with_it(how: signal.Signals, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    duration = f"{1000000 + os.getpid()}"  # told apart from any other sleep
    command = [sys.executable, "-m", "lowband", "box", "run", "--", "sleep", duration]
    # A background process of a shell has SIGINT ignored, and would hand that on.
    command = ["env", "--default-signal=INT", *command]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
    assert run.stdout is not None
    assert "nodes" in run.stdout.readline()  # it is up
    run.send_signal(how)
    run.wait(timeout=HANG_S)
    listed = ["ps", "-eo", "args"]
    wait_for(lambda: duration not in subprocess.run(listed, capture_output=True, text=True).stdout)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["box", "run", "--cluster", "local", "--", "true"], "cluster 'local' has no box"),
        (["box", "run", "--cluster", "none", "--", "true"], "no cluster 'none'"),
        (["box", "run", "--", "no-such-program"], "no-such-program: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str) -> None:
    done = lowband(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
