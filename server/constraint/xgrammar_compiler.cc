// The only source that sees XGrammar.
#include <dlpack/dlpack.h>
#include <support/logging.h>
#include <sys/resource.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "base/utf8.h"
#include "engine/plan/iteration_plan.h"
#include "server/constraint/constraint_compiler.h"
#include "server/constraint/json_style.h"
#include "server/constraint/prepared_constraint.h"
#include "server/constraint/refused_constraints.h"
#include "server/constraint/trial.h"

namespace treadle {
namespace {

constexpr size_t kShownError = 200;

using Clock = std::chrono::steady_clock;

// Tokens of a constraint's trial.
constexpr int kTrialTokens = 48;  // of each of two ways
constexpr int kFarTokens = 256;   // of the third one

constexpr int kNiceness = 5;  // of reading ahead: as of the threads that compile (work_pool.h)

// The library's last warning on this thread: it enforces only a part of the constraint.
thread_local std::string warning;

class Matcher final : public TokenConstraint {
 public:
  Matcher(const xgrammar::CompiledGrammar& grammar, int32_t vocab, const Tokenizer& tokenizer)
      : vocab_(vocab), tokenizer_(tokenizer), matcher_(grammar) {}

  absl::Status Accept(int32_t token) override {
    try {
      if (matcher_.AcceptToken(token)) {
        tokens_.push_back(token);
        return absl::OkStatus();
      }
    } catch (const std::exception& error) {
      return Failed(error);
    }
    return InvalidArgument("the constraint does not allow token ", token);
  }

  void Rollback(int32_t count) override {
    matcher_.Rollback(count);
    tokens_.resize(tokens_.size() - static_cast<size_t>(count));
  }

  // Foresees what the grammar forces, with the white space that the answer had at such places.
  std::vector<int32_t> Foresee() override {
    for (; read_ < tokens_.size(); ++read_)
      style_.Read(tokenizer_.TokenBytes(tokens_[read_], true));
    JsonStyle style = style_;
    std::string text;
    int steps = 0;
    try {
      while (text.size() < kMaxForeseen) {
        std::string next = matcher_.FindJumpForwardString();
        if (!next.empty()) {
          if (!matcher_.AcceptString(next)) break;
        } else {
          const std::vector<std::string> choices = style.Next();
          const auto taken = std::ranges::find_if(
              choices, [&](const std::string& choice) { return matcher_.AcceptString(choice); });
          if (taken == choices.end()) break;
          next = *taken;
        }
        ++steps;
        style.Read(next);
        text += next;
      }
      if (steps > 0) matcher_.Rollback(steps);
    } catch (const std::exception&) {
      return {};
    }
    return text.empty() ? std::vector<int32_t>() : Encode(text);
  }

  absl::Status FillMask(std::span<uint32_t> allowed) override {
    auto words = static_cast<int64_t>(allowed.size());
    TREADLE_CHECK(allowed.size() == MaskWords(vocab_));
    DLTensor tensor{.data = allowed.data(),
                    .device = {kDLCPU, 0},
                    .ndim = 1,
                    .dtype = {kDLInt, 32, 1},
                    .shape = &words,
                    .strides = nullptr,
                    .byte_offset = 0};
    try {
      // False: every token is allowed. A matcher that has terminated is not asked again.
      if (!matcher_.FillNextTokenBitmask(&tensor)) std::ranges::fill(allowed, ~0u);
    } catch (const std::exception& error) {
      return Failed(error);
    }
    for (size_t i = 0; i + 1 < allowed.size(); ++i) {
      if (allowed[i] != 0) return absl::OkStatus();
    }
    const uint32_t used = vocab_ % 32 == 0 ? ~0u : (1u << (vocab_ % 32)) - 1;
    if ((allowed.back() & used) != 0) return absl::OkStatus();
    return InvalidArgument("the constraint allows no further token, and no end");
  }

 private:
  static constexpr size_t kMaxForeseen = 64;  // bytes
  static constexpr int64_t kContext = 4;      // tokens before them that decide how they are cut

  // The tokens of a text that follows what is there; none, if they do not begin with it.
  std::vector<int32_t> Encode(const std::string& text) const {
    std::string whole;
    const auto last = std::min(std::ssize(tokens_), kContext);
    for (auto token = tokens_.end() - last; token != tokens_.end(); ++token) {
      whole += tokenizer_.TokenBytes(*token, true);
    }
    const auto ids = tokenizer_.Encode(whole + text, {.add_special = false});
    if (!ids.ok()) return {};
    size_t bytes = 0;
    auto first = ids->end();
    while (first != ids->begin() && bytes < text.size()) {
      bytes += tokenizer_.TokenBytes(*--first, true).size();
    }
    return bytes == text.size() ? std::vector<int32_t>(first, ids->end()) : std::vector<int32_t>();
  }

