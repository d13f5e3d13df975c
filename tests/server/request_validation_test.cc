#include "server/session/request_validation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "server/grpc/inference.pb.h"
#include "server/grpc/messages.h"
#include "server/session/sampling_defaults.h"
#include "tests/server/byte_tokenizer.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using testing::HasSubstr;

constexpr uint64_t kSeed = 4711;

ServedModel Model() {
  ServedModel model;
  model.vocab = 258;
  model.max_context = 64;
  model.kv_pages = 7;
  model.paging.page_size = 8;
  model.tokenizer = ByteTokenizer::Make();
  model.end_ids = model.tokenizer->spec().end_ids;
  auto parsed = ChatTemplate::Parse("{% for m in messages %}{{ m.content }}{% endfor %}");
  if (parsed.ok()) model.chat_template = std::move(*parsed);
  return model;
}

v1::GenerateRequest Valid() {
  v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(1);
  request.mutable_token_ids()->add_ids(2);
  return request;
}

absl::StatusOr<ValidatedRequest> Validate(const v1::GenerateRequest& request) {
  static const ServedModel model = Model();
  return ValidateRequest(ToRequest(request, model), model,
                         {.max_batch_size = 4, .default_max_new_tokens = 512}, kSeed);
}

struct BadCase {
  std::string message;  // part of the error: field, value, expectation
  std::function<void(v1::GenerateRequest&)> spoil;
};

void PrintTo(const BadCase& bad, std::ostream* out) { *out << bad.message; }

class BadRequest : public testing::TestWithParam<BadCase> {};

TEST_P(BadRequest, SaysFieldValueAndExpectation) {
  v1::GenerateRequest request = Valid();
  GetParam().spoil(request);
  const auto result = Validate(request);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr(GetParam().message));
}

using R = v1::GenerateRequest;
const float kNan = std::nanf("");
const float kInf = std::numeric_limits<float>::infinity();

