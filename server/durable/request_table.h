// The file of stored requests, by SQLite: FOLDER/requests.sqlite and its write-ahead log. A request
// has a row, and a row for each piece of its answer, in the order in which they were written.
//
// What Commit has taken survives the end of the process; what Sync has seen, that of the machine,
// too. The file is this process's alone while it is open, and its user's alone.
//
// Thread safety: Sync from any thread; all else from one at a time. Errors of the disk are
// Unavailable and name the file and the reason.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct sqlite3;
struct sqlite3_stmt;

namespace treadle {

// Where the pieces of a request's answer are, others' between them.
struct PieceRange {
  int64_t first = 0;  // 0: there is none
  int64_t last = 0;
};

class RequestTable {
 public:
  // Creates the folder and the file where they are missing. FailedPrecondition if another process
  // has the file, or a program with another schema wrote it.
  static absl::StatusOr<std::unique_ptr<RequestTable>> Open(const std::string& folder);
  ~RequestTable();

  struct Row {
    int64_t number = 0;
    std::string id;
    std::string owner;
    PieceRange pieces = {};
    int64_t bytes = 0;
  };
  absl::StatusOr<std::vector<Row>> Rows();

  // Begin, what belongs together, Commit or Rollback.
  absl::Status Begin();
  absl::Status Commit();
  void Rollback();

  // What `row` says of pieces and bytes does not matter.
  absl::Status Insert(const Row& row, std::string_view request);
  // Extends `range`.
  absl::Status Append(int64_t number, std::string_view piece, PieceRange& range);
  absl::Status Delete(int64_t number, const PieceRange& range);
  absl::StatusOr<std::string> Request(int64_t number);
  // In order.
  absl::Status ForEachPiece(int64_t number, const PieceRange& range,
                            const std::function<absl::Status(std::string_view)>& take);

  // What was committed before this began is on the disk.
  absl::Status Sync() const;

 private:
  using Database = std::unique_ptr<sqlite3, int (*)(sqlite3*)>;
  using Statement = std::unique_ptr<sqlite3_stmt, int (*)(sqlite3_stmt*)>;

  RequestTable(std::string path, Database database);
  absl::Status Prepare();
  absl::Status Failed(const char* what) const;
  absl::Status Run(const char* sql);
  absl::Status Step(sqlite3_stmt* statement, const char* what);
  absl::StatusOr<Statement> Compile(const char* sql);

  const std::string path_;
  const Database database_;
  int log_ = -1;  // descriptor of the write-ahead log
  Statement begin_, commit_, insert_, append_, delete_request_, delete_pieces_;
};

}  // namespace treadle
