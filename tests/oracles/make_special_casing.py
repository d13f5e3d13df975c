#!/usr/bin/env python3
"""Writes models/text/special_casing.h from Python's own Unicode tables. Run from the repository's root."""

HEAD = """// Characters whose capitals are several characters: SpecialCasing.txt of the Unicode character
// database, the part that depends on neither language nor context. Made by
// tests/oracles/make_special_casing.py.
#pragma once

#include <cstdint>

namespace treadle {

struct SpecialCasing {
  char32_t character;
  const char* upper;
  const char* title;
};

// clang-format off
inline constexpr SpecialCasing kSpecialCasing[] = {  // by character
"""
TAIL = """};
// clang-format on

}  // namespace treadle
"""


def literal(text):
    return '"' + "".join(c if ord(c) < 128 else f"\\u{ord(c):04X}" for c in text) + '"'


with open("models/text/special_casing.h", "w", encoding="utf-8") as file:
    file.write(HEAD)
    for code in range(0x80, 0x110000):
        upper, title = chr(code).upper(), chr(code).title()
        if len(upper) > 1 or len(title) > 1:
            file.write(f"    {{0x{code:04X}, {literal(upper)}, {literal(title)}}},\n")
    file.write(TAIL)
