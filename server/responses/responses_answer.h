// One answer of OpenAI's Responses API in the making. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "server/openai/block_answer.h"
#include "server/responses/response_store.h"
#include "server/responses/responses_request.h"

namespace treadle {

class ResponsesAnswer final : public BlockAnswer {
 public:
  // `id`: of the response; `created`: seconds since 1970. If the request says so, `store` keeps
  // the answer for `owner` once it is whole. `model` must outlive this.
  ResponsesAnswer(const ServedModel& model, const ResponsesRequest& request, std::string id,
                  int64_t created, std::string owner, std::shared_ptr<ResponseStore> store);

  std::string Whole() const override;
  std::string ErrorEvent(const HttpResponse& error) override;

 private:
  std::string NewBlockId(Kind kind, const std::string& call) const override;
  std::string Begin() override;
  std::string BeginBlock(const Block& block) override;
  std::string GrowBlock(const Block& block, std::string_view text) override;
  std::string EndBlock(const Block& block) override;
  std::string End() override;

  // `members`: of the event, beside type and number, each with a comma before it.
  std::string Event(std::string_view type, const std::string& members);
  // An event of a block, or of the only part of its content.
  std::string ItemEvent(std::string_view type, const Block& block, const std::string& item);
  std::string PartEvent(std::string_view type, const Block& block, const std::string& members);
  static std::string Part(const Block& block, const std::string& text);
  static std::string CallId(const Block& block) { return block.id.substr(sizeof "fc_" - 1); }
  std::string Item(const Block& block, bool begun) const;
  struct KindNames;
  static const KindNames& NamesOf(const Block& block);
  std::string Response(const char* status, const std::string& output) const;
  std::string Usage() const;

  const std::string name_;  // that the answer says
  const std::string id_, owner_;
  const int64_t created_;
  const std::string echo_;
  const std::vector<ChatMessage> history_;      // empty if it is not kept
  const std::shared_ptr<ResponseStore> store_;  // null: it is not kept
  int64_t events_ = 0;                          // so far
};

}  // namespace treadle
