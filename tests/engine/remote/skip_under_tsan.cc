// Under ThreadSanitizer, tests that run gRPC's streams are skipped.

#include <gtest/gtest.h>

namespace treadle {
namespace {

#if defined(__SANITIZE_THREAD__)
class SkipUnderTsan : public testing::Environment {
 public:
  void SetUp() override {
    GTEST_SKIP() << "the distribution's gRPC is not built for ThreadSanitizer: its hand-offs "
                    "between threads look like races by the hundred";
  }
};

const auto* const kSkip = testing::AddGlobalTestEnvironment(new SkipUnderTsan);
#endif

}  // namespace
}  // namespace treadle
