"""Replicas that meet seldom: what share of its time a replica computes, and the rate that needs.

Every H steps of t seconds each replica exchanges its weights, in F fragments one after the other; h seconds
of each fragment's exchange are behind computation. An exchange of all fragments takes x seconds:

    utilization = H t / (H t + F max(0, x / F - h))

With x = bits P / rate this gives the rate that a utilization needs. No constant is fitted.
"""


def utilization(period_s: float, exchange_s: float, fragments: int = 1, hidden_s: float = 0.0) -> float:
    """The part of the time in which a replica computes.

    period_s:   H steps without their exchanges
    exchange_s: of all fragments, each of which has hidden_s behind computation
    """
    return period_s / (period_s + fragments * max(0.0, exchange_s / fragments - hidden_s))


def needed_rate(
    bits: float, period_s: float, share: float, fragments: int = 1, hidden_s: float = 0.0
) -> float:
    """The bits per second at which `utilization` is `share`, below 1, if an exchange sends `bits`."""
    return bits / (period_s * (1 / share - 1) + fragments * hidden_s)
