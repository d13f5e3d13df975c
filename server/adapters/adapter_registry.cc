#include "server/adapters/adapter_registry.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "base/quoted.h"
#include "base/status.h"

namespace treadle {
namespace {

constexpr size_t kMaxNameBytes = 256;

absl::Status CheckName(std::string_view name) {
  const bool printable = std::ranges::all_of(name, [](char c) { return c > ' ' && c != 127; });
  if (!name.empty() && name.size() <= kMaxNameBytes && printable) return absl::OkStatus();
  return InvalidArgument("the adapter's name is ", Quoted(name), ", expected 1 to ", kMaxNameBytes,
                         " characters without spaces");
}

}  // namespace

absl::Status AdapterRegistry::Start(Engine& engine) {
  engine_ = &engine;
  try {
    thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error& error) {
    return ResourceExhausted("thread for adapters: ", error.what());
  }
  return absl::OkStatus();
}

void AdapterRegistry::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    Tell();
  }
  if (thread_.joinable()) thread_.join();
}

absl::Status AdapterRegistry::Add(const std::string& name, const std::string& path) {
  TREADLE_RETURN_IF_ERROR(CheckName(name));
  if (std::ranges::find(options_.taken, name) != options_.taken.end()) {
    return absl::AlreadyExistsError(
        Str("the name ", Quoted(name), " is the model's own, expected another"));
  }
  TREADLE_ASSIGN_OR_RETURN(auto file, AdapterFile::Open(path, config_));
  MutexLock lock(mutex_);
  Entry& entry = names_[name];
  entry.path = path;
  entry.file = std::move(file);
  entry.found = false;
  Tell();
  return absl::OkStatus();
}

absl::Status AdapterRegistry::Remove(std::string_view name) {
  MutexLock lock(mutex_);
  const auto found = names_.find(name);
  if (found == names_.end()) return NotFound("there is no adapter ", Quoted(name));
  names_.erase(found);
  return absl::OkStatus();
}

std::string AdapterRegistry::InFolder(std::string_view name) const {
  if (options_.folder.empty() || !CheckName(name).ok()) return "";
  if (name.starts_with('.') || name.find('/') != name.npos) return "";
  const std::filesystem::path path = std::filesystem::path(options_.folder) / name;
  std::error_code error;
  if (std::filesystem::exists(path / "adapter_config.json", error)) return path.string();
  const std::string gguf = path.string() + ".gguf";
  return std::filesystem::exists(gguf, error) ? gguf : "";
}

AdapterRegistry::Entry* AdapterRegistry::Find(const std::string& name) {
  if (const auto found = names_.find(name); found != names_.end()) return &found->second;
  const std::string path = InFolder(name);
  if (path.empty()) return nullptr;
  return &names_.emplace(name, Entry{.path = path, .file = nullptr, .found = true}).first->second;
}

bool AdapterRegistry::Has(std::string_view name) const {
  MutexLock lock(mutex_);
  return names_.contains(name) || !InFolder(name).empty();
}

std::vector<AdapterRegistry::Named> AdapterRegistry::List() const {
  std::vector<Named> list;
  MutexLock lock(mutex_);
  for (const auto& [name, entry] : names_) {
    Named& named = list.emplace_back();
    named.name = name;
    named.path = entry.path;
    named.requests = entry.requests;
    if (!entry.file) continue;
    named.hash = entry.file->hash();
    named.rank = entry.file->rank();
    if (const auto found = loaded_.find(entry.file->id()); found != loaded_.end()) {
      named.loaded = true;
      named.holders = found->second.holders;
    }
  }
  std::error_code error;
  for (std::filesystem::directory_iterator it(options_.folder, error), end; !error && it != end;
       it.increment(error)) {
    std::string name = it->path().filename().string();
    if (it->path().extension() == ".gguf") name = it->path().stem().string();
    const std::string path = names_.contains(name) ? "" : InFolder(name);
    if (!path.empty()) list.push_back({.name = name, .path = path, .hash = ""});
  }
  std::ranges::sort(list, {}, &Named::name);
  return list;
}

