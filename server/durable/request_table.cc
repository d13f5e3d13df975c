#include "server/durable/request_table.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

constexpr int64_t kSchema = 1;  // PRAGMA user_version

constexpr char kTables[] =
    "CREATE TABLE requests(number INTEGER PRIMARY KEY, id TEXT NOT NULL, owner TEXT NOT NULL,"
    " request BLOB NOT NULL);"
    // Appended to at its end alone, so that a transaction touches few of its pages.
    "CREATE TABLE pieces(place INTEGER PRIMARY KEY, number INTEGER NOT NULL, piece BLOB NOT NULL);";

absl::Status SyncPath(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool synced = fd >= 0 && fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (synced) return absl::OkStatus();
  return absl::UnavailableError(Str(path, ": ", std::strerror(error)));
}

void Bind(sqlite3_stmt* statement, int place, std::string_view bytes) {
  // Not null where it is empty; outlives the step.
  sqlite3_bind_blob64(statement, place, bytes.empty() ? "" : bytes.data(), bytes.size(),
                      SQLITE_STATIC);
}

std::string_view Blob(sqlite3_stmt* statement, int column) {
  const auto* const data = static_cast<const char*>(sqlite3_column_blob(statement, column));
  return {data, static_cast<size_t>(sqlite3_column_bytes(statement, column))};
}

}  // namespace

RequestTable::RequestTable(std::string path, Database database)
    : path_(std::move(path)),
      database_(std::move(database)),
      begin_(nullptr, sqlite3_finalize),
      commit_(nullptr, sqlite3_finalize),
      insert_(nullptr, sqlite3_finalize),
      append_(nullptr, sqlite3_finalize),
      delete_request_(nullptr, sqlite3_finalize),
      delete_pieces_(nullptr, sqlite3_finalize) {}

RequestTable::~RequestTable() {
  if (log_ >= 0) close(log_);
}

absl::StatusOr<std::unique_ptr<RequestTable>> RequestTable::Open(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return absl::UnavailableError(Str(folder, ": ", error.message()));
  const std::string path = folder + "/requests.sqlite";
  sqlite3* opened = nullptr;
  const int code =
      sqlite3_open_v2(path.c_str(), &opened, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, nullptr);
  Database database(opened, sqlite3_close);
  if (code != SQLITE_OK) {
    return absl::UnavailableError(Str(path, ": ", sqlite3_errstr(code)));
  }
  // What clients ask is not for everybody; the log gets the same permissions.
  std::filesystem::permissions(path, std::filesystem::perms{0600}, error);
  std::unique_ptr<RequestTable> table(new RequestTable(path, std::move(database)));
  TREADLE_RETURN_IF_ERROR(table->Prepare());
  TREADLE_RETURN_IF_ERROR(SyncPath(folder));
  return table;
}

absl::Status RequestTable::Prepare() {
  sqlite3_extended_result_codes(database_.get(), 1);
  // The lock is taken by the first to write, and kept.
  TREADLE_RETURN_IF_ERROR(
      Run("PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL;"
          "BEGIN EXCLUSIVE; COMMIT"));
  TREADLE_ASSIGN_OR_RETURN(Statement version, Compile("PRAGMA user_version"));
  sqlite3_step(version.get());
  const int64_t schema = sqlite3_column_int64(version.get(), 0);
  version.reset();
  if (schema == 0) {
    TREADLE_RETURN_IF_ERROR(
        Run(Str("BEGIN;", kTables, "PRAGMA user_version=", kSchema, ";COMMIT").c_str()));
  } else if (schema != kSchema) {
    return absl::FailedPreconditionError(Str(
        path_, " has schema ", schema, ", which another version of this program wrote; expected ",
        kSchema, ", or another folder"));
  }
  // A commit no longer waits for the disk: Sync does.
  TREADLE_RETURN_IF_ERROR(Run("PRAGMA synchronous=NORMAL"));
  log_ = open((path_ + "-wal").c_str(), O_RDONLY | O_CLOEXEC);
  if (log_ < 0) return absl::UnavailableError(Str(path_, "-wal: ", std::strerror(errno)));
  for (const auto& [statement, sql] :
       {std::pair(&begin_, "BEGIN"), std::pair(&commit_, "COMMIT"),
        std::pair(&insert_, "INSERT INTO requests VALUES(?1, ?2, ?3, ?4)"),
        std::pair(&append_, "INSERT INTO pieces(number, piece) VALUES(?1, ?2)"),
        std::pair(&delete_request_, "DELETE FROM requests WHERE number = ?1"),
        std::pair(&delete_pieces_,
                  "DELETE FROM pieces WHERE place BETWEEN ?2 AND ?3 AND number = ?1")}) {
    TREADLE_ASSIGN_OR_RETURN(*statement, Compile(sql));
  }
  return absl::OkStatus();
}

absl::Status RequestTable::Failed(const char* what) const {
  const int code = sqlite3_errcode(database_.get());
  if (code == SQLITE_BUSY) {
    return absl::FailedPreconditionError(
        Str(path_, " is in use by another process, expected a folder for each server"));
  }
  const int system = sqlite3_system_errno(database_.get());
  return absl::UnavailableError(Str(path_, ": ", what, ": ", sqlite3_errmsg(database_.get()),
                                    system == 0 ? "" : Str(" (", std::strerror(system), ")")));
}

absl::Status RequestTable::Run(const char* sql) {
  if (sqlite3_exec(database_.get(), sql, nullptr, nullptr, nullptr) == SQLITE_OK) {
    return absl::OkStatus();
  }
  return Failed("it cannot be opened");
}