INSTANTIATE_TEST_SUITE_P(
    Table, BadRequest,
    testing::Values(
        BadCase{"prompt is missing, expected one of text", [](R& r) { r.clear_prompt(); }},
        BadCase{"token_ids.ids is empty", [](R& r) { r.mutable_token_ids()->clear_ids(); }},
        BadCase{"token_ids.ids[2] is 258, expected 0 to 257",
                [](R& r) { r.mutable_token_ids()->add_ids(258); }},
        BadCase{"token_ids.ids[2] is -1, expected",
                [](R& r) { r.mutable_token_ids()->add_ids(-1); }},
        BadCase{"chat.messages is empty", [](R& r) { r.mutable_chat(); }},
        BadCase{"chat.messages[0].role is 'robot', expected system, user, assistant or tool",
                [](R& r) { r.mutable_chat()->add_messages()->set_role("robot"); }},
        BadCase{"prompt has 64 tokens, expected at most 63",
                [](R& r) { r.set_text(std::string(63, 'a')); }},
        BadCase{"request_id has 300 bytes, expected at most 256",
                [](R& r) { r.set_request_id(std::string(300, 'a')); }},
        BadCase{"sampling.temperature is nan, expected a finite number >= 0",
                [](R& r) { r.mutable_sampling()->set_temperature(kNan); }},
        BadCase{"sampling.temperature is inf",
                [](R& r) { r.mutable_sampling()->set_temperature(kInf); }},
        BadCase{"sampling.temperature is -0.5",
                [](R& r) { r.mutable_sampling()->set_temperature(-0.5f); }},
        BadCase{"sampling.top_k is -1, expected at least 1, or 0 for off",
                [](R& r) { r.mutable_sampling()->set_top_k(-1); }},
        BadCase{"sampling.top_p is 1.5, expected (0, 1]",
                [](R& r) { r.mutable_sampling()->set_top_p(1.5f); }},
        BadCase{"sampling.top_p is 0, expected (0, 1]",
                [](R& r) { r.mutable_sampling()->set_top_p(0); }},
        BadCase{"sampling.min_p is -0.1, expected [0, 1]",
                [](R& r) { r.mutable_sampling()->set_min_p(-0.1f); }},
        BadCase{"sampling.repetition_penalty is 0, expected a finite number > 0",
                [](R& r) { r.mutable_sampling()->set_repetition_penalty(0); }},
        BadCase{"sampling.presence_penalty is 2.5, expected [-2, 2]",
                [](R& r) { r.mutable_sampling()->set_presence_penalty(2.5f); }},
        BadCase{"sampling.frequency_penalty is nan, expected [-2, 2]",
                [](R& r) { r.mutable_sampling()->set_frequency_penalty(kNan); }},
        BadCase{"sampling.num_candidates is 5, expected 1 to 4",
                [](R& r) { r.mutable_sampling()->set_num_candidates(5); }},
        BadCase{"sampling.num_candidates is 0, expected 1 to 4",
                [](R& r) { r.mutable_sampling()->set_num_candidates(0); }},
        BadCase{"speculate is 'x', expected off or ngram", [](R& r) { r.set_speculate("x"); }},
        BadCase{"speculate is 'draft', expected off or ngram (this server has no draft model)",
                [](R& r) { r.set_speculate("draft"); }},
        BadCase{"sampling.logit_bias[0].token_id is 999, expected 0 to 257",
                [](R& r) { r.mutable_sampling()->add_logit_bias()->set_token_id(999); }},
        BadCase{"sampling.logit_bias[0].bias is 101, expected [-100, 100]",
                [](R& r) { r.mutable_sampling()->add_logit_bias()->set_bias(101); }},
        BadCase{"sampling.logit_bias[1].token_id is 0, which an earlier entry has",
                [](R& r) {
                  r.mutable_sampling()->add_logit_bias();
                  r.mutable_sampling()->add_logit_bias();
                }},
        BadCase{"stopping.max_new_tokens is 0, expected at least 1",
                [](R& r) { r.mutable_stopping()->set_max_new_tokens(0); }},
        BadCase{"stopping.max_new_tokens is 63 after 2 prompt tokens, expected at most 62",
                [](R& r) { r.mutable_stopping()->set_max_new_tokens(63); }},
        BadCase{"stopping.max_new_tokens is 2147483647 after",
                [](R& r) { r.mutable_stopping()->set_max_new_tokens(2147483647); }},
        BadCase{"the request needs 8 K/V pages",
                [](R& r) { r.mutable_stopping()->set_max_new_tokens(60); }},
        BadCase{"stopping.min_new_tokens is 11, expected 0 to max_new_tokens (10)",
                [](R& r) {
                  r.mutable_stopping()->set_max_new_tokens(10);
                  r.mutable_stopping()->set_min_new_tokens(11);
                }},
        BadCase{"stopping.min_new_tokens is -1",
                [](R& r) { r.mutable_stopping()->set_min_new_tokens(-1); }},
        BadCase{"stopping.stop_strings[1] has 0 bytes, expected 1 to 512",
                [](R& r) {
                  r.mutable_stopping()->add_stop_strings("a");
                  r.mutable_stopping()->add_stop_strings("");
                }},
        BadCase{"stopping.stop_strings has 17 entries, expected at most 16",
                [](R& r) {
                  for (int i = 0; i < 17; ++i) r.mutable_stopping()->add_stop_strings("a");
                }},
        BadCase{"stopping.stop_token_ids[0] is -2, expected 0 to 257",
                [](R& r) { r.mutable_stopping()->add_stop_token_ids(-2); }},
        BadCase{"response.logprobs is 21, expected 0 to 20",
                [](R& r) { r.mutable_response()->set_logprobs(21); }},
        BadCase{"response.prompt_logprobs is -1, expected 0 to 20",
                [](R& r) { r.mutable_response()->set_prompt_logprobs(-1); }}));

TEST(RequestValidation, AbsentFieldsHaveTheDocumentedDefaults) {
  ASSERT_OK_AND_ASSIGN(const auto valid, Validate(Valid()));
  const RequestSpec& spec = valid.spec;
  EXPECT_EQ(spec.sampling.temperature, 1);
  EXPECT_EQ(spec.sampling.top_p, 1);
  EXPECT_EQ(spec.sampling.top_k, 0);
  EXPECT_EQ(spec.sampling.seed, kSeed);
  EXPECT_EQ(spec.candidates, 1);
  EXPECT_EQ(spec.top_logprobs, -1);
  EXPECT_EQ(spec.prompt_logprobs, -1);
  // 512 clipped to the cache: 7 pages of 8 tokens less the prompt.
  EXPECT_EQ(spec.max_new_tokens, 54);
  EXPECT_EQ(spec.end_tokens, std::vector<int32_t>{ByteTokenizer::kEnd});
}

