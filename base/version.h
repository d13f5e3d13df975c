// Which build this is.
#pragma once

namespace treadle {

// The release, a plus, and the beginning of the SHA-256 of tests/testdata/golden_digests.json:
// builds of equal versions compute the same bits on CPUs (docs/design.md, N5).
extern const char* const kVersion;

}  // namespace treadle
