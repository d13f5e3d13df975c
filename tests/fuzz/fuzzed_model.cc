#include "tests/fuzz/fuzzed_model.h"

#include "base/status.h"
#include "server/constraint/prepared_constraint.h"

namespace treadle {
namespace {

// Reads constraints and makes nothing of them: the library that would is not fuzzed here.
class ConstraintReader final : public ConstraintCompiler {
 public:
  bool Works() const override { return true; }
  void ReadAhead(std::function<void()>) override {}
  bool Keeps(const Constraint&) override { return false; }
  absl::StatusOr<std::shared_ptr<const ConstraintGrammar>> Compile(
      const Constraint& constraint) override {
    TREADLE_RETURN_IF_ERROR(Prepare(constraint).status());
    return nullptr;
  }
};

}  // namespace

const ServedModel& FuzzedModel() {
  static const ServedModel model = [] {
    TokenizerSpec spec;
    spec.model = TokenizerSpec::Model::kSentencePiece;
    const char digits[] = "0123456789ABCDEF";
    for (int byte = 0; byte < 256; ++byte) {
      spec.tokens.push_back(
          {std::string("<0x") + digits[byte / 16] + digits[byte % 16] + ">", 0, TokenKind::kByte});
    }
    spec.tokens.push_back({"<s>", 0, TokenKind::kControl});
    spec.tokens.push_back({"</s>", 0, TokenKind::kControl});
    // One more than the model has rows.
    for (const char* text : {"a", "b", "ab", " "}) spec.tokens.push_back({text});
    spec.bos = 256;
    spec.eos = 257;
    spec.end_ids = {257};
    spec.add_bos = true;
    ServedModel made;
    made.vocab = static_cast<int32_t>(spec.tokens.size()) - 1;
    made.max_context = 64;
    made.kv_pages = 7;
    made.paging.page_size = 8;
    made.end_ids = spec.end_ids;
    made.tokenizer = *Tokenizer::Create(std::move(spec));
    made.chat_template = *ChatTemplate::Parse(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('late') }}{% endif %}<{{ m.role }}>{{ m['content'] | trim }}\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
        "{# what says the form of calls: <tool_call> {\"name\": \" #}");
    made.constraints = std::make_unique<ConstraintReader>();
    return made;
  }();
  return model;
}

}  // namespace treadle