absl::StatusOr<RequestTable::Statement> RequestTable::Compile(const char* sql) {
  sqlite3_stmt* compiled = nullptr;
  if (sqlite3_prepare_v3(database_.get(), sql, -1, SQLITE_PREPARE_PERSISTENT, &compiled, nullptr) !=
      SQLITE_OK) {
    return Failed("it cannot be read");
  }
  return Statement(compiled, sqlite3_finalize);
}

absl::Status RequestTable::Step(sqlite3_stmt* statement, const char* what) {
  const int code = sqlite3_step(statement);
  const absl::Status status = code == SQLITE_DONE ? absl::OkStatus() : Failed(what);
  sqlite3_reset(statement);
  return status;
}

absl::Status RequestTable::Begin() { return Step(begin_.get(), "it cannot be written"); }
absl::Status RequestTable::Commit() { return Step(commit_.get(), "it cannot be written"); }

void RequestTable::Rollback() {
  if (!sqlite3_get_autocommit(database_.get())) {
    sqlite3_exec(database_.get(), "ROLLBACK", nullptr, nullptr, nullptr);
  }
}

absl::Status RequestTable::Insert(const Row& row, std::string_view request) {
  sqlite3_bind_int64(insert_.get(), 1, row.number);
  for (const auto& [place, text] : {std::pair(2, &row.id), std::pair(3, &row.owner)}) {
    sqlite3_bind_text(insert_.get(), place, text->data(), static_cast<int>(text->size()),
                      SQLITE_STATIC);
  }
  Bind(insert_.get(), 4, request);
  return Step(insert_.get(), "a request cannot be written");
}

absl::Status RequestTable::Append(int64_t number, std::string_view piece, PieceRange& range) {
  sqlite3_bind_int64(append_.get(), 1, number);
  Bind(append_.get(), 2, piece);
  TREADLE_RETURN_IF_ERROR(Step(append_.get(), "a piece of an answer cannot be written"));
  range.last = sqlite3_last_insert_rowid(database_.get());
  if (range.first == 0) range.first = range.last;
  return absl::OkStatus();
}

absl::Status RequestTable::Delete(int64_t number, const PieceRange& range) {
  sqlite3_bind_int64(delete_request_.get(), 1, number);
  sqlite3_bind_int64(delete_pieces_.get(), 1, number);
  sqlite3_bind_int64(delete_pieces_.get(), 2, range.first);
  sqlite3_bind_int64(delete_pieces_.get(), 3, range.last);
  TREADLE_RETURN_IF_ERROR(Step(delete_request_.get(), "a request cannot be deleted"));
  return Step(delete_pieces_.get(), "an answer cannot be deleted");
}

absl::StatusOr<std::vector<RequestTable::Row>> RequestTable::Rows() {
  TREADLE_ASSIGN_OR_RETURN(
      const Statement requests,
      Compile("SELECT number, id, owner, length(request) FROM requests ORDER BY number"));
  std::vector<Row> rows;
  std::map<int64_t, size_t> by_number;
  int code;
  while ((code = sqlite3_step(requests.get())) == SQLITE_ROW) {
    const int64_t number = sqlite3_column_int64(requests.get(), 0);
    by_number[number] = rows.size();
    rows.push_back({.number = number,
                    .id = std::string(Blob(requests.get(), 1)),
                    .owner = std::string(Blob(requests.get(), 2)),
                    .bytes = sqlite3_column_int64(requests.get(), 3)});
  }
  if (code != SQLITE_DONE) return Failed("it cannot be read");
  TREADLE_ASSIGN_OR_RETURN(
      const Statement pieces,
      Compile("SELECT place, number, length(piece) FROM pieces ORDER BY place"));
  while ((code = sqlite3_step(pieces.get())) == SQLITE_ROW) {
    const auto row = by_number.find(sqlite3_column_int64(pieces.get(), 1));
    if (row == by_number.end()) continue;
    Row& of = rows[row->second];
    of.pieces.last = sqlite3_column_int64(pieces.get(), 0);
    if (of.pieces.first == 0) of.pieces.first = of.pieces.last;
    of.bytes += sqlite3_column_int64(pieces.get(), 2);
  }
  if (code != SQLITE_DONE) return Failed("it cannot be read");
  return rows;
}

absl::StatusOr<std::string> RequestTable::Request(int64_t number) {
  TREADLE_ASSIGN_OR_RETURN(const Statement one,
                           Compile("SELECT request FROM requests WHERE number = ?1"));
  sqlite3_bind_int64(one.get(), 1, number);
  if (sqlite3_step(one.get()) != SQLITE_ROW) return Failed("a request cannot be read");
  return std::string(Blob(one.get(), 0));
}

absl::Status RequestTable::ForEachPiece(int64_t number, const PieceRange& range,
                                        const std::function<absl::Status(std::string_view)>& take) {
  TREADLE_ASSIGN_OR_RETURN(const Statement pieces,
                           Compile("SELECT piece FROM pieces WHERE place BETWEEN ?2 AND ?3"
                                   " AND number = ?1 ORDER BY place"));
  sqlite3_bind_int64(pieces.get(), 1, number);
  sqlite3_bind_int64(pieces.get(), 2, range.first);
  sqlite3_bind_int64(pieces.get(), 3, range.last);
  int code;
  while ((code = sqlite3_step(pieces.get())) == SQLITE_ROW) {
    TREADLE_RETURN_IF_ERROR(take(Blob(pieces.get(), 0)));
  }
  return code == SQLITE_DONE ? absl::OkStatus() : Failed("an answer cannot be read");
}

absl::Status RequestTable::Sync() const {
  if (fdatasync(log_) == 0) return absl::OkStatus();
  return absl::UnavailableError(Str(path_, "-wal: ", std::strerror(errno)));
}

}  // namespace treadle