  static absl::Status Failed(const std::exception& error) {
    return absl::InternalError(Str("the constraint: ", Cut(Printable(error.what()), kShownError)));
  }

  const int32_t vocab_;
  const Tokenizer& tokenizer_;
  xgrammar::GrammarMatcher matcher_;
  std::vector<int32_t> tokens_;  // accepted
  size_t read_ = 0;              // of these: by style_
  JsonStyle style_;
};

class CompiledConstraint final : public ConstraintGrammar {
 public:
  CompiledConstraint(xgrammar::CompiledGrammar grammar, int32_t vocab, const Tokenizer& tokenizer)
      : vocab_(vocab), tokenizer_(tokenizer), grammar_(std::move(grammar)) {}

  std::unique_ptr<TokenConstraint> Begin() const override {
    return std::make_unique<Matcher>(grammar_, vocab_, tokenizer_);
  }
  int32_t vocab() const override { return vocab_; }
  size_t bytes() const { return grammar_.MemorySizeBytes(); }

 private:
  const int32_t vocab_;
  const Tokenizer& tokenizer_;
  const xgrammar::CompiledGrammar grammar_;
};

class XGrammarCompiler final : public ConstraintCompiler {
 public:
  XGrammarCompiler(const Tokenizer& tokenizer, int32_t vocab, const std::vector<int32_t>& end_ids)
      : tokenizer_(tokenizer), vocab_(vocab) {
    for (const int32_t id : end_ids) {
      if (id >= 0 && id < vocab) end_ids_.push_back(id);
    }
  }

  ~XGrammarCompiler() override {
    if (ahead_.joinable()) ahead_.join();
  }

  void ReadAhead(std::function<void()> done) override {
    TREADLE_CHECK(!ahead_.joinable());
    if (end_ids_.empty()) return;
    try {
      ahead_ = std::thread([this, done = std::move(done)] {
        // On Linux a process id of 0 means this thread. A refusal only costs latency.
        setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + kNiceness);
        try {
          ReadVocabularyOnce();
        } catch (const std::exception&) {
          return;  // no memory, say: the first Compile tries again
        }
        done();
      });
    } catch (const std::system_error&) {  // no thread: likewise
    }
  }

  bool Works() const override { return !end_ids_.empty(); }
  bool Keeps(const Constraint& constraint) override {
    const auto key = Prepare(constraint);
    return !key.ok() || Find(*key) != nullptr || !refused_.Find(*key, Clock::now()).ok();
  }

  absl::StatusOr<std::shared_ptr<const ConstraintGrammar>> Compile(
      const Constraint& constraint) override {
    if (end_ids_.empty()) {
      return InvalidArgument("is not supported: this model has no token that ends an answer");
    }
    TREADLE_ASSIGN_OR_RETURN(const PreparedConstraint key, Prepare(constraint));
    if (auto found = Find(key)) return found;
    TREADLE_RETURN_IF_ERROR(refused_.Find(key, Clock::now()));
    ReadVocabularyOnce();
    auto made = TryAndMake(key);
    if (made.ok()) {
      Keep(key, *made);
    } else if (absl::IsInvalidArgument(made.status())) {
      refused_.Add(key, made.status(), Clock::now());
    }
    return made;
  }

 private:
  using Entry = std::pair<PreparedConstraint, std::shared_ptr<const CompiledConstraint>>;

  absl::StatusOr<std::shared_ptr<const CompiledConstraint>> TryAndMake(
      const PreparedConstraint& key) {
    TREADLE_RETURN_IF_ERROR(
        InTrial([this, &key] { Try(key); },
                Str("to compile it, and the masks of ", 2 * kTrialTokens + kFarTokens, " tokens")));
    return Make(key);
  }

  // Requires that the vocabulary was read.
  absl::StatusOr<std::shared_ptr<const CompiledConstraint>> Make(
      const PreparedConstraint& constraint) {
    warning.clear();
    try {
      const auto made =
          std::make_shared<CompiledConstraint>(CompileBy(constraint), vocab_, tokenizer_);
      if (!warning.empty()) {
        return InvalidArgument("cannot be enforced: ", Cut(Printable(warning), kShownError));
      }
      std::vector<uint32_t> allowed(MaskWords(vocab_));
      TREADLE_RETURN_IF_ERROR(made->Begin()->FillMask(allowed));
      return made;
    } catch (const std::runtime_error& error) {  // of which what() of the library's has more
      return InvalidArgument("cannot be compiled: ",
                             Cut(Printable(error.std::runtime_error::what()), kShownError));
    } catch (const std::exception& error) {
      return InvalidArgument("cannot be compiled: ", Cut(Printable(error.what()), kShownError));
    }
  }

