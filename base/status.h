// Errors: one way to build a Status from parts, to pass it up, and to stop on a bug of our own.
//
// Input, files and peers give absl::Status; CHECK is for broken invariants of this program only and
// ends the process with the place and the text. Thread safety: everything here is stateless.
#pragma once

#include <initializer_list>
#include <ostream>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace treadle {

// One part of a text: anything that can be streamed, a manipulator too. It refers to its value, so
// it lives no longer than the expression. A call of Str is an array of these; what streams them is
// compiled once for each type, not once for each call.
class TextPart {
 public:
  using Manipulator = std::ios_base& (*)(std::ios_base&);

  explicit TextPart(const char* text) : value_(text), write_(&WriteText) {}
  explicit TextPart(Manipulator change)
      : value_(reinterpret_cast<const void*>(change)), write_(&WriteChange) {}
  template <typename T>
  explicit TextPart(const T& value) : value_(&value), write_(&Write<T>) {}

 private:
  friend std::string Concatenate(std::initializer_list<TextPart> parts);
  using Writer = void (*)(std::ostream& out, const void* value);

  static void WriteText(std::ostream& out, const void* text);
  static void WriteChange(std::ostream& out, const void* change);
  template <typename T>
  static void Write(std::ostream& out, const void* value) {
    out << *static_cast<const T*>(value);
  }

  const void* value_;
  Writer write_;
};

std::string Concatenate(std::initializer_list<TextPart> parts);
absl::Status MakeStatus(absl::StatusCode code, std::initializer_list<TextPart> parts);

// Concatenates anything that can be streamed.
template <typename... Parts>
std::string Str(const Parts&... parts) {
  return Concatenate({TextPart(parts)...});
}

template <typename... Parts>
absl::Status InvalidArgument(const Parts&... parts) {
  return MakeStatus(absl::StatusCode::kInvalidArgument, {TextPart(parts)...});
}
template <typename... Parts>
absl::Status NotFound(const Parts&... parts) {
  return MakeStatus(absl::StatusCode::kNotFound, {TextPart(parts)...});
}
template <typename... Parts>
absl::Status Unimplemented(const Parts&... parts) {
  return MakeStatus(absl::StatusCode::kUnimplemented, {TextPart(parts)...});
}
template <typename... Parts>
absl::Status ResourceExhausted(const Parts&... parts) {
  return MakeStatus(absl::StatusCode::kResourceExhausted, {TextPart(parts)...});
}
template <typename... Parts>
absl::Status Internal(const Parts&... parts) {
  return MakeStatus(absl::StatusCode::kInternal, {TextPart(parts)...});
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
