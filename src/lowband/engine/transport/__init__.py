"""Who talks to whom, over which link, in which order: groups, lanes, calls, and what they count."""
