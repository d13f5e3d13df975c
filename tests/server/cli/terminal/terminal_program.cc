#include "tests/server/cli/terminal/terminal_program.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utmp.h>

#include <utility>

#include "base/status.h"

namespace treadle {

TerminalProgram::TerminalProgram(std::vector<std::string> command, std::optional<winsize> size) {
  std::vector<char*> pointers;
  for (std::string& argument : command) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  int ours = -1;
  if (size) {
    TREADLE_CHECK(openpty(&ours, &theirs_, nullptr, nullptr, &*size) == 0);
  } else {
    int ends[2];
    TREADLE_CHECK(pipe2(ends, O_CLOEXEC) == 0);
    ours = ends[0];
    theirs_ = ends[1];
  }
  output_fd_ = ours;
  fcntl(output_fd_, F_SETFD, FD_CLOEXEC);
  pid_ = fork();
  TREADLE_CHECK(pid_ >= 0);
  if (pid_ == 0) {
    if (size) {
      login_tty(theirs_);
    } else {
      dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
      dup2(theirs_, STDOUT_FILENO);
      dup2(theirs_, STDERR_FILENO);
    }
    execv(pointers[0], pointers.data());
    _exit(127);
  }
}

TerminalProgram::~TerminalProgram() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  close(theirs_);
  close(output_fd_);
}

void TerminalProgram::Signal(int signal) const { kill(pid_, signal); }
void TerminalProgram::Type(const std::string& keys) const {
  TREADLE_CHECK(write(output_fd_, keys.data(), keys.size()) == static_cast<ssize_t>(keys.size()));
}
void TerminalProgram::Resize(winsize size) const {
  TREADLE_CHECK(ioctl(output_fd_, TIOCSWINSZ, &size) == 0);
}
bool TerminalProgram::ReadsKeysAsTheyAreTyped() const {
  termios settings{};
  TREADLE_CHECK(tcgetattr(theirs_, &settings) == 0);
  return (settings.c_lflag & (ICANON | ECHO)) == 0;
}

bool TerminalProgram::WaitForText(const std::string& text, size_t from) {
  return WaitFor(
      [&](const std::string& output) { return output.find(text, from) != std::string::npos; });
}

std::optional<int> TerminalProgram::WaitForChange() {
  int status = 0;
  const bool changed = WaitFor(
      [&](const std::string&) { return waitpid(pid_, &status, WNOHANG | WUNTRACED) == pid_; });
  while (Read(0)) {
  }
  if (!changed) return std::nullopt;
  if (!WIFSTOPPED(status)) pid_ = -1;
  return status;
}

int TerminalProgram::WaitForExit() {
  const std::optional<int> status = WaitForChange();
  return status && WIFEXITED(*status) ? WEXITSTATUS(*status) : -1;
}

bool TerminalProgram::Read(int milliseconds) {
  pollfd source = {output_fd_, POLLIN, 0};
  if (poll(&source, 1, milliseconds) <= 0) return false;
  char buffer[4096];
  const ssize_t n = read(output_fd_, buffer, sizeof buffer);
  if (n > 0) output_.append(buffer, static_cast<size_t>(n));
  return n > 0;
}

}  // namespace treadle
