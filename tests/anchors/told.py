"""What a job's output says about a fault."""

import re
from dataclasses import dataclass

# What of the fault a message can state. Of a cut link, ranks see only what it does to their messages.
_CAUSES = {
    "kill rank": r"SIGKILL|signal 9\b|(?:exit ?code|return code)\s*[:=]\s*-9\b",
    "freeze rank": r"SIGSTOP|\bstopped\b",
    "cut link": r"unreachable|timed out|connection (?:was )?(?:closed|reset)",
}
_SYMPTOM = r"timed out|timeout|connection (?:was )?(?:closed|reset|refused)|unreachable"
# A rank, and the cause within 200 characters, no other rank between: torchrun's report has a line for each.
_NAMED = r"\brank\s*[:=]?\s*(\d+)\b(?:(?!\brank\b).){0,200}?(?:%s)"
_PREFIX = re.compile(r"^\[rank\d+\]:", re.MULTILINE)  # torch: of all lines of a rank's own traceback


@dataclass(frozen=True)
class Told:
    """
    lines:       printed after the fault, blank ones left out
    ranks_named: as those that failed by this cause
    says_cause:  whether the cause stands anywhere
    says_symptom: whether a time-out or a lost connection is mentioned
    """

    lines: int
    ranks_named: tuple[int, ...]
    says_cause: bool
    says_symptom: bool

    @classmethod
    def by(cls, output: str, fault: str) -> "Told":
        text, cause = _PREFIX.sub("", output), _CAUSES[fault]
        flags = re.IGNORECASE | re.DOTALL
        return cls(
            lines=sum(bool(line.strip()) for line in output.splitlines()),
            ranks_named=tuple(sorted({int(rank) for rank in re.findall(_NAMED % cause, text, flags)})),
            says_cause=re.search(cause, text, flags) is not None,
            says_symptom=re.search(_SYMPTOM, text, flags) is not None,
        )
