// treadle finetune: trains a LoRA adapter or a soft prompt over a model as it is stored.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "models/checkpoints/fingerprint.h"
#include "net/address.h"
#include "server/cli/command.h"
#include "server/cli/daemon.h"
#include "server/cli/help/terminal.h"
#include "server/cli/models/teacher_forcing_flags.h"
#include "server/cli/progress.h"
#include "training/remote/remote_layers.h"
#include "training/trainer.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr char kExamples[] = R"(Each line of --data is one of
  {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
  {"prompt": "...", "completion": "..."}
  {"text": "..."}
Answers of the assistant, completions and texts are learnt.

Examples:
  treadle finetune --model model.gguf --data haiku.jsonl --output haiku --epochs 3
  treadle finetune --model model.gguf --data haiku.jsonl --output haiku --soft-prompt 20 \
    --soft-prompt-text "Answer in a haiku." --learning-rate 3e-2
  treadle finetune --model Llama-3.2-1B --weights nf4 --data chats.jsonl --output adapter --resume
  treadle finetune --model model.gguf --data haiku.jsonl --output haiku --workers 10.0.0.2:7001,10.0.0.3:7001 \
    --control-secret-file secret)";

constexpr char kCheckpointFile[] = "/checkpoint.safetensors";

volatile std::sig_atomic_t interrupted = 0;
void Interrupt(int) { interrupted = 1; }

struct FinetuneFlags {
  std::string model;
  std::string data;
  std::string output;
  std::string weights;
  std::string soft_prompt_text;
  std::string optimizer = "adamw";
  double epochs = 1;
  int64_t checkpoint_every = 100;
  bool resume = false;
  ExampleOptions examples;
  TrainingOptions training;
  RemoteLayersOptions remote;
  int64_t worker_wait = 60;  // seconds
  std::string control_tls;
  std::string control_secret_file;
};

// Shows one step: drawn again in one line of a terminal, else a line of its own.
class StepLine {
 public:
  explicit StepLine(const TrainingOptions& options) : steps_(options.optimizer.steps) {}

  void Show(const StepReport& report) {
    tokens_ += report.tokens;
    if (first_ < 0) first_ = report.step - 1;
    const double seconds = std::chrono::duration<double>(Clock::now() - began_).count();
    const std::string line =
        absl::StrFormat("step %d/%d, loss %.4f, rate %.2e, %.0f tokens/s", report.step, steps_,
                        report.loss, report.learning_rate, static_cast<double>(tokens_) / seconds);
    if (!isatty(STDERR_FILENO)) {
      std::fprintf(stderr, "%s\n", line.c_str());
      return;
    }
    const double fraction =
        static_cast<double>(report.step - first_) / static_cast<double>(steps_ - first_);
    std::fprintf(stderr, "\r\x1b[K%s%s",
                 ProgressLine(line, fraction, 0, seconds, ColumnsOf(STDERR_FILENO, 80) - 1).c_str(),
                 report.step == steps_ ? "\n" : "");
  }

 private:
  const int64_t steps_;
  const Clock::time_point began_ = Clock::now();
  int64_t tokens_ = 0;
  int64_t first_ = -1;  // steps that an earlier run has done
};

absl::Status PrepareFolder(const FinetuneFlags& flags) {
  std::error_code error;
  fs::create_directories(flags.output, error);
  if (error) return InvalidArgument("--output ", flags.output, ": ", error.message());
  for (const char* name : {"/adapter_model.safetensors", "/adapter_config.json"}) {
    if (fs::exists(flags.output + name, error)) {
      return InvalidArgument("--output ", flags.output, ": has an adapter already");
    }
  }
  if (!flags.resume && fs::exists(flags.output + kCheckpointFile, error)) {
    return InvalidArgument("--output ", flags.output, ": has a checkpoint, from which --resume ",
                           "goes on; expected another folder, or that file removed");
  }
  return absl::OkStatus();
}

// Trains until the end, or a signal; then the checkpoint says where.
absl::Status Run(Trainer& trainer, const FinetuneFlags& flags) {
  const std::string file = flags.output + kCheckpointFile;
  const int64_t steps = flags.training.optimizer.steps;
  StepLine line(flags.training);
  while (trainer.steps_done() < steps) {
    TREADLE_ASSIGN_OR_RETURN(const StepReport report, trainer.Step());
    line.Show(report);
    const bool due = flags.checkpoint_every > 0 && report.step % flags.checkpoint_every == 0;
    if (report.step < steps && (due || interrupted != 0)) {
      TREADLE_RETURN_IF_ERROR(trainer.WriteCheckpoint(file));
    }
    if (report.step < steps && interrupted != 0) {
      return absl::CancelledError(Str("interrupted; --resume goes on from step ", report.step));
    }
  }
  return absl::OkStatus();
}