AdapterRegistry::Counts AdapterRegistry::counts() const {
  MutexLock lock(mutex_);
  return {.loaded = std::ssize(loaded_),
          .loads = loads_,
          .evictions = evictions_,
          .waiting = std::ssize(waiting_)};
}

std::vector<std::string> AdapterRegistry::Running() const {
  std::vector<std::string> names;
  MutexLock lock(mutex_);
  for (const auto& [name, entry] : names_) {
    const auto found = entry.file ? loaded_.find(entry.file->id()) : loaded_.end();
    if (found != loaded_.end() && found->second.holders > 0) names.push_back(name);
  }
  return names;
}

std::vector<std::string> AdapterRegistry::Waiting() const {
  std::set<std::string> names;
  MutexLock lock(mutex_);
  for (const Waiter& waiter : waiting_) names.insert(waiter.name);
  return {names.begin(), names.end()};
}

std::optional<AdapterHold> AdapterRegistry::Give(Entry& entry) {
  if (!entry.file || entry.file->id() == barred_) return std::nullopt;
  const uint64_t id = entry.file->id();
  const auto found = loaded_.find(id);
  if (found == loaded_.end()) return std::nullopt;
  ++found->second.holders;
  found->second.asked = ++asked_;
  ++entry.requests;
  std::shared_ptr<const void> hold(
      this, [self = shared_from_this(), id](const void*) { self->LetGo(id); });
  return AdapterHold{id, entry.file->hash(), std::move(hold), entry.file->virtual_tokens()};
}

void AdapterRegistry::LetGo(uint64_t id) {
  MutexLock lock(mutex_);
  if (--loaded_.at(id).holders == 0 && !waiting_.empty()) Tell();
}

std::optional<AdapterHold> AdapterRegistry::TryHold(const std::string& name) {
  MutexLock lock(mutex_);
  Entry* const entry = Find(name);
  return entry == nullptr ? std::nullopt : Give(*entry);
}

void AdapterRegistry::Hold(const std::string& name, Clock::time_point deadline, Done done) {
  absl::Status refused;
  {
    MutexLock lock(mutex_);
    if (stopping_) {
      refused = absl::UnavailableError("the server is stopping");
    } else if (std::ssize(waiting_) >= options_.max_waiting) {
      refused = ResourceExhausted(waiting_.size(), " requests wait for adapters already, expected ",
                                  "fewer than ", options_.max_waiting);
    } else {
      waiting_.push_back({name, deadline, std::move(done)});
      Tell();
    }
  }
  if (!refused.ok()) done(refused);
}

void AdapterRegistry::Tell() {
  news_ = true;
  changed_.NotifyAll();
}

void AdapterRegistry::Run() {
  MutexLock lock(mutex_);
  while (!stopping_) {
    news_ = false;
    if (EndOne() || news_) continue;  // it has let go of the lock
    auto next = Clock::time_point::max();
    for (const Waiter& waiter : waiting_) next = std::min(next, waiter.deadline);
    if (next == Clock::time_point::max()) {
      changed_.Wait(mutex_);
    } else {
      changed_.WaitUntil(mutex_, next);
    }
  }
  while (EndOne()) {
  }
}

// Only this thread takes waiters away: while the lock is released, others come behind them.
bool AdapterRegistry::EndOne() {
  bool room_wanted = false;
  for (size_t i = 0; i < waiting_.size(); ++i) {
    std::optional<absl::StatusOr<AdapterHold>> given;
    if (stopping_) {
      given = absl::UnavailableError("the server is stopping");
    } else if (Clock::now() >= waiting_[i].deadline) {
      given = absl::DeadlineExceededError("the deadline passed");
    } else {
      given = Try(std::string(waiting_[i].name), room_wanted);
    }
    if (!given) continue;
    Done done = std::move(waiting_[i].done);
    waiting_.erase(waiting_.begin() + static_cast<ptrdiff_t>(i));
    mutex_.Unlock();
    // What the callback holds goes before the lock is taken again: it may be a session's last
    // reference, and a session that goes lets go of its adapter.
    std::exchange(done, nullptr)(*std::move(given));
    mutex_.Lock();
    return true;
  }
  if (!room_wanted) barred_ = 0;
  return false;
}

