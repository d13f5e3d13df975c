#include "base/status.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <iomanip>
#include <ios>
#include <sstream>
#include <string>
#include <string_view>

namespace treadle {
namespace {

// The same parts in a stream of the standard library.
TEST(Str, IsWhatAStreamGives) {
  char writable[] = "written";
  const char* pointer = "pointed at";
  const uint8_t byte = 'b';
  std::ostringstream expected;
  expected << "literal " << std::string("string") << std::string_view("view, cut", 4) << 'c' << byte
           << writable << pointer << -7 << 18446744073709551615u << true << 0.1f << ' '
           << std::setprecision(12) << 0.1 << std::hexfloat << 0.1 << ' ' << std::hex << 255;
  EXPECT_EQ(Str("literal ", std::string("string"), std::string_view("view, cut", 4), 'c', byte,
                writable, pointer, -7, 18446744073709551615u, true, 0.1f, ' ',
                std::setprecision(12), 0.1, std::hexfloat, 0.1, ' ', std::hex, 255),
            expected.str());
  EXPECT_EQ(Str(), "");
}

TEST(Status, HasItsCodeAndItsParts) {
  EXPECT_EQ(InvalidArgument("row ", 3), absl::InvalidArgumentError("row 3"));
  EXPECT_EQ(NotFound("row ", 3), absl::NotFoundError("row 3"));
  EXPECT_EQ(Unimplemented("row ", 3), absl::UnimplementedError("row 3"));
  EXPECT_EQ(ResourceExhausted("row ", 3), absl::ResourceExhaustedError("row 3"));
  EXPECT_EQ(Internal("row ", 3), absl::InternalError("row 3"));
}

}  // namespace
}  // namespace treadle
