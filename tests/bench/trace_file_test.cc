// Recorded traces of every format: what they say, and that a broken line is named with its number
// and what is wrong there.
#include "bench/load/trace_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/status.h"

namespace treadle {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string WriteFile(const std::string& content) {
  const std::string path =
      Str(::testing::TempDir(), ::testing::UnitTest::GetInstance()->current_test_info()->name(),
          ".txt");
  std::ofstream(path) << content;
  return path;
}

absl::StatusOr<std::vector<TraceEntry>> Read(const std::string& content, double time_scale = 1,
                                             int64_t limit = 0) {
  return ReadTrace(WriteFile(content), {.time_scale = time_scale, .limit = limit});
}

// Words are tokens.
absl::StatusOr<std::vector<int32_t>> Words(std::string_view text) {
  std::vector<int32_t> ids;
  for (const char c : text) {
    if (c == '!') return InvalidArgument("no such word");
    if (c != ' ') ids.push_back(c);
  }
  return ids;
}

TEST(TraceFile, MooncakeHasTimesLengthsAndSharedBlocks) {
  const auto trace = Read(
      "{\"timestamp\": 1000, \"input_length\": 7, \"output_length\": 3}\n"
      "{\"timestamp\": 1000, \"input_length\": 600, \"output_length\": 0}\n"
      "{\"timestamp\": 3500, \"input_length\": 600, \"output_length\": 4, \"hash_ids\": [5, 9]}\n",
      0.5);
  ASSERT_TRUE(trace.ok()) << trace.status();
  ASSERT_EQ(trace->size(), 2u) << "a request without an answer is not replayed";
  EXPECT_DOUBLE_EQ((*trace)[0].arrival, 0);
  EXPECT_THAT((*trace)[0].blocks, IsEmpty());
  EXPECT_DOUBLE_EQ((*trace)[1].arrival, 1.25);
  EXPECT_EQ((*trace)[1].output_tokens, 4);
  EXPECT_THAT((*trace)[1].blocks, ElementsAre(5, 9));
}

TEST(TraceFile, AzureHasDates) {
  const auto trace = Read(
      "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
      "2023-11-16 18:17:03.9799600,4808,10\r\n"
      "2023-11-16 18:17:04.0319600,110,27\r\n");
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ((*trace)[1].input_tokens, 110);
  EXPECT_NEAR((*trace)[1].arrival, 0.052, 1e-6);
}

TEST(TraceFile, BurstGptHasFailuresThatAreLeftOut) {
  const std::string text =
      "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
      "45,ChatGPT,472,18,490,Conversation log\n"
      "118,GPT-4,1087,0,1087,Conversation log\n"
      "120,GPT-4,417,276,693,Conversation log\n";
  const auto trace = Read(text);
  ASSERT_TRUE(trace.ok()) << trace.status();
  ASSERT_EQ(trace->size(), 2u);
  EXPECT_EQ((*trace)[1].output_tokens, 276);
  EXPECT_EQ((*trace)[1].arrival, 75);
  EXPECT_EQ(Read(text, 1, 1)->size(), 1u);
}

TEST(TraceFile, ShareGptHasConversationsWhoseTurnsFollowEachOther) {
  const std::string path = WriteFile(
      R"([{"id": "a", "conversations": [{"from": "gpt", "value": "cut off"},
          {"from": "system", "value": "s"}, {"from": "human", "value": "a b"},
          {"from": "gpt", "value": "c d e"}, {"from": "human", "value": "f"},
          {"from": "gpt", "value": "g"}, {"from": "human", "value": "unanswered"}]},
         {"id": "b", "conversations": [{"from": "user", "value": "h"},
          {"from": "assistant", "value": ""}, {"from": "human", "value": "i"}]},
         {"id": "c", "conversations": [{"from": "human", "value": "j"},
          {"from": "bing", "value": "k"}]}])");
  const auto trace = ReadTrace(path, {.encode = Words, .think_time = 2});
  ASSERT_TRUE(trace.ok()) << trace.status();
  ASSERT_EQ(trace->size(), 3u);
  const TraceEntry &first = (*trace)[0], &second = (*trace)[1], &third = (*trace)[2];
  EXPECT_THAT(first.token_ids, ElementsAre('s', 'a', 'b'));
  EXPECT_EQ(first.input_tokens, 3);
  EXPECT_EQ(first.output_tokens, 3);
  EXPECT_EQ(second.after, 0);
  EXPECT_THAT(second.token_ids, ElementsAre('f'));
  EXPECT_EQ(second.input_tokens, 3 + 3 + 1) << "with all that was said before";
  EXPECT_GT(second.arrival, 0);
  EXPECT_EQ(third.after, -1);
  EXPECT_EQ(third.arrival, 0);
  EXPECT_EQ(ReadTrace(path, {.limit = 1, .encode = Words})->size(), 1u);
}