std::optional<absl::StatusOr<AdapterHold>> AdapterRegistry::Try(const std::string& name,
                                                                bool& needs_room) {
  Entry* entry = Find(name);
  if (entry == nullptr) return NotFound("there is no adapter ", Quoted(name));
  if (auto given = Give(*entry)) return *std::move(given);
  if (entry->file && entry->file->id() == barred_ && loaded_.contains(barred_)) return std::nullopt;
  if (const absl::Status status = Read(name); !status.ok()) return status;
  entry = Find(name);
  if (entry == nullptr || !entry->file) return std::nullopt;  // was changed meanwhile: once more
  if (auto given = Give(*entry)) return *std::move(given);
  const std::shared_ptr<const AdapterFile> file = entry->file;
  const uint64_t bytes = file->memory(options_.floats);
  if (options_.memory > 0 && bytes > static_cast<uint64_t>(options_.memory)) {
    return ResourceExhausted(entry->path, ": takes ", bytes, " bytes, expected at most ",
                             options_.memory);
  }
  if (!HasRoom(*file, /*beside_held=*/true)) {
    needs_room = true;
    if (barred_ == 0) barred_ = LeastRecent(/*held=*/true);
    return std::nullopt;
  }
  if (const absl::Status status = Load(file); !status.ok()) return status;
  entry = Find(name);
  if (entry == nullptr) return NotFound("there is no adapter ", Quoted(name));
  auto given = Give(*entry);
  if (!given) return std::nullopt;
  return *std::move(given);
}

// Reads the files, unless they were read before and lie there unchanged.
absl::Status AdapterRegistry::Read(const std::string& name) {
  const std::string path = names_.at(name).path;
  std::shared_ptr<const AdapterFile> file = names_.at(name).file;
  if (file && file->IsAtItsPath()) return absl::OkStatus();
  mutex_.Unlock();
  auto opened = AdapterFile::Open(path, config_);
  mutex_.Lock();
  TREADLE_RETURN_IF_ERROR(opened.status());
  const auto entry = names_.find(name);
  if (entry != names_.end() && entry->second.file == file) entry->second.file = *opened;
  return absl::OkStatus();
}

bool AdapterRegistry::HasRoom(const AdapterFile& file, bool beside_held) const {
  int64_t count = 1;
  uint64_t bytes = file.memory(options_.floats);
  for (const auto& [id, loaded] : loaded_) {
    if (beside_held && loaded.holders == 0) continue;
    ++count;
    bytes += loaded.file->memory(options_.floats);
  }
  return count <= options_.max_loaded &&
         (options_.memory == 0 || bytes <= static_cast<uint64_t>(options_.memory));
}

uint64_t AdapterRegistry::LeastRecent(bool held) const {
  uint64_t least = 0, asked = UINT64_MAX;
  for (const auto& [id, loaded] : loaded_) {
    if ((loaded.holders > 0) == held && loaded.asked < asked) least = id, asked = loaded.asked;
  }
  return least;
}

absl::Status AdapterRegistry::Load(std::shared_ptr<const AdapterFile> file) {
  std::vector<uint64_t> evicted;
  while (!HasRoom(*file, /*beside_held=*/false)) {
    evicted.push_back(LeastRecent(/*held=*/false));
    loaded_.erase(evicted.back());
    ++evictions_;
    if (evicted.back() == barred_) barred_ = 0;
  }
  mutex_.Unlock();
  for (const uint64_t id : evicted) engine_->UnloadAdapter(id);
  const absl::Status status = engine_->LoadAdapter(file);
  mutex_.Lock();
  TREADLE_RETURN_IF_ERROR(status);
  ++loads_;
  const uint64_t id = file->id();
  loaded_[id] = {.file = std::move(file)};
  return absl::OkStatus();
}

}  // namespace treadle
