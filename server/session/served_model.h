// The service's knowledge of the model that it serves: no tensors, no layers.
//
// Thread safety: constant once serving began; may be read from any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/plan/kv_paging.h"
#include "models/text/jinja/chat_template.h"
#include "models/text/tokenizer.h"
#include "scheduler/request/request.h"
#include "server/adapters/adapter_registry.h"
#include "server/constraint/constraint_compiler.h"

namespace treadle {

struct ServedModel {
  std::string name;                     // what answers say; the first of `names`
  std::vector<std::string> names = {};  // all that clients may say
  std::string architecture;
  std::string backend;  // the backend's own description
  std::string sha256;   // of the model file, if it was checked; lower case
  // Digest of the numerics key (docs/design.md, N4): equal where answers are.
  std::string fingerprint;
  int64_t parameters = 0;
  int32_t vocab = 0;
  int64_t hidden = 0;       // size of an embedding
  int64_t max_context = 0;  // prompt + generated tokens of one sequence
  PageCounts kv_pages;      // of the tightest stage
  KvPaging paging;

  std::vector<int32_t> end_ids;  // generation stops at any
  // For what a request leaves out; none: the model's files recommend nothing.
  std::optional<SamplingParameters> sampling_defaults = {};

  std::unique_ptr<Tokenizer> tokenizer;             // null: token ids only
  std::unique_ptr<ConstraintCompiler> constraints;  // null: as tokenizer; uses it
  std::optional<ChatTemplate> chat_template;
  std::string chat_template_problem;  // why there is none, for the user; or empty

  // The files of a Hugging Face folder that hold tokenizer and chat template, by name, for who has
  // none; without any where they cannot be written. Takes its time. Empty: there is no tokenizer.
  std::function<absl::StatusOr<std::map<std::string, std::string>>()> tokenizer_files = {};

  std::shared_ptr<AdapterRegistry> adapters = {};  // null: there are none

  SamplingParameters sampling() const { return sampling_defaults.value_or(SamplingParameters()); }
  // `name`: what a client says.
  bool IsCalled(std::string_view asked) const {
    return asked == name || std::ranges::find(names, asked) != names.end();
  }
  // Whether the name is an adapter's; the model's own names come first.
  bool IsAdapter(std::string_view asked) const {
    return adapters && !IsCalled(asked) && adapters->Has(asked);
  }
  // The name in answers to a request with that adapter (empty: none).
  const std::string& NameFor(const std::string& adapter) const {
    return adapter.empty() ? name : adapter;
  }
  int32_t bos() const { return tokenizer ? tokenizer->spec().bos : -1; }
};

}  // namespace treadle
