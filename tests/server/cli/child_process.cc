#include "tests/server/cli/child_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "base/status.h"

namespace treadle {

ChildProcess::ChildProcess(const std::vector<std::string>& command) {
  std::vector<char*> arguments;
  for (const std::string& argument : command) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  std::vector<char*> environment;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (!std::string_view(*variable).starts_with("TREADLE_MODEL=")) {
      environment.push_back(*variable);
    }
  }
  environment.push_back(nullptr);
  int ends[2];
  TREADLE_CHECK(pipe2(ends, O_CLOEXEC) == 0);
  pid_ = fork();
  TREADLE_CHECK(pid_ >= 0);
  if (pid_ == 0) {
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    execve(arguments[0], arguments.data(), environment.data());
    _exit(127);
  }
  close(ends[1]);
  pipe_ = ends[0];
}

ChildProcess::~ChildProcess() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  close(pipe_);
}

bool ChildProcess::Read() {
  char buffer[4096];
  const ssize_t n = read(pipe_, buffer, sizeof buffer);
  if (n > 0) output_.append(buffer, n);
  return n > 0;
}

std::string ChildProcess::WaitForLine(const std::string& text) {
  while (true) {
    const size_t at = output_.find(text);
    const size_t end = at == std::string::npos ? at : output_.find('\n', at);
    if (end != std::string::npos) {
      const size_t before = output_.rfind('\n', at);
      const size_t begin = before == std::string::npos ? 0 : before + 1;
      return output_.substr(begin, end - begin);
    }
    if (!Read()) return "";
  }
}

void ChildProcess::Signal(int signal) const { kill(pid_, signal); }

int ChildProcess::Wait() {
  while (Read()) {
  }
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
}

int ChildProcess::Stop() {
  Signal(SIGTERM);
  return Wait();
}

void ChildProcess::Kill() {
  Signal(SIGKILL);
  Wait();
}

std::string RunToEnd(const std::vector<std::string>& command, int code) {
  ChildProcess child(command);
  EXPECT_EQ(child.Wait(), code) << child.output();
  return child.output();
}

std::string WordAfter(const std::string& line, const std::string& text) {
  const size_t at = line.find(text);
  if (at == std::string::npos) return "";
  const size_t begin = at + text.size();
  return line.substr(begin, line.find_first_of(" ,\"\n", begin) - begin);
}

std::vector<int> ChildrenOf(int parent, bool dead) {
  std::vector<int> children;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream file(entry.path() / "stat");
    std::string line;
    if (!std::getline(file, line)) continue;  // none, or gone by now
    char state = 0;
    int its_parent = 0;
    // The name may hold blanks and brackets; what follows its last bracket does not.
    const size_t name_end = line.rfind(')');
    if (std::sscanf(line.c_str() + name_end + 1, " %c %d", &state, &its_parent) == 2 &&
        its_parent == parent && (state == 'Z') == dead) {
      children.push_back(std::stoi(entry.path().filename()));
    }
  }
  std::sort(children.begin(), children.end());
  return children;
}

}  // namespace treadle