// Qwen3's generation_config.json, of 2025: temperature 0.6, top_k 20, top_p 0.95.
TEST(RequestValidation, AbsentFieldsAreAsTheModelsAuthorsRecommend) {
  ServedModel model = Model();
  ASSERT_OK_AND_ASSIGN(
      const auto defaults,
      ReadSamplingDefaults(
          {{"temperature", 0.6}, {"top_k", 20}, {"top_p", 0.95}, {"repetition_penalty", 1.05}},
          "f"));
  model.sampling_defaults = defaults;
  const auto sampling_of = [&](const v1::GenerateRequest& request) {
    const auto valid = ValidateRequest(ToRequest(request, model), model, {}, kSeed);
    EXPECT_TRUE(valid.ok()) << valid.status();
    return valid.ok() ? valid->spec.sampling : SamplingParameters();
  };
  v1::GenerateRequest request = Valid();
  SamplingParameters sampling = sampling_of(request);
  EXPECT_EQ(sampling.temperature, 0.6f);
  EXPECT_EQ(sampling.top_k, 20);
  EXPECT_EQ(sampling.top_p, 0.95f);
  EXPECT_EQ(sampling.min_p, 0);
  EXPECT_EQ(sampling.repetition_penalty, 1.05f);
  EXPECT_EQ(EffectsJson(sampling),
            R"({"temperature":0.6,"top_k":20,"top_p":0.95,"repetition_penalty":1.05})");
  // A value that is asked counts, also where it is the default.
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_top_k(0);
  request.mutable_sampling()->set_top_p(1);
  request.mutable_sampling()->set_repetition_penalty(1);
  sampling = sampling_of(request);
  EXPECT_EQ(EffectsJson(sampling), R"({"temperature":0})");
  EXPECT_FALSE(sampling.NeedsCounts());
}

TEST(RequestValidation, RecommendationsThatNoRequestMayHaveAreNamed) {
  const auto problem = [](const char* name, double value) {
    return std::string(ReadSamplingDefaults({{name, value}}, "FILE").status().message());
  };
  EXPECT_EQ(problem("top_p", 1.5),
            "FILE: top_p is 1.5, expected (0, 1]; --generation-config none does not read it");
  EXPECT_THAT(problem("temperature", -1), HasSubstr("temperature is -1, expected a finite number"));
  EXPECT_THAT(problem("temperature", std::nan("")), HasSubstr("temperature is nan"));
  EXPECT_THAT(problem("min_p", 2), HasSubstr("min_p is 2, expected [0, 1]"));
  EXPECT_THAT(problem("repetition_penalty", 0), HasSubstr("repetition_penalty is 0"));
  EXPECT_THAT(problem("top_k", 2.5),
              HasSubstr("top_k is 2.5, expected a whole number, at least 1, or 0 for off"));
  EXPECT_THAT(problem("top_k", 1e12), HasSubstr("top_k is 1e+12, expected a whole number"));
  for (const double off : {0, -1}) {
    EXPECT_EQ(ReadSamplingDefaults({{"top_k", off}}, "FILE")->top_k, 0);
  }
}

TEST(RequestValidation, WhatFitsExactlyPasses) {
  v1::GenerateRequest request = Valid();
  request.mutable_stopping()->set_max_new_tokens(54);
  EXPECT_TRUE(Validate(request).ok());
  request.mutable_sampling()->set_num_candidates(4);  // 4 * 2 pages do not share: 8 > 7
  request.mutable_stopping()->set_max_new_tokens(7);
  EXPECT_FALSE(Validate(request).ok());
  request.mutable_stopping()->set_max_new_tokens(6);
  EXPECT_TRUE(Validate(request).ok());
  request.mutable_stopping()->clear_max_new_tokens();
  ASSERT_OK_AND_ASSIGN(const auto valid, Validate(request));
  EXPECT_EQ(valid.spec.max_new_tokens, 6);
}

