"""A terminal small enough to trust: what stands on its screen after everything that was written to it."""

from __future__ import annotations

import re

from rich.cells import cell_len

_PIECES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)|(\x1b)")


class Screen:
    """Knows what a region writes (text, line ends, cursor up, erase in line and below, colours), and no more.

    Lines wrap at ``columns``; :meth:`narrow` wraps what stands there anew, as most terminals do.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows = [""]
        self.row = self.column = 0

    def feed(self, output: str) -> Screen:
        for parameters, command, control, text, unknown in _PIECES.findall(output):
            assert not unknown, f"unknown control sequence in {output!r}"
            if control == "\r":
                self.column = 0
            elif control == "\n":
                self._to(self.row + 1)
                self.column = 0
            elif text:
                for character in text:
                    self._put(character)
            else:
                self._obey(command, parameters)
        return self

    def narrow(self, columns: int) -> None:
        wrapped = [[row[i : i + columns] for i in range(0, max(len(row), 1), columns)] for row in self.rows]
        self.row = sum(map(len, wrapped[: self.row + 1])) - 1
        self.rows = [part for row in wrapped for part in row]
        self.columns, self.column = columns, len(self.rows[self.row])

    @property
    def lines(self) -> list[str]:
        """Down to the last that holds anything."""
        return "\n".join(row.rstrip() for row in self.rows).rstrip("\n").split("\n")

    def _to(self, row: int) -> None:
        self.row = max(row, 0)
        self.rows += [""] * (self.row + 1 - len(self.rows))

    def _put(self, character: str) -> None:
        width = cell_len(character)
        if self.column + width > self.columns:
            self._to(self.row + 1)
            self.column = 0
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
        self.column += 1  # wide characters are used in no test that looks at columns

    def _obey(self, command: str, parameters: str) -> None:
        if command == "A":
            self.row = max(self.row - int(parameters or 1), 0)
        elif command == "K":
            self.rows[self.row] = "" if parameters == "2" else self.rows[self.row][: self.column]
        elif command == "J":
            assert parameters in ("", "0")
            self.rows[self.row] = self.rows[self.row][: self.column]
            del self.rows[self.row + 1 :]
        else:
            assert command == "m", f"the terminal was switched: {command} {parameters}"