// The tokens of --soft-prompt-text, as PEFT's tokenizer has them; none without it.
absl::Status ReadSoftPrompt(const FinetuneFlags& flags, const Checkpoint& checkpoint,
                            SoftPromptOptions& options) {
  if (flags.soft_prompt_text.empty()) return absl::OkStatus();
  if (checkpoint.tokenizer() == nullptr) {
    return InvalidArgument(checkpoint.path(), " has no tokenizer, which --soft-prompt-text needs");
  }
  TREADLE_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Create(*checkpoint.tokenizer()));
  TREADLE_ASSIGN_OR_RETURN(options.begin, tokenizer->Encode(flags.soft_prompt_text, {}));
  const int64_t vocab = checkpoint.config().vocab;  // a tokenizer may know more
  const auto has_row = [&](int32_t id) { return id >= 0 && id < vocab; };
  if (!options.begin.empty() && std::ranges::all_of(options.begin, has_row)) {
    return absl::OkStatus();
  }
  return InvalidArgument("--soft-prompt-text: expected one or more tokens of the model's ", vocab);
}

// Has the layers run on --workers.
absl::Status UseWorkers(const FinetuneFlags& flags, const Checkpoint& checkpoint,
                        const std::string& fingerprint, TrainingOptions& training) {
  RemoteLayersOptions remote = flags.remote;
  for (const std::string& worker : remote.workers) {
    if (!worker.starts_with("unix:")) TREADLE_RETURN_IF_ERROR(ParseAddress(worker).status());
    if (std::ranges::count(remote.workers, worker) > 1) {
      return InvalidArgument("--workers has ", worker, " twice");
    }
  }
  TREADLE_ASSIGN_OR_RETURN(
      remote.credentials,
      OpenControlCredentials(flags.control_tls, flags.control_secret_file, [](const LogEvent&) {}));
  remote.fingerprint = fingerprint;
  remote.weights = training.weights.text();
  remote.layers = checkpoint.config().layers;
  remote.hidden = checkpoint.config().hidden;
  remote.lora = training.lora;
  remote.max_sequences = training.batch_size;
  remote.max_length = training.max_length + training.soft_prompt.virtual_tokens;
  remote.patience = std::chrono::seconds(flags.worker_wait);
  remote.log = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
  training.connect = [remote](TrainedAdapter& adapter) { return ConnectLayers(remote, adapter); };
  return absl::OkStatus();
}

absl::Status Finetune(FinetuneFlags& flags) {
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(flags.model));
  TrainingOptions& training = flags.training;
  if (training.soft_prompt.virtual_tokens > 0) training.lora.rank = 0;
  TREADLE_RETURN_IF_ERROR(ReadSoftPrompt(flags, *checkpoint, training.soft_prompt));
  TREADLE_RETURN_IF_ERROR(CheckTrainable(*checkpoint, training.lora));
  TREADLE_ASSIGN_OR_RETURN(training.weights, ParseWeights(flags.weights, *checkpoint));
  TREADLE_RETURN_IF_ERROR(PrepareFolder(flags));
  flags.examples.max_length = training.max_length;
  TREADLE_ASSIGN_OR_RETURN(Examples read, ReadExamples(flags.data, *checkpoint, flags.examples));
  AdamWOptions& optimizer = training.optimizer;
  optimizer.eight_bit = flags.optimizer == "adamw8bit";
  if (optimizer.steps == 0) {
    optimizer.steps = StepsOf(flags.epochs, read.examples.size(), training);
  }
  TREADLE_ASSIGN_OR_RETURN(const std::string model, Fingerprint(*checkpoint));
  training.checkpoint_key =
      Str(model, " ", flags.weights, " ", read.sum, " ", flags.examples.train_on_prompt);
  if (!flags.remote.workers.empty()) {
    TREADLE_RETURN_IF_ERROR(UseWorkers(flags, *checkpoint, model, training));
  }
  const size_t count = read.examples.size();
  training.loading = ShowProgress("loading", checkpoint->file_bytes());
  TREADLE_ASSIGN_OR_RETURN(
      const auto trainer,
      Trainer::Create(*checkpoint, std::move(read.examples), training, flags.output));
  const std::string file = flags.output + kCheckpointFile;
  if (flags.resume) TREADLE_RETURN_IF_ERROR(trainer->Resume(file));
  std::fprintf(stderr, "%s; %s\n%zu examples (%d cut at --max-length), %d steps, %.3g million ",
               checkpoint->model_name().c_str(), trainer->description().c_str(), count,
               static_cast<int>(read.cut), static_cast<int>(optimizer.steps),
               static_cast<double>(trainer->adapter().values().size()) / 1e6);
  std::fprintf(stderr, "numbers to learn\n");
  std::signal(SIGINT, Interrupt);
  std::signal(SIGTERM, Interrupt);
  TREADLE_RETURN_IF_ERROR(Run(*trainer, flags));
  TREADLE_RETURN_IF_ERROR(trainer->adapter().Write(flags.output, flags.model));
  std::error_code error;
  fs::remove(file, error);
  std::fprintf(stderr, "%s: an adapter as PEFT reads it\n", flags.output.c_str());
  return absl::OkStatus();
}

