"""Examine a site from its login node: what a job of `slurm/<site>/` needs, before it waits in a queue."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lowband.errors import UserError
from lowband.run.submit import accounts, why_not
from lowband.spec.config import IN_CHECKOUT, Config
from lowband.spec.job import ACCOUNT

LIMIT_S = 30  # of one shell: a module system or disk that takes longer would keep each job waiting, too
PLUGINS = ("librccl-net*.so*", "libnccl-net*.so*")  # names under which RCCL and NCCL load a network plugin

_NO_MODULES = 69  # EX_UNAVAILABLE of sysexits.h

_MARK = "lowband: "  # of lines that are ours, among what a login shell prints

Row = tuple[str, str, str]  # subject, finding, what is missing: "" if nothing


def examine_site(config: Config, site: str) -> tuple[str, int]:
    """The findings, one line each, and how many pieces are missing.

    Raises UserError for a name that is no site's: a folder of slurm/ with job.yaml and env.sh, and no box.
    """
    folder = config.clusters_folder / site
    sites = [
        path.parent.name
        for path in sorted(config.clusters_folder.glob("*/env.sh"))
        if path.with_name("job.yaml").exists() and config.machine(path.parent.name).box is None
    ]
    if site not in sites:
        raise UserError(f"no site '{site}'", where=config.clusters_folder, allowed=sites or IN_CHECKOUT)
    script = (folder / "env.sh").read_text(encoding="utf-8")
    modules = _modules(script)
    needs_account = config.job(site).account
    # Beside each other, so that all of them together take no longer than one may.
    questions: list[Callable[[], Iterator[Row]]] = [
        _slurm,
        lambda: _account(needs_account),
        lambda: _loaded(modules),
        lambda: _plugin(script, modules),
        lambda: _imports(modules),
    ]
    with ThreadPoolExecutor(len(questions)) as threads:
        answers = threads.map(lambda ask: list(ask()), questions)
        rows = [row for answer in answers for row in answer]
    width, found_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [
        f"{what:<{width}}  {found:<{found_width}}  {'missing: ' + missing if missing else 'ok'}"
        for what, found, missing in rows
    ]
    return "\n".join(lines), sum(bool(missing) for _, _, missing in rows)


def _modules(script: str) -> list[str]:
    """The modules that a site's env.sh loads in every job: lines without indentation."""
    lines = re.findall(r"^module load ([^#\n]+)", script, re.MULTILINE)
    return [module for line in lines for module in shlex.split(line)]


def _slurm() -> Iterator[Row]:
    reason = why_not()
    yield "Slurm", "none" if reason else "a controller answers", reason


def _account(is_needed: bool) -> Iterator[Row]:
    """Whether $SLURM_PROJECT is set, and known to Slurm's accounting where that can be asked."""
    account = os.environ.get(ACCOUNT, "")
    if not account:
        yield "account", "none", f"{ACCOUNT}, the project that pays for jobs" if is_needed else ""
        return
    if shutil.which("sacctmgr") is None:
        yield "account", account, "sacctmgr, which knows whether you may use it"
        return
    known = accounts()
    wanted = f"an account of that name for you; Slurm has {', '.join(sorted(known)) or 'none'}"
    yield "account", account, "" if account.lower() in known else wanted


def _loaded(modules: list[str]) -> Iterator[Row]:
    """Each module, loaded after those before it: a later one may stand on an earlier one."""
    if not modules:
        return
    each = f'for name in {shlex.join(modules)}; do said=$(module load "$name" 2>&1)'
    # The substitution is a shell of its own: what loads there has to be loaded here as well.
    each += f' && module load "$name" > /dev/null 2>&1; echo "{_MARK}$?" $said; done'
    code, out = _shell(f"type module > /dev/null 2>&1 || exit {_NO_MODULES}; {each}")
    if code == _NO_MODULES:
        yield "module system", "none", "the command module"
        for module in modules:
            yield f"module {module}", "not loaded", "the module system"
        return
    said = [line.removeprefix(_MARK) for line in out.splitlines() if line.startswith(_MARK)]
    for module, line in zip(modules, said or [f"{code} {out}"] * len(modules), strict=True):
        failed, _, reason = line.partition(" ")
        if failed == "0":
            yield f"module {module}", "loads", ""
        else:
            yield f"module {module}", "not loaded", reason.strip() or "a module of that name that loads"


def _plugin(script: str, modules: list[str]) -> Iterator[Row]:
    """The network plugin of NCCL or RCCL, where env.sh asks for one."""
    if not re.search(r"\bNCCL_NET=|aws-ofi", script):
        return
    places = '"$LD_LIBRARY_PATH:$CRAY_LD_LIBRARY_PATH:${NCCL_NET_PLUGIN%/*}"'
    code, out = _shell(f"{_load(modules)} > /dev/null 2>&1; echo '{_MARK}'{places}")
    paths = out.rpartition(_MARK)[2].strip() if code == 0 else ""
    folders = [Path(text) for text in paths.split(":") if text]
    found = [path for folder in folders for name in PLUGINS for path in sorted(folder.glob(name))]
    wanted = f"{' or '.join(PLUGINS)} on LD_LIBRARY_PATH: between nodes the job would fail or use TCP"
    yield "network plugin", str(found[0]) if found else "none", "" if found else wanted


def _imports(modules: list[str]) -> Iterator[Row]:
    """lowband and torch, by this interpreter with the modules loaded."""
    said = (
        "import lowband, torch; "
        "print(torch.__version__, 'ROCm ' + torch.version.hip if torch.version.hip else "
        "'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPU')"
    )
    run = f"{shlex.quote(sys.executable)} -c {shlex.quote(said)}"
    code, out = _shell(f"{_load(modules)} > /dev/null 2>&1; {run}")
    last = (out.strip().splitlines() or ["no answer"])[-1]
    if code:
        yield "import", "fails", last
    elif last.endswith("CPU"):
        yield "import", f"torch {last}", "a torch built for the site's GPUs"
    else:
        yield "import", f"torch {last}", ""


def _load(modules: list[str]) -> str:
    return f"module load {shlex.join(modules)}" if modules else "true"


def _shell(command: str) -> tuple[int, str]:
    """A command in a login shell, as a batch script's is: exit code and all that it printed."""
    try:
        done = subprocess.run(
            ["bash", "-lc", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {LIMIT_S} s"
    return done.returncode, done.stdout