  // Throws what the library throws.
  xgrammar::CompiledGrammar CompileBy(const PreparedConstraint& constraint) {
    using Form = PreparedConstraint::Form;
    switch (constraint.form) {
      case Form::kSchema:
        return compiler_->CompileJSONSchema(
            constraint.text, /*any_whitespace=*/true, /*indent=*/std::nullopt,
            /*separators=*/std::nullopt, /*strict_mode=*/true,
            constraint.any_whitespace ? std::nullopt : std::optional(kMaxWhitespace));
      case Form::kRegex:
        return compiler_->CompileRegex(constraint.text);
      case Form::kGrammar:
        return compiler_->CompileGrammar(constraint.text);
      case Form::kStructuralTag:
        break;
    }
    return compiler_->CompileStructuralTag(constraint.text);
  }

  // Compiles it, and works out masks along two ways through it. In a child process.
  void Try(const PreparedConstraint& key) {
    const auto made = Make(key);
    std::minstd_rand random(1);
    std::vector<uint32_t> allowed(MaskWords(vocab_));
    const auto allows = [&](int32_t token) {
      return (allowed[token / 32] >> (token % 32) & 1) != 0;
    };
    for (int way = 0; made.ok() && way < 3; ++way) {
      const std::unique_ptr<TokenConstraint> state = (*made)->Begin();
      // The last way looks behind what is written out: by long steps.
      const bool far = way == 2;
      for (int i = 0; i < (far ? kFarTokens : kTrialTokens) && state->FillMask(allowed).ok(); ++i) {
        auto token = static_cast<int32_t>(random() % static_cast<uint32_t>(vocab_));
        while (!allows(token)) token = (token + 1) % vocab_;
        for (int32_t other = 0; far && other < vocab_; ++other) {
          if (allows(other) && lengths_[other] > lengths_[token]) token = other;
        }
        if (std::ranges::find(end_ids_, token) != end_ids_.end()) break;
        if (!state->Accept(token).ok()) break;
        state->Foresee();
      }
    }
  }

  void ReadVocabularyOnce() {
    std::call_once(vocabulary_read_, [this] { ReadVocabulary(); });
  }

  // Control tokens have no bytes, and so are allowed nowhere, but for those that end.
  void ReadVocabulary() {
    std::vector<std::string> bytes(static_cast<size_t>(vocab_));
    for (int32_t id = 0; id < vocab_; ++id) {
      bytes[id] = tokenizer_.TokenBytes(id, false);
      lengths_.push_back(static_cast<int32_t>(bytes[id].size()));
    }
    compiler_.emplace(xgrammar::TokenizerInfo(bytes, xgrammar::VocabType::RAW, vocab_, end_ids_),
                      /*max_threads=*/1, /*cache_enabled=*/false);
  }

  std::shared_ptr<const CompiledConstraint> Find(const PreparedConstraint& key) {
    MutexLock lock(mutex_);
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return nullptr;
    recent_.splice(recent_.begin(), recent_, found->second);
    return found->second->second;
  }

  void Keep(const PreparedConstraint& key, std::shared_ptr<const CompiledConstraint> made) {
    const auto size_of = [](const Entry& entry) {
      return entry.first.text.size() + entry.second->bytes();
    };
    MutexLock lock(mutex_);
    if (by_key_.contains(key)) return;  // two compiled it at once
    recent_.emplace_front(key, std::move(made));
    by_key_[key] = recent_.begin();
    bytes_ += size_of(recent_.front());
    while (bytes_ > kCacheBytes) {
      bytes_ -= size_of(recent_.back());
      by_key_.erase(recent_.back().first);
      recent_.pop_back();
    }
  }

  const Tokenizer& tokenizer_;
  const int32_t vocab_;
  std::vector<int32_t> end_ids_;  // constant after construction
  std::once_flag vocabulary_read_;
  std::vector<int32_t> lengths_;  // of tokens, in bytes; this and below: constant once read
  std::optional<xgrammar::GrammarCompiler> compiler_;  // constant once read
  RefusedConstraints refused_;

  Mutex mutex_;
  std::list<Entry> recent_ ABSL_GUARDED_BY(mutex_);  // the latest first
  std::map<PreparedConstraint, std::list<Entry>::iterator> by_key_ ABSL_GUARDED_BY(mutex_);
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;

  std::thread ahead_;  // last: it uses the others
};

}  // namespace

std::unique_ptr<ConstraintCompiler> ConstraintCompiler::Create(
    const Tokenizer& tokenizer, int32_t vocab, const std::vector<int32_t>& end_ids) {
  return std::make_unique<XGrammarCompiler>(tokenizer, vocab, end_ids);
}

}  // namespace treadle

// The library's messages, which it leaves to who uses it (XGRAMMAR_LOG_CUSTOMIZE).
namespace xgrammar {

void LogFatalImpl(const std::string& file, int line, const std::string& message) {
  throw LogFatalError(file, line, message);
}

void LogMessageImpl(const std::string&, int, int level, const std::string& message) {
  if (level >= XGRAMMAR_LOG_LEVEL_WARNING) treadle::warning = message;
}

}  // namespace xgrammar