void AddAdapterFlags(CLI::App& app, FinetuneFlags& flags) {
  LoraOptions& lora = flags.training.lora;
  SoftPromptOptions& prompt = flags.training.soft_prompt;
  CLI::Option* const of_lora[] = {
      app.add_option("--lora-rank", lora.rank, "rank of the updates")->check(CLI::Range(1, 1024)),
      app.add_option("--lora-alpha", lora.alpha, "updates are multiplied by alpha / rank")
          ->check(CLI::Range(1e-3, 1e6)),
      app.add_option("--target-modules", lora.targets,
                     "matrices that get an update, some of q,k,v,o,gate,up,down")};
  CLI::Option* const rows =
      app.add_option("--soft-prompt", prompt.virtual_tokens,
                     "train so many embeddings that stand before the text instead of updates")
          ->check(CLI::Range(1, 1 << 20));
  for (CLI::Option* const option : of_lora) rows->excludes(option);
  app.add_option("--soft-prompt-text", flags.soft_prompt_text,
                 "text whose embeddings they begin as, again and again or cut; else tokens drawn "
                 "by --seed")
      ->needs(rows);
}

void AddOptimizerFlags(CLI::App& app, FinetuneFlags& flags) {
  AdamWOptions& adam = flags.training.optimizer;
  app.add_option("--optimizer", flags.optimizer,
                 "adamw, or adamw8bit: its moments in 8 bits, a quarter of the memory")
      ->check(CLI::IsMember({"adamw", "adamw8bit"}));
  app.add_option("--epochs", flags.epochs, "how often each example is seen")
      ->check(CLI::Range(1e-6, 1e6));
  app.add_option("--steps", adam.steps, "steps of the optimizer; 0: as many as --epochs asks for")
      ->check(CLI::Range(0, 1 << 30));
  app.add_option("--learning-rate", adam.learning_rate, "the highest, after the warm-up")
      ->check(CLI::Range(0.0, 10.0));
  app.add_option("--warmup", adam.warmup,
                 "steps in which the learning rate rises from 0; then it falls along a cosine")
      ->check(CLI::Range(0, 1 << 30));
  app.add_option("--weight-decay", adam.weight_decay, "AdamW's, decoupled")
      ->check(CLI::Range(0.0, 10.0));
  app.add_option("--max-gradient-norm", adam.max_gradient_norm,
                 "longer gradients are scaled down to it; 0: none is")
      ->check(CLI::Range(0.0, 1e6));
}

void AddWorkerFlags(CLI::App& app, FinetuneFlags& flags) {
  auto* const workers =
      app.add_option("--workers", flags.remote.workers,
                     "addresses of workers (treadle worker) that run the layers, with commas, in "
                     "the order of the layers; embedding, head, adapter and optimizer stay here")
          ->delimiter(',');
  app.add_option("--worker-wait", flags.worker_wait,
                 "seconds for a worker to be there, or back after it was lost")
      ->check(CLI::Range(1, 1 << 20))
      ->needs(workers);
  AddControlFlags(app, flags.control_tls, flags.control_secret_file);
  for (const char* name : {"--control-tls", "--control-secret-file"}) {
    app.get_option(name)->needs(workers);
  }
}

}  // namespace

int RunFinetune(int argc, char** argv) {
  FinetuneFlags flags;
  TrainingOptions& training = flags.training;
  CLI::App app(
      "Trains a LoRA adapter or a soft prompt over a frozen model, on the CPU, here or through "
      "workers, and writes it for PEFT.");
  app.footer(kExamples);
  app.add_option("--model", flags.model, ".gguf file or Hugging Face folder")->required();
  app.add_option("--data", flags.data, "examples: a file of JSON lines")->required();
  app.add_option("--output", flags.output, "folder of the adapter and of checkpoints")->required();
  app.add_option("--weights", flags.weights,
                 "convert matrices while loading, as for treadle serve; empty: as stored");
  AddAdapterFlags(app, flags);
  AddOptimizerFlags(app, flags);
  app.add_option("--batch-size", training.batch_size, "examples that run together")
      ->check(CLI::Range(1, 4096));
  app.add_option("--gradient-accumulation", training.accumulation, "batches of a step")
      ->check(CLI::Range(1, 4096));
  app.add_option("--max-length", training.max_length, "tokens of an example; longer ones are cut")
      ->check(CLI::Range(2, 1 << 20));
  app.add_flag("--train-on-prompt", flags.examples.train_on_prompt,
               "learn prompts and the other roles' messages, too");
  app.add_flag("--keep-order", training.keep_order,
               "see examples in the order of --data; else each epoch shuffles them");
  app.add_option("--seed", training.seed, "of the adapter's begin and the order of examples");
  app.add_option("--threads", training.threads, "compute threads; 0: one per CPU")
      ->check(CLI::Range(0, 1024));
  app.add_option("--checkpoint-every", flags.checkpoint_every,
                 "steps between checkpoints; 0: none but after a signal")
      ->check(CLI::Range(0, 1 << 30));
  app.add_flag("--resume", flags.resume, "go on from the checkpoint in --output");
  AddWorkerFlags(app, flags);
  if (auto code = ParseFlags(app, "finetune", argc, argv)) return *code;
  return Finish("finetune", Finetune(flags));
}

}  // namespace treadle
