"""The table build x property at the end of scripts/test-engines, made of what pytest noted about each engine."""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

DOCUMENT = Path(__file__).parent.parent / "docs" / "engines.md"
BEGIN, END = "<!-- scripts/test-engines --write: begin -->", "<!-- scripts/test-engines --write: end -->"
PROPERTIES = "tests/real/"
"""Here each test is a row; the other files are a row each."""


@dataclass(frozen=True)
class Case:
    """One test on one engine, as pytest's JUnit file (family xunit1) has it."""

    file: str
    line: int
    group: str
    name: str
    value: str
    failed: bool
    skipped: bool

    @property
    def test(self) -> tuple[str, str]:
        return self.group, self.name

    @property
    def is_property(self) -> bool:
        return self.file.startswith(PROPERTIES)

    @property
    def row(self) -> str:
        """ "test_next_turn_is_warm[dense]" -> "next turn is warm (dense)"."""
        if not self.is_property:
            return f"`{self.file}`"
        words, _, parameters = self.name.removeprefix("test_").partition("[")
        return words.replace("_", " ") + (f" ({parameters[:-1]})" if parameters else "")

    @property
    def cell(self) -> str:
        return "FAILED" if self.failed else "skipped" if self.skipped else self.value or "yes"


def cases(results: Path) -> list[Case]:
    """All tests that ran on one engine; none when there is no file, or it was cut short."""
    try:
        root = ElementTree.parse(results).getroot()
    except (OSError, ElementTree.ParseError):
        return []
    return [
        Case(
            file=_file(case.get("classname", "")),
            line=int(case.get("line", 0)),
            group=case.get("classname", ""),
            name=case.get("name", ""),
            value=next((str(p.get("value")) for p in case.iter("property") if p.get("name") == "value"), ""),
            failed=case.find("failure") is not None or case.find("error") is not None,
            skipped=case.find("skipped") is not None,
        )
        for case in root.iter("testcase")
    ]


def _file(classname: str) -> str:
    """ "tests.test_contract.TestExternal" -> "tests/test_contract.py"; "file" would name the class's own module."""
    return "/".join(part for part in classname.split(".") if not part.startswith("Test")) + ".py"


def cells(ran: list[Case]) -> dict[str, str]:
    """What one engine's column says, by row."""
    column: dict[str, str] = {}
    for row in {case.row: None for case in ran}:
        of_row = [case for case in ran if case.row == row]
        if of_row[0].is_property:
            column[row] = next((case.cell for case in of_row if case.failed), of_row[0].cell)
            continue
        failed = {case.test for case in of_row if case.failed}  # one that fails at its end too is listed twice
        skipped = {case.test for case in of_row if case.skipped} - failed
        notes = [f"{len(failed)} FAILED"] * bool(failed)
        notes.append(f"{len({case.test for case in of_row} - failed - skipped)} passed")
        column[row] = ", ".join(notes + [f"{len(skipped)} skipped"] * bool(skipped))
    return column


def table(engines: dict[str, str]) -> str:
    """As Markdown, from each engine's file; MISSING without one. Rows in the order of the files and of the tests."""
    ran = {name: cases(Path(file)) if file else [] for name, file in engines.items()}
    known = sorted((case for column in ran.values() for case in column), key=_place)
    columns = {name: cells(column) for name, column in ran.items()}
    unknown = {name: "FAILED" if file else "MISSING" for name, file in engines.items()}
    lines = [["", *engines], ["---"] * (1 + len(engines))]
    for row in dict.fromkeys(case.row for case in known) or ["every property"]:
        lines.append([row, *(columns[name].get(row, unknown[name]) for name in engines)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _place(case: Case) -> tuple[bool, str, int]:
    return not case.is_property, case.file, case.line


def write(text: str) -> None:
    """Put the table between its marks in docs/engines.md."""
    document = DOCUMENT.read_text(encoding="utf-8")
    changed, found = re.subn(f"(?s){BEGIN}.*{END}", lambda _: f"{BEGIN}\n{text}\n{END}", document)
    if not found:
        sys.exit(f"{DOCUMENT} has no place for the table ({BEGIN})")
    DOCUMENT.write_text(changed, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into docs/engines.md too")
    parser.add_argument("columns", nargs="+", metavar="ENGINE=[FILE]")
    args = parser.parse_args()
    text = table({name: file for name, _, file in (column.partition("=") for column in args.columns)})
    print(text)
    if args.write:
        write(text)


if __name__ == "__main__":
    main()
