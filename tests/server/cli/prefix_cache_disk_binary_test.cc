// `treadle serve --prefix-cache-disk`: what is cached outlives the server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/cli/served_binary.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using testing::HasSubstr;

struct Answer {
  std::string text;
  int64_t cached = 0;
};

Answer Ask(const ServedBinary& server, const std::string& text) {
  v1::GenerateRequest request = GreedyRequest(8);
  request.set_text(text);
  const v1::GenerateResponse response = Generate(server, request);
  return {response.output().text(), response.usage().cached_tokens()};
}

TEST(PrefixCacheDiskBinary, ARestartedServerFindsWhatWasComputed) {
  const TestFolder folder;
  const std::string disk = folder / "pages";
  const auto flags = [&](const std::string& more) {
    return ServedBinary::kGrpcOnly + more + " --threads 1 --prefix-cache-disk " + disk + ":16M";
  };
  // Reading a page has to be faster than computing it, also where both take their time.
  ASSERT_OK_AND_ASSIGN(const auto slow, WriteTinyLlamaGguf(folder.path(), SlowModel()));
  const std::vector<std::string> model = {"--model", slow};
  std::string text;
  for (int i = 0; i < 10; ++i) text += "one two three four five ";
  Answer before;
  {
    ServedBinary server(flags(""), model);
    EXPECT_THAT(server.output(), HasSubstr(disk + " has 0 pages of 32 tokens, 0M of 16M"));
    before = Ask(server, text);
    EXPECT_EQ(before.cached, 0);
    EXPECT_THAT(RunToEnd(ServedBinary::Command(flags(""), model), 1),
                HasSubstr(disk + " is in use by another process"));
    EXPECT_EQ(server.Stop(), 0);  // with what it is asked for last
  }
  // Nobody waits for a disk that does not come, so perhaps not at once.
  constexpr int kTimes = 20;
  for (int time = 0, cached = 0; cached <= 64; ++time) {
    ASSERT_LT(time, kTimes);
    ServedBinary server(flags(""), model);
    EXPECT_THAT(server.output(), HasSubstr("; reading a page takes "));
    const Answer after = Ask(server, text);
    EXPECT_EQ(after.text, before.text);
    cached = after.cached;
    server.Kill();
  }
  EXPECT_THAT(RunToEnd(ServedBinary::Command(flags("--kv-dtype f32"), model), 1),
              HasSubstr(disk + " has pages of another model, version or setting"));
}

TEST(PrefixCacheDiskBinary, ModelsWithWindowsAreRefusedBeforeTheyAreLoaded) {
  const TestFolder folder;
  TinyModelOptions options;
  options.window = 18;
  ASSERT_OK_AND_ASSIGN(const auto model, WriteTinyLlamaGguf(folder.path(), options));
  EXPECT_THAT(RunToEnd(ServedBinary::Command("--prefix-cache-disk " + (folder / "pages:1M"),
                                             {"--model", model}),
                       2),
              HasSubstr("--prefix-cache-disk is set, but the model has layers with a window"));
}

}  // namespace
}  // namespace treadle
