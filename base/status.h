// Errors: one way to build a Status from parts, to pass it up, and to stop on a bug of our own.
//
// Input, files and peers give absl::Status; CHECK is for broken invariants of this program only and
// ends the process with the place and the text. Thread safety: everything here is stateless.
#pragma once

#include <sstream>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace treadle {

// Concatenates anything that can be streamed.
template <typename... Parts>
std::string Str(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

template <typename... Parts>
absl::Status InvalidArgument(const Parts&... parts) {
  return absl::InvalidArgumentError(Str(parts...));
}
template <typename... Parts>
absl::Status NotFound(const Parts&... parts) {
  return absl::NotFoundError(Str(parts...));
}
template <typename... Parts>
absl::Status Unimplemented(const Parts&... parts) {
  return absl::UnimplementedError(Str(parts...));
}
template <typename... Parts>
absl::Status ResourceExhausted(const Parts&... parts) {
  return absl::ResourceExhaustedError(Str(parts...));
}
template <typename... Parts>
absl::Status Internal(const Parts&... parts) {
  return absl::InternalError(Str(parts...));
}

[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);

}  // namespace treadle

#define TREADLE_CHECK(condition)                              \
  do {                                                        \
    if (!(condition)) [[unlikely]]                            \
      ::treadle::CheckFailed(__FILE__, __LINE__, #condition); \
  } while (0)

#define TREADLE_RETURN_IF_ERROR(expression)                   \
  do {                                                        \
    if (absl::Status status_ = (expression); !status_.ok()) { \
      return status_;                                         \
    }                                                         \
  } while (0)

#define TREADLE_CONCAT_INNER(a, b) a##b
#define TREADLE_CONCAT(a, b) TREADLE_CONCAT_INNER(a, b)
#define TREADLE_ASSIGN_OR_RETURN(target, expression) \
  TREADLE_ASSIGN_OR_RETURN_INNER(TREADLE_CONCAT(status_or_, __LINE__), target, expression)
#define TREADLE_ASSIGN_OR_RETURN_INNER(status_or, target, expression) \
  auto status_or = (expression);                                      \
  if (!status_or.ok()) return std::move(status_or).status();          \
  target = std::move(status_or).value()
