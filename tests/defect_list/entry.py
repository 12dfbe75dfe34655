"""One defect of a reference package: what went wrong there, how to put it back here, and the tests that then fail."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """In `file` (below src/helicon) the text `old`, which occurs once, becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Defect:
    id: str  # several defects may share one: its parts
    what: str  # went wrong
    edits: tuple[Edit, ...]  # more than one where more than one line stands against it
    tests: tuple[str, ...]  # below tests/, each of which must fail
