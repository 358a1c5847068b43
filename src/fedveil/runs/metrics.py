"""The records of a run as lines of JSON, one file for all its parts."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from fedveil.errors import BadArgument
from fedveil.federation.history import Record
from fedveil.federation.server import Server
from fedveil.files import refusals, write_whole
from fedveil.plain_json import to_json

LOG = logging.getLogger("fedveil")


class Metrics:
    """The file of a server's records, untouched until there is one to write, so that a run may still be refused.

    Args:
        path: of the file. Lines of rounds that a kill has lost are cut off.
        server: the server that appends its records.
    """

    def __init__(self, path: Path, server: Server) -> None:
        self._path, self._server = path, server
        self._file: IO[str] | None = None
        self._count = -1  # lines written

    def append(self, record: Record) -> None:
        """Add the record of the round that has just ended."""
        with refusals(self._path):
            if self._file is None:
                self._write(self._server.history.records[:-1])
                self._file = self._path.open("a", buffering=1)
            self._file.write(to_json(record) + "\n")
            self._count += 1

    def _write(self, records: Sequence[Record]) -> None:
        write_whole(self._path, "".join(to_json(record) + "\n" for record in records))
        self._count = len(records)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write missing records: all of a run that was finished before, or the last one if its evaluation failed."""
        records = self._server.history.records
        if self._file is not None:
            self._file.close()
        if kind is None and self._count != len(records):
            self._write(records)
        elif self._file is not None and self._count != len(records):
            try:
                self._write(records)
            except BadArgument as failure:  # the user must see the error that ended the run
                LOG.warning("fedveil: %s", failure)
