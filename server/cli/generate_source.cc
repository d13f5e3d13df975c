#include "server/cli/generate_source.h"

#include <grpcpp/grpcpp.h>

#include <random>
#include <utility>

#include "base/status.h"
#include "server/cli/open_model.h"
#include "server/cli/progress.h"
#include "server/grpc/inference.grpc.pb.h"
#include "server/grpc/messages.h"
#include "server/grpc/rpc_status.h"
#include "server/serving_stack.h"
#include "server/session/generation.h"
#include "server/session/request_validation.h"

namespace treadle {
namespace {

// One request through a stack of this process.
absl::Status Run(ServingStack& stack, ValidatedRequest request, const OnResponse& on_response) {
  TREADLE_ASSIGN_OR_RETURN(const RequestPool::Submitted submitted,
                           stack.pool().Submit(request.spec));
  Generation generation({.tokenizer = stack.model().tokenizer.get(),
                         .candidates = request.spec.candidates,
                         .min_new_tokens = request.spec.min_new_tokens,
                         .stop_strings = request.stop_strings,
                         .logprobs = request.spec.top_logprobs >= 0});
  std::vector<TokenDetail> prompt_details;
  for (bool began = false;;) {
    submitted.stream->WaitUntil(Clock::now() + std::chrono::hours(1));
    StreamBatch batch = submitted.stream->Take();
    prompt_details.insert(prompt_details.end(), batch.prompt_detail.begin(),
                          batch.prompt_detail.end());
    const Generation::Update update = generation.Absorb(batch.tokens);
    for (uint32_t candidate : update.stopped) {
      stack.pool().FinishCandidate(submitted.id, candidate);
    }
    if (batch.ended && !batch.status.ok()) return batch.status;
    for (const OutputPart& part : update.parts) {
      v1::GenerateResponse message;
      AppendOutput(part, *message.mutable_output());
      if (!began) FillPromptInfo(request.spec, prompt_details, *message.mutable_prompt_info());
      began = true;
      on_response(message);
    }
    if (batch.ended) {
      v1::GenerateResponse last;
      FillEnd(static_cast<int32_t>(request.spec.prompt.size()), generation.completion_tokens(),
              batch.timings, last);
      on_response(last);
      return absl::OkStatus();
    }
  }
}

}  // namespace

absl::Status GenerateFromServer(const std::string& target, const ClientAccess& access,
                                std::chrono::milliseconds timeout,
                                const v1::GenerateRequest& request, const OnResponse& on_response) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  const auto channel = grpc::CreateCustomChannel(target, access.credentials, arguments);
  const auto stub = v1::Inference::NewStub(channel);
  grpc::ClientContext context;
  if (!access.authorization.empty()) context.AddMetadata("authorization", access.authorization);
  if (timeout.count() > 0) context.set_deadline(std::chrono::system_clock::now() + timeout);
  const auto reader = stub->GenerateStream(&context, request);
  for (v1::GenerateResponse response; reader->Read(&response);) on_response(response);
  const absl::Status status = FromGrpcStatus(reader->Finish());
  if (status.ok()) return status;
  return absl::Status(status.code(), Str(target, ": ", absl::StatusCodeToString(status.code()),
                                         ": ", std::string(status.message())));
}

absl::Status GenerateInProcess(const ServeOptions& options, std::chrono::milliseconds timeout,
                               const v1::GenerateRequest& request, const OnResponse& on_response) {
  TREADLE_RETURN_IF_ERROR(CheckServeOptions(options));
  absl::StatusOr<OpenedModel> opened = absl::UnknownError("");
  {
    Progress progress("loading " + options.model);
    opened = OpenModel(options, [&](double fraction) { progress.Set(fraction); });
  }
  TREADLE_RETURN_IF_ERROR(opened.status());
  TREADLE_ASSIGN_OR_RETURN(
      const std::unique_ptr<ServingStack> stack,
      ServingStack::Create(std::move(opened->served), std::move(opened->engine),
                           SchedulingFrom(options, *opened)));
  const RequestLimits limits{
      .max_batch_size = options.max_batch_size,
      .default_max_new_tokens = static_cast<int32_t>(options.default_max_new_tokens)};
  TREADLE_ASSIGN_OR_RETURN(ValidatedRequest valid, ValidateRequest(request, stack->model(), limits,
                                                                   std::random_device()()));
  if (timeout.count() > 0) valid.spec.deadline = Clock::now() + timeout;
  TREADLE_RETURN_IF_ERROR(stack->Start());
  return Run(*stack, std::move(valid), on_response);
}

}  // namespace treadle
