"""The run-time type checker that pytest puts on every function of the package (an int passes for a float, as in PEP 484)."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