TEST(TraceFile, ThinkingTimesAreExponential) {
  std::string text = "[";
  for (int i = 0; i < 5000; ++i) {
    text += R"({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},)";
  }
  text.back() = ']';
  const auto trace = ReadTrace(WriteFile(text), {.encode = Words, .think_time = 3});
  ASSERT_TRUE(trace.ok()) << trace.status();
  double sum = 0, squares = 0;
  for (const TraceEntry& entry : *trace) {
    sum += entry.arrival;
    squares += entry.arrival * entry.arrival;
  }
  const double n = 5000, mean = sum / n;
  EXPECT_NEAR(mean, 3, 5 * 3 / std::sqrt(n));
  EXPECT_NEAR(std::sqrt(squares / n - mean * mean), 3, 5 * 3 * std::sqrt(2 / n));
}

TEST(TraceFile, ErrorsNameFileLineAndReason) {
  EXPECT_THAT(ReadTrace("/nonexistent/trace.csv", {}).status().ToString(),
              HasSubstr("/nonexistent/trace.csv"));
  const std::string mooncake = "{\"timestamp\": 5, \"input_length\": 7, \"output_length\": 3}\n";
  const std::string azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2,3,4\n";
  const std::string burst =
      "Timestamp,Model,Request tokens,Response tokens,Total tokens\n5,m,3,4,7\n";
  const std::tuple<std::string, const char*, const char*> files[] = {
      {"", "", "no request in it"},
      {"a,b,c\n1,2,3\n", " line 1: ", "found 'a,b,c'"},
      {mooncake + "{\n", " line 2: ", "no JSON object"},
      {mooncake + "{\"input_length\": 7, \"output_length\": 3}\n",
       " line 2: ", "timestamp is 'missing'"},
      {mooncake + "{\"timestamp\": 6, \"input_length\": -7, \"output_length\": 3}",
       " line 2: ", "input_length is '-7', expected a whole number from 0"},
      {mooncake + "{\"timestamp\": 6, \"input_length\": 7, \"output_length\": 1.5}",
       " line 2: ", "output_length is '1.5'"},
      {mooncake + "{\"timestamp\": 4, \"input_length\": 7, \"output_length\": 3}",
       " line 2: ", "time goes backwards, by 0.001 s"},
      {mooncake + "{\"timestamp\": 6, \"input_length\": 600, \"output_length\": 3, "
                  "\"hash_ids\": [1]}",
       " line 2: ", "each of 2 blocks of 512 tokens"},
      {mooncake + "{\"timestamp\": 6, \"input_length\": 6, \"output_length\": 3, "
                  "\"hash_ids\": [\"a\"]}",
       " line 2: ", "hash_ids"},
      {azure + "x,1,2\n", " line 3: ", "TIMESTAMP is 'x', expected seconds or YYYY-MM-DD"},
      {azure + "3,1\n", " line 3: ", "it has 2 columns, expected at least 3"},
      {azure + "3,-1,2\n", " line 3: ", "ContextTokens is '-1'"},
      {azure + "1,1,2\n", " line 3: ", "time goes backwards, by 1 s"},
      {burst + "6,m,3,,7\n", " line 3: ", "Response tokens is ''"},
      {burst + "6,m,9999999999,4,7\n", " line 3: ", "Request tokens is '9999999999'"}};
  for (const auto& [content, where, why] : files) {
    EXPECT_THAT(Read(content).status().ToString(), AllOf(HasSubstr(where), HasSubstr(why)));
  }
}

TEST(TraceFile, ErrorsNameTheConversationAndReason) {
  const std::string good =
      R"([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, )";
  const std::pair<std::string, const char*> files[] = {
      {good, "line 1, column"},
      {good + "7]", "conversation 2: it has no list of conversations"},
      {good + R"({"conversations": [{"from": "human"}]}])", "conversation 2: a message without"},
      {good + R"({"conversations": [{"from": "tool", "value": "x"}]}])",
       "conversation 2: a message is from 'tool', expected human, gpt or system"},
      {good + R"({"conversations": [{"from": "human", "value": "!"}]}])",
       "conversation 2: no such word"}};
  for (const auto& [content, why] : files) {
    EXPECT_THAT(ReadTrace(WriteFile(content), {.encode = Words}).status().ToString(),
                HasSubstr(why));
  }
  EXPECT_THAT(Read(good).status().ToString(), HasSubstr("give --tokenizer"));
}

}  // namespace
}  // namespace treadle