// A ring of 3 pages is all that a sequence takes, however long it is.
TEST(RequestValidation, PagesBehindAWindowAreNotNeeded) {
  ServedModel model = Model();
  model.kv_pages = {0, 7};
  model.paging = {.page_size = 8, .ring = 3, .whole = false};
  v1::GenerateRequest request = Valid();
  const auto validate = [&] {
    return ValidateRequest(ToRequest(request, model), model,
                           {.max_batch_size = 4, .default_max_new_tokens = 512}, kSeed);
  };
  ASSERT_TRUE(validate().ok());
  EXPECT_EQ(validate()->spec.max_new_tokens, 62);  // the context's end
  request.mutable_sampling()->set_num_candidates(3);
  EXPECT_EQ(validate()->spec.max_new_tokens, 14);  // 2 pages each
  request.mutable_stopping()->set_max_new_tokens(15);
  EXPECT_THAT(std::string(validate().status().message()),
              HasSubstr("the request needs 9 window K/V pages (2 prompt tokens"));
  EXPECT_THAT(std::string(validate().status().message()), HasSubstr("at most 7 window"));
}

TEST(RequestValidation, ZeroSeedIsASeed) {
  v1::GenerateRequest request = Valid();
  request.mutable_sampling()->set_seed(0);
  EXPECT_EQ(Validate(request)->spec.sampling.seed, 0u);
}

TEST(RequestValidation, IgnoreEosKeepsTheClientsOwnStops) {
  v1::GenerateRequest request = Valid();
  request.mutable_stopping()->set_ignore_eos(true);
  EXPECT_TRUE(Validate(request)->spec.end_tokens.empty());
  request.mutable_stopping()->add_stop_token_ids(7);
  EXPECT_EQ(Validate(request)->spec.end_tokens, std::vector<int32_t>{7});
}

TEST(RequestValidation, TextBeginsWithTheModelsBeginningAndChatAsTheTemplateSays) {
  v1::GenerateRequest request;
  request.set_text("ab");
  EXPECT_EQ(Validate(request)->spec.prompt,
            (std::vector<int32_t>{ByteTokenizer::kBegin, 'a', 'b'}));
  v1::ChatMessage* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content("hi");
  ASSERT_OK_AND_ASSIGN(const auto valid, Validate(request));
  EXPECT_EQ(valid.spec.prompt, (std::vector<int32_t>{'h', 'i'}));
}

TEST(RequestValidation, WithoutATokenizerOnlyIdsAreServed) {
  ServedModel model = Model();
  model.tokenizer = nullptr;
  v1::GenerateRequest request;
  request.set_text("ab");
  const auto result = ValidateRequest(ToRequest(request, model), model, {}, 1);
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("text: this model has no tokenizer, expected token_ids"));
  EXPECT_TRUE(ValidateRequest(ToRequest(Valid(), model), model, {}, 1).ok());
}

// Whoever counts before it reads says what validation says of what was read.
TEST(ValidateEntries, SaysWhatValidationSays) {
  const struct {
    const char* field;
    std::function<void(v1::GenerateRequest&)> add;
  } rows[] = {
      {"chat.messages", [](auto& r) { r.mutable_chat()->add_messages(); }},
      {"token_ids.ids", [](auto& r) { r.mutable_token_ids()->add_ids(1); }},
      {"sampling.logit_bias", [](auto& r) { r.mutable_sampling()->add_logit_bias(); }},
      {"stopping.stop_strings", [](auto& r) { r.mutable_stopping()->add_stop_strings("x"); }},
      {"stopping.stop_token_ids", [](auto& r) { r.mutable_stopping()->add_stop_token_ids(1); }},
  };
  const ServedModel model = Model();
  constexpr int64_t kFew = 4096, entries = kFew + 1;
  for (const auto& [field, add] : rows) {
    v1::GenerateRequest request;
    for (int64_t i = 0; i < entries; ++i) add(request);
    if (!request.has_chat() && !request.has_token_ids()) request.set_text("a");
    const absl::Status said = ValidateEntries(field, entries, /*embedding=*/false, model);
    EXPECT_EQ(said, Validate(request).status());
    EXPECT_THAT(std::string(said.message()), HasSubstr("expected at most"));
    EXPECT_TRUE(ValidateEntries(field, kFew, /*embedding=*/false, model).ok());
  }
  EXPECT_THAT(std::string(ValidateEntries("token_ids.ids", 5000, true, model).message()),
              HasSubstr("expected at most 64 (the context)"));
  EXPECT_FALSE(ValidateEntries("a field of tomorrow", entries, false, model).ok());
}

}  // namespace
}  // namespace treadle
