"""ZeRO stages and what only some of them can do."""

RULES = ()
