#include "base/status.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace treadle {

void TextPart::WriteText(std::ostream& out, const void* text) {
  out << static_cast<const char*>(text);
}

void TextPart::WriteChange(std::ostream& out, const void* change) {
  out << reinterpret_cast<Manipulator>(const_cast<void*>(change));
}

std::string Concatenate(std::initializer_list<TextPart> parts) {
  std::ostringstream out;
  for (const TextPart& part : parts) part.write_(out, part.value_);
  return std::move(out).str();
}

absl::Status MakeStatus(absl::StatusCode code, std::initializer_list<TextPart> parts) {
  return absl::Status(code, Concatenate(parts));
}

void CheckFailed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "treadle: bug at %s:%d: '%s' does not hold\n", file, line, condition);
  std::abort();
}

}  // namespace treadle
