#!/usr/bin/env python3
"""Writes models/text/unicode_nfc_tables.inc: what canonical composition needs, from Python's unicodedata.

Run from the repository's root; the result is committed. Normalization of assigned characters never
changes between versions of Unicode.
"""
import sys
import unicodedata

HANGUL = range(0xAC00, 0xD7A4)


def decompositions():
    for code in range(sys.maxunicode + 1):
        text = unicodedata.decomposition(chr(code))
        if not text or text.startswith("<") or code in HANGUL:
            continue
        parts = [int(part, 16) for part in text.split()]
        composes = unicodedata.normalize("NFC", chr(code)) == chr(code)
        yield code, parts[0], parts[1] if len(parts) > 1 else 0, int(composes)


def class_ranges():
    ranges = []
    for code in range(sys.maxunicode + 1):
        value = unicodedata.combining(chr(code))
        if not value:
            continue
        if ranges and ranges[-1][1] == code - 1 and ranges[-1][2] == value:
            ranges[-1][1] = code
        else:
            ranges.append([code, code, value])
    return ranges


def write_rows(out, rows):
    line = ""
    for row in rows:
        cell = "{" + ",".join(hex(value) if value > 9 else str(value) for value in row) + "},"
        if len(line) + len(cell) > 99:
            out.write(line + "\n")
            line = ""
        line += cell
    out.write(line + "\n")


with open("models/text/unicode_nfc_tables.inc", "w", encoding="ascii") as out:
    out.write("// Written by scripts/make_unicode_tables.py from Unicode "
              f"{unicodedata.unidata_version}. Do not edit.\n")
    out.write("// By character: its canonical decomposition (second 0 if it is one character), and\n"
              "// whether the two compose to it again.\n"
              "constexpr Decomposition kDecompositions[] = {\n")
    write_rows(out, decompositions())
    out.write("};\n// Canonical combining classes other than 0: first and last character, class.\n"
              "constexpr ClassRange kClassRanges[] = {\n")
    write_rows(out, class_ranges())
    out.write("};\n")
