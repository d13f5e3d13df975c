// The answer on the terminal: text as it comes, or one JSON object at the end. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace treadle::v1 {
class GenerateResponse;
}

namespace treadle {

class AnswerPrinter {
 public:
  struct Options {
    int32_t candidates = 1;
    bool json = false;
    bool prompt_logprobs = false;  // in the JSON object
  };
  explicit AnswerPrinter(const Options& options);
  ~AnswerPrinter();

  void Add(const v1::GenerateResponse& response);  // with one candidate and no JSON: prints
  void Finish();                                   // prints what is left

 private:
  void PrintText();
  std::string ToJson() const;

  const Options options_;
  std::unique_ptr<v1::GenerateResponse> all_;  // everything so far
};

}  // namespace treadle
